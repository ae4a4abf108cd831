"""The primary tier: slots of page-aligned memory that nothing pinned ever loses."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tiering_helpers import keys

from kvstore.tiering import PrimaryTier
from kvstore.tiering.primary import Slot  # noqa: TC001 - hypothesis reads the annotations

KEYS = keys(20)


def ready(tier: PrimaryTier, number: int) -> Slot:
    """Block `number`, ready and unpinned."""
    slot = tier.reserve(KEYS[number], tier.slot_bytes)
    assert slot is not None
    tier.publish(slot)
    tier.unpin(slot)
    return slot


def test_every_slot_starts_on_a_page_of_its_own() -> None:
    tier = PrimaryTier(3, 5000)
    slots = [tier.reserve(key, 5000) for key in KEYS[:3]]
    addresses = [slot.view.ctypes.data for slot in slots if slot]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert np.diff(sorted(addresses)).tolist() == [8192, 8192]


def test_a_view_is_cut_to_the_size_of_its_block_and_is_the_memory_itself() -> None:
    tier = PrimaryTier(1, 4096)
    slot = tier.reserve(KEYS[0], 100)
    assert slot is not None
    slot.view[:] = 7
    assert slot.view.nbytes == 100
    tier.publish(slot)
    found = tier.get(KEYS[0])
    assert found is slot
    assert (found.view == 7).all()
    assert tier.memory[:101].tolist() == [7] * 100 + [0]


def test_the_least_recently_used_unpinned_block_leaves_first() -> None:
    tier = PrimaryTier(4, 16)
    slots = [ready(tier, number) for number in range(4)]
    tier.pin(slots[0])  # pinned: stays, though the oldest
    tier.touch([KEYS[1], KEYS[19]])  # touched: younger than 2 and 3
    for newcomer, victim in ((4, 2), (5, 3), (6, 1)):
        ready(tier, newcomer)
        assert tier.get(KEYS[victim]) is None
    assert tier.get(KEYS[0]) is slots[0]
    assert tier.stats().evictions == 3


def test_nothing_is_evicted_that_is_pinned_or_being_written() -> None:
    tier = PrimaryTier(2, 16)
    pinned = ready(tier, 0)
    tier.pin(pinned)
    writing = tier.reserve(KEYS[1], 16)
    assert writing is not None
    assert tier.reserve(KEYS[2], 16) is None
    tier.unpin(pinned)
    assert tier.reserve(KEYS[2], 16) is not None
    assert tier.get(KEYS[0]) is None
    assert tier.get(KEYS[1]) is writing


def test_a_discarded_slot_is_not_reused_while_somebody_may_still_write_into_it() -> None:
    tier = PrimaryTier(1, 16)
    slot = tier.reserve(KEYS[0], 16)
    assert slot is not None
    tier.discard(slot)
    assert tier.get(KEYS[0]) is None
    assert tier.reserve(KEYS[0], 16) is None
    tier.unpin(slot)
    again = tier.reserve(KEYS[0], 16)
    assert again is not None
    assert again is not slot


def test_a_key_may_come_back_while_its_discarded_slot_is_still_held() -> None:
    tier = PrimaryTier(2, 16)
    old = tier.reserve(KEYS[0], 16)
    assert old is not None
    tier.discard(old)
    new = tier.reserve(KEYS[0], 16)
    assert new is not None
    tier.publish(new)
    tier.unpin(old)
    assert tier.get(KEYS[0]) is new
    tier.unpin(new)
    assert tier.stats().free == 1


def test_misuse_is_an_error_that_says_so() -> None:
    tier = PrimaryTier(2, 16)
    slot = ready(tier, 0)
    with pytest.raises(ValueError, match="more often"):
        tier.unpin(slot)
    with pytest.raises(ValueError, match="already here"):
        tier.reserve(KEYS[0], 16)
    with pytest.raises(ValueError, match="larger than a slot"):
        tier.reserve(KEYS[1], 17)
    with pytest.raises(ValueError, match="at least 1"):
        PrimaryTier(0, 16)


def test_the_memory_stays_mapped_as_long_as_a_view_of_it_is_alive() -> None:
    tier = PrimaryTier(1, 4096)
    slot = tier.reserve(KEYS[0], 4096)
    assert slot is not None
    view = memoryview(slot.view)
    pool = weakref.ref(tier.memory)
    del tier, slot
    gc.collect()
    assert pool() is not None
    view[:4] = b"live"
    assert view[:4] == b"live"
    del view
    gc.collect()
    assert pool() is None


def test_torch_is_not_imported_where_there_can_be_no_cuda() -> None:
    code = (
        "import sys; import kvstore.tiering.primary as p; p._CUDA_DEVICES = (); t = p.PrimaryTier(1, 1);"
        "print('torch' in sys.modules, t.page_locked)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_page_locked_memory_that_cannot_be_had_is_an_error_only_if_it_was_asked_for() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match="cannot be had"):
        PrimaryTier(1, 16, page_lock=True)
    assert not PrimaryTier(1, 16).page_locked


class AnyOrderOfCalls(RuleBasedStateMachine):
    """A slot belongs to one block at a time, pinned ones stay, and counts add up, whatever the order of calls."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.tier = PrimaryTier(3, 8)
        self.pins: Counter[Slot] = Counter()
        self.bytes: dict[Slot, int] = {}
        self.serial = 0

    @rule(target=slots, number=st.integers(0, 7))
    def reserve(self, number: int) -> Slot | None:
        if self.tier.get(KEYS[number]) is not None:
            return None
        slot = self.tier.reserve(KEYS[number], 8)
        assert (slot is None) == (len(self.pins) == 3), "refused exactly when all slots are pinned"
        if slot is not None:
            self.pins[slot] = 1
            self.serial += 1
            self.bytes[slot] = self.serial % 256
            slot.view[:] = self.bytes[slot]
        return slot

    @rule(slot=slots)
    def publish(self, slot: Slot | None) -> None:
        if slot in self.pins and not slot.ready and self.tier.get(slot.key) is slot:
            self.tier.publish(slot)

    @rule(slot=slots)
    def pin(self, slot: Slot | None) -> None:
        if slot and self.tier.get(slot.key) is slot and slot.ready:
            self.tier.pin(slot)
            self.pins[slot] += 1

    @rule(slot=slots)
    def unpin(self, slot: Slot | None) -> None:
        if slot in self.pins:
            self.tier.unpin(slot)
            self.pins[slot] -= 1
            self.pins += Counter()

    @rule(slot=slots)
    def discard(self, slot: Slot | None) -> None:
        if slot in self.pins:
            self.tier.discard(slot)

    @rule(number=st.integers(0, 7))
    def touch(self, number: int) -> None:
        self.tier.touch([KEYS[number]])

    @invariant()
    def pinned_memory_is_untouched(self) -> None:
        for slot in self.pins:
            assert (slot.view == self.bytes[slot]).all()
        for slot in self.tier._by_key.values():
            assert (slot.view == self.bytes[slot]).all()

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.tier.stats()
        assert stats.pinned == len(self.pins)
        found = set(self.tier._by_key.values())
        assert stats.free + len(found | set(self.pins)) == 3
        assert all(key == slot.key for key, slot in self.tier._by_key.items())


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
