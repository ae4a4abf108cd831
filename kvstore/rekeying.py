"""New keys for encrypted tiers: the operator's, or the data keys themselves (`kvstore rekey`).

::

    rewrap      the keyring's data keys are wrapped by another operator's key; no block is touched
    reseal      each tenant gets a new data key, every block is sealed anew, then the old keys are dropped

Resealing is for a data key that may have leaked. It works beside readers and writers, who seal with the new key from
their next batch on. What is interrupted is gone on with by the same call: blocks say what they are sealed with. A block
is away for the moment between its removal and its return; whoever asks for it then computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ConfigurationError, KeyringError
from kvstore.reading import batches
from kvstore.registry import backend_class, open_store
from kvstore.sealing import Keyring, check_options
from kvstore.types import BlockRead, BlockWrite, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo
    from kvstore.url import TierURL

__all__ = ["Resealed", "keyrings_of", "reseal", "rewrap"]

PASSES = 5
"""How often the tiers are gone through for blocks that a batch under way has still sealed with an old key."""
BATCH_BYTES = 8 << 20


@dataclass(slots=True)
class Resealed:
    """What became of the blocks: `resealed` are under new keys, `lost` could not be read or not be stored again."""

    resealed: int = 0
    lost: int = 0
    dropped: int = 0
    """Old data keys that were dropped."""


def keyrings_of(urls: Iterable[TierURL]) -> dict[str, bytes]:
    """The operator's key of each keyring that these tiers use, by its path. Raises a `ConfigurationError`."""
    found: dict[str, bytes] = {}
    for url in urls:
        given = check_options(url.validated(backend_class(url).options))
        if given is None:
            raise ConfigurationError(f"{url} names no encryption= and keyring=: there is no key to change")
        found[str(given[1].resolve())] = given[0]
    return found


def rewrap(keyrings: dict[str, bytes], new_operator_key: bytes) -> None:
    """Wrap the data keys of these keyrings by `new_operator_key`. Each is written whole or not at all; one that is
    wrapped by it already, as the same call was interrupted, stays as it is.

    Processes that have one open go on with the data keys that they know; to store for a tenant that is new they have to
    be started with the new key. Raises `KeyringError`.
    """
    for path, key in keyrings.items():
        try:
            keyring = Keyring.open(path, key, create=False)
        except KeyringError:
            Keyring.open(path, new_operator_key, create=False).close()
            continue
        try:
            keyring.rewrap(new_operator_key)
        finally:
            keyring.close()


def reseal(
    urls: Sequence[TierURL], keyrings: dict[str, bytes], *, advance: Callable[[int], object] = lambda _: None
) -> Resealed:
    """Seal every block of these tiers under new data keys, then drop the old ones.

    `urls` have to be all tiers of the keyrings: what is elsewhere sealed with an old key is lost, and computed again.
    `advance` is called with numbers of blocks that were looked at. Raises what `open_store` and the stores raise; the
    same call goes on where it was then.
    """
    report = Resealed()
    opened = [Keyring.open(path, key, create=False) for path, key in keyrings.items()]
    try:
        old = {keyring: keyring.old_keys() or keyring.renew() for keyring in opened}
        whose = {key_id: keyring.ring().tenants[key_id] for keyring, keys in old.items() for key_id in keys}
        for _ in range(PASSES):
            if not sum([_reseal_tier(url, whose, report, advance) for url in urls]):
                break
        for keyring, keys in old.items():
            keyring.retire(keys)
            report.dropped += len(keys)
    finally:
        for keyring in opened:
            keyring.close()
    return report


def _reseal_tier(url: TierURL, old: Mapping[bytes, str], report: Resealed, advance: Callable[[int], object]) -> int:
    """One pass over one tier; how many blocks were still sealed with an old key. `old`: whose it is, by its id."""
    found = 0
    with open_store(url) as store:
        for space in store.namespaces():
            for infos in batches(space, store.scan(space), BATCH_BYTES):
                ids = store.sealed_with(space, [info.key for info in infos])
                found_ids = zip(infos, ids, strict=True)
                stale = [(info, old[key_id]) for info, key_id in found_ids if key_id is not None and key_id in old]
                found += len(stale)
                _reseal_blocks(store, space, stale, report)
                advance(len(infos))
    return found


def _reseal_blocks(
    store: BlockStore, space: Namespace, blocks: Sequence[tuple[BlockInfo, str]], report: Resealed
) -> None:
    if not blocks:
        return
    buffers = [np.empty(space.block_bytes(info.key.group), np.uint8) for info, _ in blocks]
    reads = [BlockRead(info.key, buffer.data) for (info, _), buffer in zip(blocks, buffers, strict=True)]
    got = store.get_many_into(space, reads)
    writes = [
        (info, BlockWrite(info.key, buffer.data, info.position, info.parent, tenant))
        for (info, tenant), buffer, outcome in zip(blocks, buffers, got, strict=True)
        if outcome is GetOutcome.HIT
    ]
    store.delete_many(space, [write.key for _, write in writes])
    outcomes = store.put_many(space, [write for _, write in writes])
    kept = [info for (info, _), outcome in zip(writes, outcomes, strict=True) if outcome.present]
    for info in kept:
        for mark in info.marks:
            store.mark_many(space, [info.key], mark)
    report.resealed += len(kept)
    report.lost += len(blocks) - len(kept)
