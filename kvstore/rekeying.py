"""New keys for encrypted tiers: the operator's, or the data keys themselves (`kvstore rekey`).

::

    rewrap      the keyring's data keys are wrapped by another operator's key; no block is touched
    foresee     which blocks a resealing would seal anew, which data keys would go, and which would stay
    reseal      each tenant gets a new data key, every block is sealed anew, then the old keys are dropped

Resealing is for a data key that may have leaked. It works beside readers and writers, who seal with the new key from
their next batch on. What is interrupted is gone on with by the same call: blocks say what they are sealed with. A block
is replaced where it is (`BlockStore.reseal_many`); where a store cannot, it is away for the moment between its removal
and its return, and whoever asks for it then computes it. Old keys are dropped only once nothing that can be read is
under them. Only tenants of whom the named tiers hold a block get a new key: nothing is known of the others' blocks,
which other tiers of the keyring may hold, and their keys stay as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.copying import mark_again
from kvstore.errors import ConfigurationError, KeyringError, TierUnavailable
from kvstore.marks import MarkOutcome
from kvstore.reading import batches
from kvstore.registry import backend_class, open_store
from kvstore.sealing import Keyring, check_options
from kvstore.types import BlockRead, BlockWrite, GetOutcome, ResealOutcome, Unseen
from kvstore.url import READONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey
    from kvstore.url import TierURL

__all__ = ["Foreseen", "KeyUse", "Resealed", "foresee", "keyrings_of", "reseal", "rewrap"]

PASSES = 5
"""How often the tiers are gone through for blocks that a batch under way has still sealed with an old key."""
BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A data key, by its id in hex, and how many blocks of the named tiers are under it."""

    keyring: str
    tenant: str
    key: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What `reseal` would do, as the tiers are now."""

    drop: list[KeyUse]
    """Data keys that would be dropped, once their blocks are under new ones."""
    keep: list[KeyUse]
    """Those of tenants of whom the named tiers hold no block, and those that are new already."""
    unseen: list[Unseen]
    """What cannot be looked into: as long as there is such, no key is dropped."""

    @property
    def blocks(self) -> int:
        """Blocks that would be sealed anew."""
        return sum(use.blocks for use in self.drop)


@dataclass(slots=True)
class Resealed:
    """What became of the blocks: `resealed` are under new keys, `lost` could not be read or not be stored again."""

    resealed: int = 0
    lost: int = 0
    dropped: int = 0
    """Old data keys that were dropped."""
    kept: int = 0
    """Old data keys that were not dropped, for what is `unseen`."""
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    """What could not be looked into: what of it is under an old key could be read by nobody without that."""
    unmarked: int = 0
    """Marks that blocks had, and could not be given again, or only without their pin."""
    not_here: list[KeyUse] = field(default_factory=list[KeyUse])
    """Data keys that stay, as these tiers hold no block of their tenant."""


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


def foresee(
    urls: Sequence[TierURL], keyrings: dict[str, bytes], *, advance: Callable[[int], object] = lambda _: None
) -> Foreseen:
    """What `reseal` would do with these tiers; nothing is changed. Raises what `reseal` does for wrong URLs."""
    _check(urls)
    counts: Counter[bytes] = Counter()
    for url in urls:
        with open_store(url, readonly=True) as store:
            for ids in _key_ids(store):
                counts.update(key_id for key_id in ids if key_id)
                advance(len(ids))
    unseen = [one for url in urls for one in _unseen(url, readonly=True)]
    drop, keep = list[KeyUse](), list[KeyUse]()
    for path, key in keyrings.items():
        with Keyring.open(path, key, create=False) as keyring:
            whose = keyring.ring().tenants
            there = {tenant for key_id, tenant in whose.items() if counts[key_id]}
            goes = _begun(keyring, there)
            goes |= {key_id for key_id, tenant in whose.items() if tenant in there - {whose[one] for one in goes}}
            for key_id, tenant in whose.items():
                (drop if key_id in goes else keep).append(KeyUse(path, tenant, key_id.hex(), counts[key_id]))
    return Foreseen(drop, keep, unseen)


def reseal(
    urls: Sequence[TierURL], keyrings: dict[str, bytes], *, advance: Callable[[int], object] = lambda _: None
) -> Resealed:
    """Seal every block of these tiers under new data keys, then drop the old ones, if every block was seen.

    `urls` have to be all tiers of the keyrings: what another one has of the same tenants under an old key is lost, and
    computed again. `advance` is called with numbers of blocks that were looked at.

    Raises `ConfigurationError` for a read-only URL and `StoreNotFoundError` for one where no tier is, before anything
    is changed; `TierUnavailable` where blocks can be read and not be replaced, and what `open_store` and the stores
    raise: the old keys are kept then, and the same call goes on where it was.
    """
    _check(urls)
    opened = [Keyring.open(path, key, create=False) for path, key in keyrings.items()]
    try:
        there = _tenants_there(urls, opened)
        old = {keyring: _begin(keyring, there) for keyring in opened}
        work = _Resealing(opened, frozenset[bytes]().union(*old.values()), advance)
        left = 0
        for _ in range(PASSES):
            left = sum([work.go_through(url) for url in urls])
            if not left:
                break
        else:
            raise TierUnavailable(
                f"{left} blocks under old data keys were found in the last of {PASSES} passes: others still store under"
                " those keys, or the tier does not let go of blocks; the old keys were kept: run the same again"
            )
        work.report.unseen = [*work.of_later_versions(), *(one for url in urls for one in _unseen(url))]
        for keyring, keys in old.items():
            if work.report.unseen:
                work.report.kept += len(keys)
                continue
            keyring.retire(keys)
            work.report.dropped += len(keys)
        work.report.not_here = [
            KeyUse(str(keyring.path), tenant, key_id.hex(), 0)
            for keyring in opened
            for key_id, tenant in keyring.ring().tenants.items()
            if tenant not in there
        ]
    finally:
        for keyring in opened:
            keyring.close()
    work.report.lost = len(work.lost)
    return work.report


def _check(urls: Iterable[TierURL]) -> None:
    for url in urls:
        if url.validated(backend_class(url).options).option(READONLY):
            raise ConfigurationError(f"{url} is read-only, and its blocks are to be stored anew: leave readonly= out")
        with open_store(url, readonly=True):  # nothing is made where no tier is
            pass


def _key_ids(store: BlockStore) -> Iterator[list[bytes | None]]:
    """The ids of the data keys that the store's blocks are under, some at a time."""
    for space in store.namespaces():
        for infos in batches(space, store.scan(space), BATCH_BYTES):
            yield store.sealed_with(space, [info.key for info in infos])


def _tenants_there(urls: Iterable[TierURL], keyrings: Iterable[Keyring]) -> frozenset[str]:
    """The tenants under whose keys these tiers hold a block; looked for until all are found."""
    whose = {key_id: tenant for keyring in keyrings for key_id, tenant in keyring.ring().tenants.items()}
    wanted, found = frozenset(whose.values()), set[str]()
    for url in urls:
        with open_store(url) as store:  # as what follows does: a thread that purges meanwhile could not open it else
            for ids in _key_ids(store):
                found.update(whose[key_id] for key_id in ids if key_id in whose)
                if found >= wanted:
                    return wanted
    return frozenset(found)


def _begun(keyring: Keyring, there: Collection[str]) -> frozenset[bytes]:
    """The old keys of those tenants that a resealing which was interrupted has left."""
    whose = keyring.ring().tenants
    return frozenset(key_id for key_id in keyring.old_keys() if whose.get(key_id) in there)


def _begin(keyring: Keyring, there: Collection[str]) -> frozenset[bytes]:
    """Give each of those tenants a new key, unless an interrupted resealing has; their old ones, which are to go."""
    begun, whose = _begun(keyring, there), keyring.ring().tenants
    return begun | keyring.renew(set(there) - {whose[key_id] for key_id in begun})


def _unseen(url: TierURL, **options: bool) -> list[Unseen]:
    with open_store(url, **options) as store:
        return store.unseen()


@dataclass(frozen=True, slots=True)
class _Resealing:
    """What is under way. `old`: ids of the data keys that are to go."""

    keyrings: Sequence[Keyring]
    old: frozenset[bytes]
    advance: Callable[[int], object]
    report: Resealed = field(default_factory=Resealed)
    lost: set[tuple[str, str, BlockKey]] = field(default_factory=set["tuple[str, str, BlockKey]"])
    later: dict[tuple[str, str], set[BlockKey]] = field(default_factory=dict["tuple[str, str]", "set[BlockKey]"])
    """Blocks that a later kvstore wrote, by tier and namespace: each once, in however many passes it was met."""

    def of_later_versions(self) -> list[Unseen]:
        """What was met of them, tier by tier."""
        told: list[Unseen] = []
        for (url, name), keys in self.later.items():
            why = f"{url}: namespace {name}: blocks of a later kvstore, which has to seal them anew"
            told.append(Unseen(name, why, len(keys), later=True, whole=False))
        return told

    def go_through(self, url: TierURL) -> int:
        """One pass over one tier; how many blocks could be read with an old key."""
        found = 0
        with open_store(url) as store:
            for space in store.namespaces():
                for infos in batches(space, store.scan(space), BATCH_BYTES):
                    ids = store.sealed_with(space, [info.key for info in infos])
                    stale = {
                        info: key_id for info, key_id in zip(infos, ids, strict=True) if key_id and key_id in self.old
                    }
                    if stale:
                        found += self._reseal(store, space, stale)
                    self._later(store, space, [info for info, key_id in zip(infos, ids, strict=True) if not key_id])
                    self.advance(len(infos))
        return found

    def _reseal(self, store: BlockStore, space: Namespace, stale: Mapping[BlockInfo, bytes]) -> int:
        """Those blocks, with the ids of their data keys; how many could be read."""
        buffers = {info: np.empty(space.block_bytes(info.key.group), np.uint8) for info in stale}
        got = store.check_many(space, [BlockRead(info.key, buffer.data) for info, buffer in buffers.items()])
        readable = [info for info, outcome in zip(stale, got, strict=True) if outcome is GetOutcome.HIT]
        whose = {key_id: tenant for keyring in self.keyrings for key_id, tenant in keyring.ring().tenants.items()}
        writes = {
            info: BlockWrite(info.key, buffers[info].data, info.position, info.parent, whose[stale[info]])
            for info in readable
            if stale[info] in whose  # else its tenant was purged meanwhile
        }
        outcomes = dict(zip(writes, store.reseal_many(space, list(writes.values())), strict=True))
        gone = [info for info, outcome in outcomes.items() if outcome is ResealOutcome.GONE]
        kept = [info for info, outcome in outcomes.items() if outcome is ResealOutcome.RESEALED]
        left = {info: writes[info] for info, outcome in outcomes.items() if outcome is ResealOutcome.KEPT}
        apart = [*left, *(info for info in readable if info not in writes)]
        if apart:
            store.delete_many(space, [info.key for info in apart])
        if left:
            kept += self._put_back(store, space, left)
        self._forget_destroyed(store, space, {info: stale[info] for info in kept})
        self.report.resealed += len(kept)
        unread = [info for info, outcome in zip(stale, got, strict=True) if outcome is GetOutcome.MISS]
        later = self._later(store, space, unread)
        stale = {info: key_id for info, key_id in stale.items() if info not in later}
        names = {info: (str(store.url), space.name, info.key) for info in stale}
        self.lost.update(names[info] for info in stale if info not in gone)
        self.lost.difference_update(names[info] for info in kept)
        return len(readable)

    def _later(self, store: BlockStore, space: Namespace, infos: Sequence[BlockInfo]) -> set[BlockInfo]:
        """Those of the blocks that a later kvstore wrote: they need their key for as long as they are there."""
        found = store.of_later_version(space, [info.key for info in infos]) if infos else []
        later = {info for info, is_later in zip(infos, found, strict=True) if is_later}
        if later:
            self.later.setdefault((str(store.url), space.name), set()).update(info.key for info in later)
        return later

    def _put_back(self, store: BlockStore, space: Namespace, writes: Mapping[BlockInfo, BlockWrite]) -> list[BlockInfo]:
        """Store removed blocks again, with the marks that they had; which of them are back."""
        outcomes = store.put_many(space, list(writes.values()))
        back = [info for info, outcome in zip(writes, outcomes, strict=True) if outcome.present]
        marks = mark_again(store, space, back)
        self.report.unmarked += marks[MarkOutcome.UNPINNED] + marks[MarkOutcome.FAILED]
        return back

    def _forget_destroyed(self, store: BlockStore, space: Namespace, blocks: Mapping[BlockInfo, bytes]) -> None:
        """Remove what was away while its tenant was purged: nobody could find it then, and now it would be back."""
        destroyed = frozenset[bytes]().union(*(keyring.ring().destroyed for keyring in self.keyrings))
        purged = [info.key for info, key_id in blocks.items() if key_id in destroyed]
        if purged:
            store.purge_many(space, purged)
