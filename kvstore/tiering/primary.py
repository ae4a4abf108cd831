"""The primary tier: a pool of page-aligned host memory in slots; every byte passes through it.

A slot's life: `reserve` (pinned, not ready: somebody writes into it), `publish` (ready: found by key), any number of
`pin` and `unpin` around transfers, and eviction in the policy's order once nothing pins it. `discard` takes the key
away at once; the slot is free again when its last pin is gone, so a late writer hits nobody else's block.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.apart.memory import shared_memory
from kvstore.tiering.policy import DEFAULT_POLICY, make_policy
from kvstore.types import NO_PARENT, NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.marks import Mark
    from kvstore.tiering.policy import PolicyFactory
    from kvstore.types import BlockKey

__all__ = ["PrimaryStats", "PrimaryTier", "Slot", "page_aligned"]

log = logging.getLogger(__name__)

_CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(slots=True, eq=False)
class Slot:
    """One block's place in the pool. Compared by identity: a key may come back in another slot."""

    index: int
    key: BlockKey
    view: NDArray[np.uint8]
    """The slot's memory, cut to the block's size."""
    position: int = NO_POSITION
    parent: bytes = NO_PARENT
    pins: int = 1
    ready: bool = False
    mark: Mark | None = None
    """What a tier is to say of the block once it has stored it, or finds that it has it."""

    @property
    def tenant(self) -> str:
        """Whose it is, which decides what an encrypted tier seals it with."""
        return "" if self.mark is None else self.mark.tenant


@dataclass(frozen=True, slots=True)
class PrimaryStats:
    """How full the primary tier is, in slots, and what it evicted since it was made."""

    slots: int
    slot_bytes: int
    ready: int
    pinned: int
    free: int
    evictions: int
    pinned_memory: bool


class PrimaryTier:
    """`slots` places of `slot_bytes` bytes each, every one starting on a page of its own.

    The memory is registered with CUDA where a CUDA device and torch are present, so that copies from and to a GPU are
    asynchronous; `page_lock=False` leaves that out, `True` insists on it (`RuntimeError` where it cannot be had). It
    stays mapped as long as anything refers to a view of it.

    `shared`: memory that another process can be given, as tiers with `io_process` want it; all of it is `memory`.

    `policy` chooses the block to evict: `lru`, `arc`, or a callable that makes one (see `kvstore.tiering.policy`).

    Raises `ValueError` for sizes below one, `ConfigurationError` for an unknown policy, `MemoryError` or `OSError` when
    the memory is not to be had.

    Threads: one, the manager's, makes all calls. Views may be read and written on any.
    """

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        *,
        policy: str | PolicyFactory = DEFAULT_POLICY,
        page_lock: bool | None = None,
        shared: bool = False,
    ) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a primary tier of {slots} slots of {slot_bytes} bytes: both must be at least 1")
        self._policy = make_policy(policy, slots)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = page_aligned(slots * self._stride, shared=shared)
        self.page_locked = _page_lock(self.memory, page_lock)
        self._free = list(range(slots - 1, -1, -1))
        self._by_key: dict[BlockKey, Slot] = {}
        self._evictable = 0
        self._evictions = 0

    def get(self, key: BlockKey) -> Slot | None:
        """The slot that holds `key`, ready or being written; None where there is none."""
        return self._by_key.get(key)

    def reserve(self, key: BlockKey, nbytes: int) -> Slot | None:
        """A slot for `key`, which has none yet: pinned once, not ready. Evicts an unpinned block if it has to.

        None when every slot is pinned.
        """
        if nbytes > self.slot_bytes or key in self._by_key:
            raise ValueError(f"{key!r} of {nbytes} bytes: already here, or larger than a slot of {self.slot_bytes}")
        if not self._free and not self._evict():
            return None
        index = self._free.pop()
        start = index * self._stride
        slot = Slot(index, key, self.memory[start : start + nbytes])
        self._by_key[key] = slot
        return slot

    def publish(self, slot: Slot) -> None:
        """The bytes have arrived: the block is found from now on. The pin of `reserve` stays with the caller."""
        slot.ready = True
        self._policy.added(slot.key)

    def pin(self, slot: Slot) -> None:
        """Keep a slot that holds a block until `unpin`."""
        if slot.pins == 0:
            self._evictable -= 1
            self._policy.pinned(slot.key)
        slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        """Take back one pin. The last one makes the block evictable, or frees the slot if it was discarded."""
        if slot.pins < 1:
            raise ValueError(f"{slot.key!r} is unpinned more often than it was pinned")
        slot.pins -= 1
        if slot.pins == 0:
            if slot.ready:
                self._evictable += 1
                self._policy.unpinned(slot.key)
            else:
                self.discard(slot)
                self._free.append(slot.index)

    def discard(self, slot: Slot) -> None:
        """Forget the block of a pinned slot now; its memory is reused after the last `unpin`."""
        if self._by_key.get(slot.key) is slot:
            del self._by_key[slot.key]
        if slot.ready:
            slot.ready = False
            self._policy.removed(slot.key)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """A request with these blocks has ended: ready ones become young, the first youngest; others are passed over.

        Without the front of a prefix its end is of no use, so the end leaves first.
        """
        for key in reversed(keys):
            slot = self._by_key.get(key)
            if slot is not None and slot.ready:
                self._policy.touched(key)

    def stats(self) -> PrimaryStats:
        """Counts of this moment; walks over all slots."""
        slots = self._by_key.values()
        ready = sum(slot.ready for slot in slots)
        free = len(self._free)
        return PrimaryStats(
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            ready=ready,
            pinned=self.slots - free - self._evictable,
            free=free,
            evictions=self._evictions,
            pinned_memory=self.page_locked,
        )

    def _evict(self) -> bool:
        key = self._policy.evict() if self._evictable else None
        if key is None:
            return False
        slot = self._by_key.get(key)
        if slot is None or slot.pins:
            raise RuntimeError(f"{type(self._policy).__name__} chose to evict {key!r}, which is pinned or not here")
        del self._by_key[key]
        self._free.append(slot.index)
        self._evictable -= 1
        self._evictions += 1
        return True


def page_aligned(nbytes: int, *, shared: bool = False) -> NDArray[np.uint8]:
    """Private anonymous memory, or such that can be shared; the array (and every view of it) keeps it mapped."""
    if shared:
        return shared_memory(nbytes)
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8)


def _page_lock(pool: NDArray[np.uint8], wanted: bool | None) -> bool:
    """Register the pool with CUDA; False where that is not wanted or there is no CUDA device."""
    if wanted is False or not (wanted or _cuda_may_be_here()):
        return False
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        runtime: Any = cast("Any", torch.cuda).cudart()  # untyped, and None without CUDA
        if int(runtime.cudaHostRegister(pool.ctypes.data, pool.nbytes, 0)) != 0:
            raise RuntimeError(f"CUDA refused to register {pool.nbytes} bytes; is the locked-memory limit too low?")
    except (ImportError, RuntimeError) as error:
        if wanted:
            raise RuntimeError(f"page-locked memory was asked for and cannot be had: {error}") from error
        log.warning("the primary tier is not page-locked, copies to the GPU will be slower: %s", error)
        return False
    weakref.finalize(pool, runtime.cudaHostUnregister, pool.ctypes.data)
    return True


def _cuda_may_be_here() -> bool:
    """Cheap and certain enough not to import torch on a machine without a GPU."""
    return any(Path(device).exists() for device in _CUDA_DEVICES) or (
        "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_available())
    )
