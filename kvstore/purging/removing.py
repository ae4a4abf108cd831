"""The survey of one open store, and the removal of what was asked for, until nothing of it comes back.

For `run`; what is found or removed goes into the tier's receipt.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.errors import TierUnavailable
from kvstore.marks import Mark
from kvstore.purging.receipt import SpaceReceipt
from kvstore.retention import now_ns
from kvstore.tombs import MOST_TOMBSTONES
from kvstore.types import Residue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.purging.receipt import TierReceipt
    from kvstore.purging.request import Request
    from kvstore.types import BlockInfo, Unseen

__all__ = ["TierPurge"]

AT_ONCE = 1000
"""Blocks removed in one call."""

PASSES = 3
"""How often a tier is looked through for what was stored while it was purged."""

SETTLE_AT_MOST_S = 120.0
"""The longest wait for other processes to learn of a purge; beyond, the receipt says what to do."""


@dataclass(frozen=True, slots=True)
class TierPurge:
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
            with self._untold(space) as untold:
                for info in self._infos(space, untold):
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
        self._count_what_is_left(spaces.values())
        if self.asked.is_of_namespaces:
            for space in spaces.values():
                self.store.drop_namespace(space, only_if_empty=True)
        if tombs and self.receipt.blocks > MOST_TOMBSTONES:
            beyond = (
                f"{self.receipt.blocks - MOST_TOMBSTONES} removed blocks have no tombstone: an engine may store them"
            )
            self.receipt.remains.append(Residue(beyond, None, "reset the engines, then purge again"))
        self.receipt.remains += self.store.finish_purge(overwrite=self.overwrite, advance=self._overwritten)

    def _count_what_is_left(self, spaces: Iterable[Namespace]) -> None:
        for space in spaces:
            with self._untold(space) as untold:
                for info in self._infos(space, untold):
                    since = self.receipt.began <= info.created <= now_ns() / 1e9  # else it was there, by whatever clock
                    self.receipt.left += not since
                    self.receipt.stored_since += since
        self._say_unseen(self._unseen())

    def _infos(self, space: Namespace, untold: Callable[[BlockInfo], object] = lambda _: None) -> Iterator[BlockInfo]:
        return self.asked.infos(self.store, space, self.data_keys(), untold)

    @contextmanager
    def _untold(self, space: Namespace) -> Generator[Callable[[BlockInfo], object]]:
        """What counts blocks that do not say whether they are to go; the receipt names them when the body ends."""
        blocks = nbytes = 0

        def count(info: BlockInfo) -> None:
            nonlocal blocks, nbytes
            blocks, nbytes = blocks + 1, nbytes + info.stored_bytes

        yield count
        if blocks:
            what = (
                f"namespace {space.name}: {blocks} blocks that do not say when they were stored or under which key, as"
                " they are of a later kvstore or damaged"
            )
            self.receipt.remains.append(Residue(what, nbytes, f"kvstore purge --namespace {space.name}"))

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


def _count(seen: SpaceReceipt, info: BlockInfo, asked: Request) -> None:
    seen.blocks += 1
    seen.bytes += info.stored_bytes
    seen.pinned += info.pinned
    seen.shared += bool(asked.tenant and any(tenant != asked.tenant for tenant in info.tenants))
