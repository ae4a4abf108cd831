"""What a store of names and values keeps about its blocks, each as a value of its own: version, seal, manifests.

Read at the opening and before a put. A device that evicts may take any of them, so each is looked for again and written
anew where it can be told from what else is known.
"""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.errors import StoreSealedError
from kvstore.keyvalue.hooks import if_there
from kvstore.namespace import Namespace
from kvstore.sealing import PLAIN, check_options, open_sealer
from kvstore.types import PutOutcome
from kvstore.values import FORMAT, MANIFEST, SEALED
from kvstore.versions import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from kvstore.keyvalue.hooks import KeyValueHooks
    from kvstore.sealing import Sealer

__all__ = ["Books"]


class Books:
    """Of one store, through its hooks; raises what they raise. Thread-safe as they are."""

    def __init__(self, store: KeyValueHooks) -> None:
        self._store = store

    def agree_on_format(self) -> None:
        """That the values are of our version is said by one of its own, which is looked at before any other. Raises a
        `StoreOpenError` for another version.
        """
        store = self._store
        said = if_there(store.read_value, FORMAT)
        if said is None:
            if not store.readonly:
                outcome = store.write_checked(FORMAT, [memoryview(str(FORMAT_VERSION).encode())])
                if not outcome.present and outcome is not PutOutcome.FULL:  # a full one is read, purged, and evicts
                    raise OSError(errno.EROFS, f"the store refuses it: {outcome.value}", FORMAT)
            return
        found = said.decode("ascii", errors="replace")
        check_version(
            int(found) if found.isdecimal() else found,
            f"{store.url}: {FORMAT!r} says that it",
            "remove all its values, or name another place; it is a cache, and is filled anew",
        )

    def open_sealer(self) -> Sealer | None:
        """What seals the blocks. That they are sealed is said by a value of its own, which the first opening stores."""
        store = self._store
        said = (if_there(store.read_value, SEALED) or b"").decode("ascii", errors="replace")
        found = {said} if said else set[str]()
        if not found and check_options(store.url) is not None and store.all_names(MANIFEST):
            found = {PLAIN}
        sealer = open_sealer(store.url, found)
        if sealer is not None and not found and not store.readonly:
            with ExitStack() as undo:
                undo.callback(sealer.close)
                self._record(sealer)
                undo.pop_all()
        return sealer

    def _record(self, sealer: Sealer) -> None:
        ours = sealer.id.encode()
        self._store.write_value(SEALED, ours)
        if self._store.read_value(SEALED) != ours:
            raise StoreSealedError(
                f"{self._store.url} was just encrypted with another keyring: use the same everywhere"
            )

    def manifests(self) -> dict[str, Namespace | None]:
        """What there is, by names of namespaces; None for one that cannot be read."""
        return {name.removeprefix(MANIFEST): self._manifest(name) for name in self._store.all_names(MANIFEST)}

    def keep_manifest(self, namespace: Namespace) -> PutOutcome:
        """See to it that its manifest is there."""
        name = MANIFEST + namespace.name
        if self._manifest(name) is not None:
            return PutOutcome.EXISTS
        parts = [memoryview(json.dumps(namespace.to_manifest()).encode())]
        outcome = self._store.write_checked(name, parts)
        if outcome is PutOutcome.EXISTS and self._manifest(name) is None:
            self._store.discard(name)
            outcome = self._store.write_checked(name, parts)
        return outcome

    def drop_manifest(self, name: str) -> None:
        """Remove that of the namespace with this name."""
        list(self._store.remove_many([MANIFEST + name]))

    def _manifest(self, name: str) -> Namespace | None:
        """The namespace that the manifest of this name describes; None where there is none, or a damaged one."""
        try:
            found = Namespace.from_json(self._store.read_value(name) or b"")
        except (ValueError, LookupError):  # a hook may say in that way that there is no such value
            return None
        return found if name == MANIFEST + found.name else None
