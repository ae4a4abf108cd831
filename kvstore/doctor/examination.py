"""The order of an examination: can the tier be opened, what does its backend say of the place, does a block come back.

The tier is opened read-only and closed again before the backend looks, so that the only users it finds are others.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.doctor.finding import Finding, ok, problem, warning
from kvstore.doctor.trial import trial
from kvstore.errors import InvalidOptionError, KVStoreError, StoreNotFoundError
from kvstore.registry import backend_class, open_store
from kvstore.sealing import ENCRYPTION, KEYRING, Keyring, check_options
from kvstore.sealing.document import Document
from kvstore.url import CAPACITY, READONLY, TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from kvstore.abc import BlockStore
    from kvstore.types import Usage

__all__ = ["examine"]

OPENING = "opening"
KEYS = "encryption"


def examine(url: str | Mapping[str, Any] | TierURL, *, write: bool = False) -> Iterator[Finding]:
    """What the tier at `url` has and lacks here, one finding at a time, as they are made.

    Nothing is created or changed. With `write`, scratch blocks are stored, loaded, timed and removed as well, and what
    had to be made for that is removed too. Raises a `ConfigurationError` when the URL itself is wrong.
    """
    parsed = TierURL.parse(url)
    backend = backend_class(parsed)
    checked = parsed.validated(backend.options)
    if write and checked.option(READONLY):
        raise InvalidOptionError(f"{parsed}: a round trip writes: leave out readonly, or do without the round trip")
    opening, usage = _look_inside(checked)
    try:
        yield from backend.diagnose(checked, usage)
    except (OSError, KVStoreError) as error:
        yield problem("place", f"could not be examined: {error}")
    yield from opening
    if write:
        yield from trial(parsed, beside_others=usage is not None)


def _look_inside(url: TierURL) -> tuple[list[Finding], Usage | None]:
    """What a read-only opening finds, and how full the tier is (None where it could not be opened)."""
    # A capacity would take effect only in an opening that writes; another than the tier's would stop this one.
    options = {name: value for name, value in url.raw_options.items() if name != CAPACITY.name}
    try:
        with open_store(replace(url, raw_options={**options, READONLY.name: True})) as store:
            usage = store.usage()
            return list(_inside(url, store, usage)), usage
    except StoreNotFoundError as error:
        if url.option(READONLY):
            return [problem(OPENING, str(error))], None
        return [
            ok(OPENING, f"nothing to open yet, the first opening that writes makes the tier ({error})"),
            *_keys(url),
        ], None
    except KVStoreError as error:
        return [problem(OPENING, str(error))], None


def _keys(url: TierURL) -> Iterator[Finding]:
    """Whether a tier that is not made yet will have the keys that its URL names."""
    try:
        given = check_options(url) if ENCRYPTION.name in url.raw_options or KEYRING.name in url.raw_options else None
        if given is None:
            return
        operator_key, path = given
        if os.path.exists(path):  # noqa: PTH110 - no error where it may not be looked for
            with Keyring.open(path, operator_key, create=False) as keyring:
                yield ok(
                    KEYS, f"{path}: a keyring of {len(keyring.tenants())} tenants, and the operator's key opens it"
                )
        elif not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
            yield problem(
                KEYS,
                f"{path} is not there, and cannot be made by uid {os.geteuid()}",
                f"make its folder, {path.parent}, writable for whoever opens the tier first; or mend keyring=",
            )
        else:
            Document.new(operator_key)  # nothing of it is kept: the package that seals is there
            yield ok(KEYS, f"{path} does not exist; the first opening makes it")
    except KVStoreError as error:
        yield problem(KEYS, str(error))


def _inside(url: TierURL, store: BlockStore, usage: Usage) -> Iterator[Finding]:
    can = store.capabilities
    taken = format_size(usage.used + usage.reserved + usage.overhead)
    exact, none = can.capacity_is_exact, ", no capacity"
    limit = f" of {format_size(usage.capacity)}" if usage.capacity else none if exact else ""
    yield ok(OPENING, f"{usage.blocks} blocks, {taken}{limit}; I/O {can.io}")
    for note in can.notes:
        if note.startswith("client: "):
            yield ok(OPENING, note)
        else:
            yield warning(OPENING, note, "see what it says; `kvstore verify` reads every block")
    wanted = url.option(CAPACITY) if can.capacity_is_exact else None  # another is each opener's own
    if wanted is not None and wanted.bytes is not None and wanted.bytes != usage.capacity:
        yield warning(
            "capacity",
            f"{format_size(wanted.bytes, exact=True)} is asked for, the tier has {limit}",
            "open it once with the new capacity while nobody else uses it, and give all engines the same",
        )
