"""Ages and their clock: what jumps of it do, what is taken back when, and in what order blocks go."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import open_store
from kvstore.errors import InvalidOptionError
from kvstore.marks import Mark
from kvstore.retention import (
    AHEAD_S,
    BELIEVED_AFTER_S,
    REMOVED_A_SECOND,
    Allowance,
    Clock,
    Limit,
    Retention,
    now_ns,
    oldest_beyond,
    set_clock,
)
from kvstore.testing.clock import movable_clock
from kvstore.testing.supply import SPACE, get, held, key, keys, writes
from kvstore.types import GetOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.clock import MovableClock

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
HOUR, DAY = 3600.0, 86400.0
START = 1_800_000_000_000_000_000


class Clocks:
    """A wall clock that can be set, and a boot clock that cannot."""

    def __init__(self) -> None:
        self.wall, self.steady = START, 5_000_000_000

    def passes(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)
        self.steady += int(seconds * 1e9)

    def jumps(self, seconds: float) -> None:
        self.wall += int(seconds * 1e9)

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.steady)


@pytest.fixture
def clock() -> Iterator[MovableClock]:
    with movable_clock() as moved:
        yield moved


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    """What all stores go by."""
    set_by_test = Clocks()
    before = set_clock(set_by_test.clock())
    yield set_by_test
    set_clock(before)


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/tier"


# The clock


def test_time_that_passes_is_followed_and_so_is_a_clock_that_is_slewed() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for _ in range(100):
        clocks.passes(10 * DAY)
        clocks.jumps(0.3)
        assert clock.now() == clocks.wall


@pytest.mark.parametrize("jump", [30 * DAY, -30 * DAY, 3600.0, -61.0])
def test_a_jump_is_believed_when_it_has_stood_for_an_hour(jump: float) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.passes(100)
    right = clocks.wall
    clocks.jumps(jump)
    assert clock.now() == right
    clocks.passes(BELIEVED_AFTER_S - 1)
    assert clock.now() == right + int((BELIEVED_AFTER_S - 1) * 1e9)
    clocks.passes(2)
    assert clock.now() == clocks.wall
    clocks.passes(5)
    assert clock.now() == clocks.wall


def test_a_jump_that_is_put_right_leaves_no_trace() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for _ in range(3):
        clocks.jumps(30 * DAY)
        clock.now()
        clocks.passes(0.9 * BELIEVED_AFTER_S)
        clock.now()
        clocks.jumps(-30 * DAY)
        assert clock.now() == clocks.wall


@pytest.mark.parametrize("since", ["used", "stored"])
def test_a_clock_that_jumps_forward_hides_nothing_at_once_and_removes_nothing(
    url: str, clocks: Clocks, since: str
) -> None:
    with open_store(url, ttl="1d", ttl_from=since) as store:
        store.put_many(SPACE, writes(range(5)))
        clocks.jumps(30 * DAY)
        assert get(store, range(5)) == [HIT] * 5
        store.put_many(SPACE, writes([9]))
        assert held(store) == set(keys([*range(5), 9]))
        clocks.passes(1800)
        assert get(store, range(5)) == [HIT] * 5
        clocks.jumps(-30 * DAY)
        clocks.passes(DAY - 1900)
        assert get(store, [9]) == [HIT]
        clocks.passes(DAY)
        assert get(store, [*range(5), 9]) == [MISS] * 6


@pytest.mark.parametrize("since", ["used", "stored"])
def test_a_clock_that_was_ahead_for_a_while_keeps_no_block_for_ever(tmp_path: Path, clocks: Clocks, since: str) -> None:
    for scheme in ("file", "lmdb"):
        url = f"{scheme}://{tmp_path}/{scheme}-{since}"
        set_clock(clocks.clock())
        with open_store(url) as store:
            store.put_many(SPACE, writes([1]))
        clocks.jumps(3650 * DAY)
        set_clock(clocks.clock())  # as a process that starts then believes it
        with open_store(url) as store:
            store.put_many(SPACE, writes([2, 3]))
            store.mark_many(SPACE, keys([3]), Mark("a", pinned=True))
        clocks.jumps(-3650 * DAY)
        set_clock(clocks.clock())
        with open_store(url, ttl="1d", ttl_from=since) as store:
            store.put_many(SPACE, writes([4]))
            clocks.passes(1.1 * DAY)
            assert get(store, [1, 2, 3]) == [MISS, MISS, HIT]
            for _ in range(3):  # each may take back two
                store.put_many(SPACE, writes([5]))
            assert held(store) == set(keys([3, 5]))


def test_who_has_a_clock_that_is_behind_dates_nothing_back(tmp_path: Path, clocks: Clocks) -> None:
    for scheme, wrong in itertools.product(("file", "lmdb"), (0, START - int(100 * DAY * 1e9))):
        url = f"{scheme}://{tmp_path}/{scheme}-{wrong}"
        clocks.wall = START
        set_clock(clocks.clock())
        with open_store(url, ttl="1d") as store:
            store.put_many(SPACE, writes([1]))
        clocks.wall = wrong
        set_clock(clocks.clock())
        with open_store(url, ttl="1d") as store:
            assert get(store, [1]) == [HIT]
            store.put_many(SPACE, writes([2]))
        clocks.wall = START + int(3600e9)
        set_clock(clocks.clock())
        with open_store(url, ttl="1d") as store:
            assert get(store, [1]) == [HIT]
    assert AHEAD_S < DAY


# What a process does with time


def test_a_use_in_another_process_counts_within_a_part_of_the_ttl(tmp_path: Path, clock: MovableClock) -> None:
    """A tier that is only read from: nothing else would write the uses down before it is closed."""
    for scheme in ("file", "lmdb"):
        url = f"{scheme}://{tmp_path}/{scheme}"
        with open_store(url, ttl="8min") as reader, open_store(url, ttl="8min") as other:
            reader.put_many(SPACE, writes([1, 2]))
            for _ in range(20):
                clock.advance(61)
                assert get(reader, [1]) == [HIT]
            assert get(other, [1, 2]) == [HIT, MISS]
            other.put_many(SPACE, writes([3]))
            assert held(other) == set(keys([1, 3]))


@pytest.mark.parametrize("since", ["used", "stored"])
def test_the_share_of_expired_blocks_that_is_taken_back_is_bounded_and_keeps_up(
    url: str, clock: MovableClock, since: str
) -> None:
    with open_store(url) as patient, open_store(url, ttl="1h", ttl_from=since) as store:
        patient.put_many(SPACE, writes(range(300)))
        clock.advance(2 * HOUR)
        store.put_many(SPACE, writes([1000]))
        assert 300 - REMOVED_A_SECOND - 2 - 10 <= store.usage().blocks - 1 <= 300 - REMOVED_A_SECOND + 10
        for number in range(1001, 1140):
            store.put_many(SPACE, writes([number]))
        assert store.usage().blocks == 140


def test_an_allowance_saves_up_no_more_than_a_second() -> None:
    allowance = Allowance()
    assert allowance.take(3) == 6 + REMOVED_A_SECOND
    assert allowance.take(3) <= 6 + REMOVED_A_SECOND // 4
    time.sleep(0.1)
    assert 4 <= allowance.take(0) < REMOVED_A_SECOND


def test_a_tier_with_a_capacity_and_a_ttl_evicts_first_what_has_expired(tmp_path: Path, clock: MovableClock) -> None:
    for scheme in ("file", "lmdb"):
        with open_store(f"{scheme}://{tmp_path}/{scheme}?capacity=8MiB&ttl=1h") as store:
            store.put_many(SPACE, writes(range(20)))
            clock.advance(0.9 * HOUR)
            get(store, [0, 1])
            clock.advance(0.2 * HOUR)
            for number in range(100, 170):
                store.put_many(SPACE, writes([number]))
                usage = store.usage()
                assert usage.used + usage.reserved + usage.overhead <= 8 << 20
            assert not held(store) & set(keys(range(2, 20)))


def test_an_expired_block_that_is_being_read_is_taken_back_later(tmp_path: Path, clock: MovableClock) -> None:
    import fcntl

    url = f"file://{tmp_path}/tier"
    with open_store(url, ttl="1h") as store:
        store.put_many(SPACE, writes([1, 2]))
        clock.advance(2 * HOUR)
        files = [path for path in (tmp_path / "tier" / SPACE.name).rglob("*.0") if path.is_file()]
        with open(files[0], "rb") as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            store.put_many(SPACE, writes([3]))
            assert store.usage().blocks == 2
            assert files[0].stat().st_size > 0
        clock.advance(2 * HOUR)
        store.put_many(SPACE, writes([4]))
        assert held(store) == {key(4)}


# Options, order


@pytest.mark.parametrize("ttl", ["0", "-1d", "soon", "", "1e99", True])
def test_a_ttl_that_makes_no_sense_is_an_error(url: str, ttl: Any) -> None:
    with pytest.raises(InvalidOptionError, match="ttl"):
        open_store(url, ttl=ttl)


def test_what_a_url_says() -> None:
    def said(**options: Any) -> Retention:
        from kvstore.registry import backend_class

        parsed = TierURL.parse("memory://x", **options)
        return Retention.of(parsed.validated(backend_class(parsed).options))

    assert said() == Retention(None, False)
    assert not said()
    assert said(ttl="7d") == Retention(7 * 86400 * 10**9, False)
    assert said(ttl="7d", ttl_from="stored").from_stored
    assert said(ttl="7d").note_of_use_due_ns() == 60 * 10**9
    assert said(ttl="8s").note_of_use_due_ns() == 10**9
    assert said().note_of_use_due_ns() == said(ttl="8s", ttl_from="stored").note_of_use_due_ns() == 60 * 10**9
    before = now_ns()
    assert before <= said(ttl="1s").cutoff() + 10**9 <= now_ns()


@given(
    st.lists(st.tuples(st.integers(0, 20).map(float), st.integers(1, 100)), max_size=60),
    st.integers(-10, 4000),
)
def test_the_oldest_go_and_no_more_than_needed(sized: list[tuple[float, int]], excess: int) -> None:
    limit = oldest_beyond(iter(sized), excess)
    before = sum(nbytes for moment, nbytes in sized if moment < limit.before)
    just_then = sum(nbytes for moment, nbytes in sized if moment == limit.before)
    total = sum(nbytes for _, nbytes in sized)
    if excess <= 0 or not sized:
        assert limit == Limit()
        return
    assert before + limit.tie_bytes == min(excess, total)
    assert limit.tie_bytes <= just_then
    assert before < excess
    assert np.isfinite(limit.before)
