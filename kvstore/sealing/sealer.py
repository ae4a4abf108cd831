"""What an open tier seals with: its keyring, asked once for each batch, and how a backend comes by it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvstore.errors import InvalidOptionError, KeyringError, StoreSealedError, TierUnavailable
from kvstore.sealing.keyring import DataKey, Keyring, Ring
from kvstore.sealing.options import ENCRYPTION, KEYRING, check_outside
from kvstore.url import READONLY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from kvstore.url import TierURL

__all__ = ["PLAIN", "Sealer", "check_options", "keyring_of", "open_sealer"]

PLAIN = ""
"""In place of a keyring's id: what is not sealed."""

_log = logging.getLogger("kvstore.sealing")
_open: WeakSet[Keyring] = WeakSet()
"""The keyrings that tiers of this process have open: zarr's codec asks for them."""
_open_lock = threading.Lock()
"""Of that set: it cannot be gone through while another thread changes it."""


class Sealer:
    """The keys of one open tier. Thread-safe. Every call raises `TierUnavailable` where the keyring cannot be read."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self.id = keyring.id
        """The keyring's id, which the tier keeps beside its blocks."""
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def writing(self, tenants: Iterable[str]) -> Mapping[str, DataKey]:
        """For a batch of puts: the data key of each tenant, made where there is none. A tenant for whom none can be
        made is left out, and nothing of it can be stored; that is logged once.
        """
        keys: dict[str, DataKey] = {}
        ring = self.reading()
        for tenant in set(tenants):
            try:
                keys[tenant] = ring.current.get(tenant) or self.keyring.data_key(tenant)
            except KeyringError as error:
                self._tell(str(error))
        return keys

    def reading(self) -> Ring:
        """For a batch of gets: every data key there is now."""
        try:
            return self.keyring.ring()
        except KeyringError as error:
            raise TierUnavailable(str(error)) from error

    def close(self) -> None:
        """Let go of the keyring."""
        with _open_lock:
            _open.discard(self.keyring)
        self.keyring.close()

    def _tell(self, text: str) -> None:
        with self._lock:
            if text not in self._told:
                self._told.add(text)
                _log.warning("blocks cannot be sealed, and are not stored (said once): %s", text)


def keyring_of(keyring_id: str) -> Keyring | None:
    """The keyring of that id, if a tier of this process has it open."""
    with _open_lock:
        return next((keyring for keyring in _open if keyring.id == keyring_id), None)


def check_options(url: TierURL) -> tuple[bytes, Path] | None:
    """The operator's key and where the keyring is, as the validated `url` says; None where nothing is to be sealed.

    For whoever makes something before it can open the keyring. Raises `InvalidOptionError`.
    """
    source, path = url.option(ENCRYPTION), url.option(KEYRING)
    if source is None:
        if path is not None:
            raise InvalidOptionError(f"{url}: keyring= goes with encryption=env:NAME or encryption=file:/path")
        return None
    if path is None:
        raise InvalidOptionError(
            f"{url}: encryption= wants keyring=/path/outside/the/tier.json, where its data keys are kept; it is made"
            " there by the first opening, has to outlive the tier's blocks, and every process that shares the tier"
            " needs the same"
        )
    check_outside(url, path)
    return source.read(), path


def open_sealer(url: TierURL, found: Collection[str], *, readonly: bool = False) -> Sealer | None:
    """What seals the tier at the validated `url`; None where it is not to be sealed.

    `found` are the ids of the keyrings with which what is stored there is sealed, `PLAIN` for what is not. An empty
    keyring is made where nothing is stored yet, unless the place or the URL is `readonly`.

    Raises `InvalidOptionError`, `KeyringError`, `MissingDependencyError`, and `StoreSealedError` where what is stored
    is sealed and no key was given, or is not and one was, or is sealed with another keyring.
    """
    given = check_options(url)
    if given is None:
        if set(found) - {PLAIN}:
            raise StoreSealedError(f"{url} is encrypted: give encryption= and keyring= as when it was made")
        return None
    operator_key, path = given
    if PLAIN in found:
        raise StoreSealedError(
            f"{url} holds blocks that are not encrypted, and with encryption= it would serve none of them: use another"
            " location, and copy them there with kvstore cp"
        )
    keyring = Keyring.open(path, operator_key, create=not (found or readonly or url.option(READONLY)))
    if set(found) - {keyring.id}:
        keyring.close()
        raise StoreSealedError(f"{url} is encrypted with another keyring than {path}: give the one it was made with")
    with _open_lock:
        _open.add(keyring)
    return Sealer(keyring)
