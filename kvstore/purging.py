"""Purge: blocks that are to be gone for good, with a receipt of what was removed and of what no removal reaches.

    survey: scan_marked / scan_ages ──► purge_many, in batches ──► what is left? ──► finish_purge ──► TierReceipt

`kvstore purge` is this with a command line around it. A tier that cannot be opened, or fails half-way, is in the
receipt with what was done; the others are purged all the same. Interrupted, it has removed a part, and the same call
removes the rest.
"""

from __future__ import annotations

import enum
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.abc import REFUSE_S
from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.marks import Mark
from kvstore.registry import backend_class, open_store
from kvstore.retention import now_ns
from kvstore.sealing import Keyring, check_options
from kvstore.tombs import MOST_TOMBSTONES
from kvstore.types import Residue, Unseen
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["Keys", "Receipt", "Request", "SpaceReceipt", "TierReceipt", "purge"]

AT_ONCE = 1000
"""Blocks removed in one call."""

PASSES = 3
"""How often a tier is looked through for what was stored while it was purged."""

SETTLE_AT_MOST_S = 120.0
"""The longest wait for other processes to learn of a purge; beyond, the receipt says what to do."""

ENGINES = (
    "Engines hold copies of blocks in GPU and host memory, which no tier can reach: reset their own caches before the"
    " tombstones end. vLLM: POST /reset_prefix_cache?reset_external=true until it answers success (the route is there"
    " with VLLM_SERVER_DEV_MODE=1), or LLM.reset_prefix_cache(reset_connector=True), or restart it."
)
ARCHIVES = "Archives are copies of their own, and were not looked at: kvstore archive list, kvstore archive rm."


class Keys(enum.Enum):
    """What becomes of the data keys of an encrypted tier."""

    AUTO = "auto"
    """Those of a tenant that is purged as a whole are destroyed, no others."""
    DESTROY = "destroy"
    """The tenant's, or with `Request.all` all in the keyring, other tiers' that share it included. Only where nothing
    else narrows the purge down: a key opens all that was sealed with it.
    """
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Request:
    """Which blocks are to go: those to which all that is given applies. Nothing given is nothing at all, but `all`.

    `namespaces`: names, in full. `label`, `tenant`: what requests or operators said of blocks (`kvstore.marks`).
    `older_than`: seconds since the block was stored.
    """

    namespaces: tuple[str, ...] | None = None
    label: str = ""
    tenant: str = ""
    older_than: float | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if not (self.all or self.namespaces or self.label or self.tenant or self.older_than is not None):
            raise ValueError("which blocks are to go? Give namespaces, a label, a tenant, an age, or `all`")

    @property
    def mark(self) -> Mark:
        """What the blocks are marked with."""
        return Mark(self.label, tenant=self.tenant)

    @property
    def is_whole(self) -> bool:
        """Whether everything goes, or everything of a tenant."""
        return self == Request(all=True) or bool(self.tenant and self == Request(tenant=self.tenant))

    @property
    def is_of_namespaces(self) -> bool:
        """Whether everything goes, of all namespaces or of some."""
        return self.mark == Mark() and self.older_than is None

    def takes(self, name: str) -> bool:
        """Whether blocks of the namespace with this name may go."""
        return self.namespaces is None or name in self.namespaces

    def infos(
        self, store: BlockStore, space: Namespace, data_keys: frozenset[bytes] = frozenset()
    ) -> Iterator[BlockInfo]:
        """The blocks of a namespace that are to go. Raises `ValueError` where the store cannot tell which.

        `data_keys`: ids of the keys that the tenant's blocks are sealed with; for stores that keep no marks.
        """
        if self.mark == Mark():
            found = store.scan_ages(space)
        elif store.capabilities.marks:
            found = store.scan_marked(space, self.mark)
        elif store.capabilities.sealed and self.mark == Mark(tenant=self.tenant):
            found = _sealed_with(store, space, data_keys)
        else:
            raise ValueError("it keeps no labels and tenants: purge it by namespace, by age, or as a whole")
        if self.older_than is None:
            return found
        cutoff = now_ns() / 1e9 - self.older_than
        return (info for info in found if info.created <= cutoff)


@dataclass(slots=True)
class SpaceReceipt:
    """One namespace: what of it was to go, or went. `shared`: blocks that others than the tenant asked for used too."""

    namespace: str
    model: str
    blocks: int = 0
    bytes: int = 0
    pinned: int = 0
    shared: int = 0


@dataclass(slots=True)
class TierReceipt:
    """One tier. `spaces` is what was found, or, if it was no dry run, what was removed."""

    url: str
    began: float
    seconds: float = 0.0
    spaces: list[SpaceReceipt] = field(default_factory=list[SpaceReceipt])
    left: int = 0
    """Blocks that were to go and are still there."""
    stored_since: int = 0
    """Blocks like those asked for that somebody has stored since the purge began, and that are there."""
    refused_until: float | None = None
    """Until when the removed blocks are not stored again; None: no tombstones. Seconds since the epoch."""
    others_know_within: float = 0.0
    """Seconds until other processes know of it."""
    overwritten: int = 0
    """Bytes that were written over, on local devices."""
    remains: list[Residue] = field(default_factory=list[Residue])
    """What no removal reaches."""
    erasable: bool | None = None
    """Whether the data keys of the removed blocks are destroyed, so that no copy of them can be read. None: the tier is
    not encrypted.
    """
    failed: list[str] = field(default_factory=list[str])
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    """What could not be looked into, and is still there: some of it may have to go."""

    @property
    def blocks(self) -> int:
        """Blocks over all namespaces."""
        return sum(space.blocks for space in self.spaces)

    @property
    def bytes(self) -> int:
        """What they occupied."""
        return sum(space.bytes for space in self.spaces)

    @property
    def complete(self) -> bool:
        """Whether all that was to go is gone, as far as the tier goes."""
        return not self.failed and not self.left and not self.unseen


@dataclass(slots=True)
class Receipt:
    """What was asked, what was done, and what remains. Times are seconds since the epoch."""

    asked: Request
    dry_run: bool
    began: float
    ended: float = 0.0
    tiers: list[TierReceipt] = field(default_factory=list[TierReceipt])
    elsewhere: tuple[str, ...] = (ENGINES, ARCHIVES)
    """Copies that are not in the tiers, and what to do about them."""

    @property
    def complete(self) -> bool:
        """Whether every tier is."""
        return all(tier.complete for tier in self.tiers)


def _nothing(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class _Purge:
    """One purge of one open store."""

    store: BlockStore
    asked: Request
    receipt: TierReceipt
    refuse_s: float
    overwrite: bool
    advance: Callable[[int], object]
    data_keys: Callable[[], frozenset[bytes]]
    """Of the tenant, as they are now: where keys are changed or destroyed meanwhile, what is stored is under others."""

    def survey(self) -> None:
        """Count what would go."""
        for space in self._spaces():
            seen = SpaceReceipt(space.name, space.model)
            for info in self._infos(space):
                _count(seen, info, self.asked)
                self.advance(1)
            if seen.blocks:
                self.receipt.spaces.append(seen)
        unseen = self._unseen()
        going = [one for one in unseen if self.asked.is_of_namespaces and not one.later]
        self._add(going)
        self._say_unseen([one for one in unseen if one not in going])

    def run(self) -> None:
        """Remove it."""
        tombs = self.store.capabilities.tombstones and self.refuse_s > 0
        self.receipt.others_know_within = self.store.capabilities.tombstones_seen_s
        with suppress(TierUnavailable):  # what could not be taken in is seen to be unseen, in the end
            self.store.take_in(blocks=self.asked.mark == Mark())
        spaces = {space.fingerprint: space for space in self._spaces()}
        seen = {name: SpaceReceipt(space.name, space.model) for name, space in spaces.items()}
        self.receipt.spaces = list(seen.values())
        if tombs:  # what the first of them says
            self.receipt.refused_until = now_ns() / 1e9 + self.refuse_s
        for _ in range(PASSES):
            if not sum([self._remove(space, seen[name]) for name, space in spaces.items()]):
                break
        if self.asked.is_of_namespaces:
            names = [one.namespace for one in self._unseen() if not one.later]
            self._add(self.store.purge_unseen(names=names, refuse_s=self.refuse_s, overwrite=self.overwrite))
        self._settle(spaces, seen)
        for info in (info for space in spaces.values() for info in self._infos(space)):
            since = self.receipt.began <= info.created <= now_ns() / 1e9  # else it was there, by whatever clock
            self.receipt.left += not since
            self.receipt.stored_since += since
        self._say_unseen(self._unseen())
        if self.asked.is_of_namespaces:
            for space in spaces.values():
                self.store.drop_namespace(space, only_if_empty=True)
        if tombs and self.receipt.blocks > MOST_TOMBSTONES:
            beyond = (
                f"{self.receipt.blocks - MOST_TOMBSTONES} removed blocks have no tombstone: an engine may store them"
            )
            self.receipt.remains.append(Residue(beyond, None, "reset the engines, then purge again"))
        self.receipt.remains += self.store.finish_purge(overwrite=self.overwrite, advance=self._overwritten)

    def _infos(self, space: Namespace) -> Iterator[BlockInfo]:
        return self.asked.infos(self.store, space, self.data_keys())

    def _spaces(self) -> list[Namespace]:
        return [space for space in self.store.namespaces() if self.asked.takes(space.name)]

    def _unseen(self) -> list[Unseen]:
        return [one for one in self.store.unseen() if self.asked.takes(one.namespace)]

    def _add(self, gone: Iterable[Unseen]) -> None:
        """Count what was removed, or would be, without having been seen."""
        known = {space.namespace: space for space in self.receipt.spaces}
        for one in gone:
            space = known.get(one.namespace) or SpaceReceipt(one.namespace, "")
            if one.namespace not in known:
                self.receipt.spaces.append(known.setdefault(one.namespace, space))
            space.blocks += one.blocks
            space.bytes += one.bytes or 0
            self.advance(one.blocks)

    def _say_unseen(self, unseen: Iterable[Unseen]) -> None:
        """Of files beside the blocks nobody knows whose or how old they are: they are not what was asked for, then."""
        for one in unseen:
            if one.whole or self.asked.is_of_namespaces:
                self.receipt.unseen.append(one)
            else:
                self.receipt.remains.append(Residue(one.why, one.bytes))

    def _remove(self, space: Namespace, seen: SpaceReceipt) -> int:
        removed, infos = 0, self._infos(space)
        while some := list(islice(infos, AT_ONCE)):
            keys = [info.key for info in some]
            gone = self.store.purge_many(space, keys, refuse_s=self.refuse_s, overwrite=self.overwrite)
            for info, went in zip(some, gone, strict=True):
                if went:
                    _count(seen, info, self.asked)
                    removed += 1
            self.advance(len(some))
        return removed

    def _settle(self, spaces: Mapping[bytes, Namespace], seen: Mapping[bytes, SpaceReceipt]) -> None:
        """Where others learn of a purge only later, remove what they stored again until then."""
        wait = self.store.capabilities.tombstones_seen_s
        if not wait or not self.receipt.refused_until or not self.receipt.blocks:
            return
        if wait > SETTLE_AT_MOST_S:
            self.receipt.remains.append(Residue("blocks stored again meanwhile", None, f"purge again in {wait:.0f} s"))
            return
        time.sleep(wait)
        for name, space in spaces.items():
            self._remove(space, seen[name])

    def _overwritten(self, nbytes: int) -> None:
        self.receipt.overwritten += nbytes


def _sealed_with(store: BlockStore, space: Namespace, data_keys: frozenset[bytes]) -> Iterator[BlockInfo]:
    """The blocks that are sealed with those keys: each is asked for its id."""
    infos = store.scan_ages(space)
    while some := list(islice(infos, AT_ONCE)):
        ids = store.sealed_with(space, [info.key for info in some])
        yield from (info for info, key_id in zip(some, ids, strict=True) if key_id in data_keys)


def _count(seen: SpaceReceipt, info: BlockInfo, asked: Request) -> None:
    seen.blocks += 1
    seen.bytes += info.stored_bytes
    seen.pinned += info.pinned
    seen.shared += bool(asked.tenant and any(tenant != asked.tenant for tenant in info.tenants))


def _data_keys(url: TierURL | str, tenant: str) -> frozenset[bytes]:
    """Ids of the tenant's data keys, and of all that are no more: what is under those is nobody's. Raises a
    `KVStoreError`.
    """
    tier = TierURL.parse(url) if isinstance(url, str) else url
    found = check_options(tier.validated(backend_class(tier).options))
    if found is None:
        return frozenset()
    with Keyring.open(found[1], found[0], create=False) as keyring:
        ring = keyring.ring()
    return ring.destroyed | {key_id for key_id, whose in ring.tenants.items() if whose == tenant}


def _destroy_keys(url: TierURL | str, asked: Request, keys: Keys) -> bool:
    """Destroy the data keys of those whose blocks go, if that is asked; whether they are. Raises a `KVStoreError`."""
    wanted = asked.is_whole and not asked.all if keys is Keys.AUTO else keys is Keys.DESTROY
    tier = TierURL.parse(url) if isinstance(url, str) else url
    found = check_options(tier.validated(backend_class(tier).options)) if wanted else None
    if found is None:
        return False
    operator_key, path = found
    keyring = Keyring.open(path, operator_key, create=False)
    try:
        for tenant in [asked.tenant] if asked.tenant else keyring.tenants():
            keyring.destroy(tenant)
    finally:
        keyring.close()
    return True


def _beside_keys(tier: TierReceipt, asked: Request, *, marks: bool) -> list[Residue]:
    if not tier.erasable:
        remedy = "purge with --keys destroy" if asked.is_whole else ""
        return [Residue("data keys that open every copy of the removed blocks", None, remedy)]
    found = [Residue("copies of the keyring that somebody kept, beside the operator's key", None, "erase them as well")]
    if asked.tenant and not marks:
        found.append(Residue("blocks that others had stored before the tenant used them: they are under others' keys"))
    shared = sum(space.shared for space in tier.spaces)
    if shared:
        found.append(Residue(f"{shared} blocks of other tenants too: some may be sealed under their keys"))
    return found


def purge(
    urls: Iterable[TierURL | str],
    asked: Request,
    *,
    dry_run: bool,
    refuse_s: float = REFUSE_S,
    overwrite: bool = True,
    keys: Keys = Keys.AUTO,
    advance: Callable[[int], object] = _nothing,
) -> Receipt:
    """Remove blocks from tiers for good, or with `dry_run` say what would go.

    Each tier is opened for itself and closed again. For `refuse_s` seconds the removed blocks are not stored again.
    `overwrite`: what removed blocks leave on the device is written over where that can be done. `keys`: whether the
    data keys that they were encrypted with are destroyed. `advance` is called with each number of blocks that were
    dealt with. Raises nothing for a tier that fails: see `TierReceipt.failed`; `ValueError` where keys would be
    destroyed of more than what goes.
    """
    if keys is Keys.DESTROY and not asked.is_whole:
        raise ValueError("data keys are destroyed with everything, or with everything of a tenant: more is kept here")
    receipt = Receipt(asked, dry_run, now_ns() / 1e9)
    for url in urls:
        tier = TierReceipt(str(url), now_ns() / 1e9)
        began = time.monotonic()
        receipt.tiers.append(tier)
        try:
            with open_store(url, readonly=True):  # nothing is made where no tier is
                pass
            with open_store(url, readonly=True) if dry_run else open_store(url) as store:
                sealed = store.capabilities.sealed
                of_tenant = partial(_data_keys, url, asked.tenant) if sealed and asked.tenant else frozenset[bytes]
                one = _Purge(store, asked, tier, refuse_s, overwrite, advance, of_tenant)
                if dry_run:
                    one.survey()
                    continue
                if sealed:  # first: what is interrupted then has removed nothing, and nobody can read it all the same
                    tier.erasable = _destroy_keys(url, asked, keys)
                one.run()
                if sealed:
                    tier.remains += _beside_keys(tier, asked, marks=store.capabilities.marks)
        except (KVStoreError, ValueError) as error:
            tier.failed.append(str(error))
        finally:
            tier.seconds = time.monotonic() - began
    receipt.ended = now_ns() / 1e9
    return receipt
