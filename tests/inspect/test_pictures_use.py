"""Pictures of use: every block is counted once, every byte at its time, and axes say in what."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason='pip install "kvstore-tiers[inspect]"')
pd = pytest.importorskip("pandas", reason='pip install "kvstore-tiers[inspect]"')

from pictures_helpers import NOW, table, texts  # noqa: E402

from kvstore.inspect.pictures import Picture, ages, occupancy, reuse  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

AT = NOW.timestamp()
GIB, MIB = 1 << 30, 1 << 20


def bars(picture: Picture, axes: int = 0) -> list[Any]:
    return [bar for group in picture.axes[axes].containers for bar in group]


def heights(picture: Picture, axes: int = 0) -> NDArray[np.float64]:
    """Of each group of bars."""
    return np.array([[bar.get_height() for bar in group] for group in picture.axes[axes].containers])


@pytest.mark.parametrize("by", ["created", "last_used"])
@pytest.mark.parametrize("count", [1, 2, 500, 20_000])
def test_bars_of_ages_sum_to_the_blocks(count: int, by: str) -> None:
    blocks = table(count)
    never, again = heights(ages(blocks, by=by, now=AT)).sum(1)
    assert (never, again) == ((blocks["hits"] == 0).sum(), (blocks["hits"] > 0).sum())


def test_as_bytes_they_sum_to_what_is_stored() -> None:
    blocks = table(3000)
    picture = ages(blocks, weight="bytes", now=AT)
    assert heights(picture).sum() * GIB == pytest.approx(blocks["stored_bytes"].sum())
    assert "stored size (GiB)" in texts(picture)


def test_a_block_is_in_the_bar_of_its_age() -> None:
    times = [NOW - timedelta(days=days) for days in (1, 2, 2, 10)]
    blocks = {"created": times, "last_used": times, "hits": [0, 0, 1, 0], "stored_bytes": [1] * 4}
    picture = ages(blocks, now=AT, bins=10)
    edges = [bar.get_x() / 86400 for bar in bars(picture)[:10]]
    never, again = heights(picture)
    assert edges == pytest.approx(range(10))
    assert never.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert again.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert [bar.get_y() for bar in bars(picture)[10:13]] == [0, 1, 1]
    assert "time since the last use (days)" in texts(picture)


def test_where_ages_span_much_bins_get_wider_and_nothing_is_lost() -> None:
    spread = [AT - age for age in (0.001, 1, 60, 3600, 86400, 30 * 86400)]
    blocks = {"created": spread, "last_used": spread, "hits": [0] * 6, "stored_bytes": [1] * 6}
    picture = ages(blocks, now=AT)
    assert heights(picture).sum() == 6
    assert picture.axes[0].get_xscale() == "log"
    assert "30 days" in texts(picture)
    assert "bins get wider; the first has all that is younger" in texts(picture)


@pytest.mark.parametrize("convert", [list, np.array, pd.Series], ids=["list", "numpy", "pandas"])
def test_moments_come_as_whatever_a_table_has(convert: Any) -> None:
    moments = [NOW - timedelta(days=days) for days in (1, 4)]
    if convert is np.array:
        moments = [np.datetime64(moment.replace(tzinfo=None), "us") for moment in moments]
    blocks = {"created": convert(moments), "last_used": convert(moments), "hits": [0, 0], "stored_bytes": [1, 1]}
    assert heights(ages(blocks, now=AT, bins=4))[0].tolist() == [0, 1, 0, 1]


def test_hits_are_counted_in_bins_that_say_their_limits() -> None:
    blocks = table(8).assign(hits=[0, 0, 0, 1, 2, 3, 4, 9])
    picture = reuse(blocks)
    assert heights(picture).ravel().tolist() == [3, 1, 2, 1, 1]
    labels = [label.get_text() for label in picture.axes[0].get_xticklabels()]
    assert labels == ["0", "1", "2–3", "4–7", "8–15"]


@pytest.mark.parametrize("most", [0, 1, 255, 256, 10_000_000])
def test_no_number_of_hits_is_too_large(most: int) -> None:
    blocks = table(2).assign(hits=[0, most])
    picture = reuse(blocks)
    assert heights(picture).sum() == 2
    assert len(bars(picture)) <= 16


def test_the_curve_says_how_few_bytes_have_most_hits() -> None:
    blocks = table(4).assign(hits=[6, 2, 0, 0], stored_bytes=[100, 100, 100, 700])
    line = reuse(blocks).axes[1].lines[0]
    assert line.get_xdata().tolist() == pytest.approx([0, 10, 20, 30, 100])
    assert line.get_ydata().tolist() == pytest.approx([0, 75, 100, 100, 100])


def test_without_any_hit_there_is_no_curve() -> None:
    assert "no block was loaded yet" in texts(reuse(table(3).assign(hits=0)))


def areas(picture: Picture) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of each part of a stack: corners as (x in days since the epoch, y)."""
    found = [area.get_paths()[0].vertices for area in picture.axes[0].collections]
    return [(vertices[:, 0], vertices[:, 1]) for vertices in found]


def test_what_is_stored_adds_up_over_time_to_all_of_it() -> None:
    created = [AT - age * 86400 for age in (4, 3, 2, 1)]
    used = [AT - age * 86400 for age in (4, 1, 0, 1)]
    blocks = {"created": created, "last_used": used, "hits": [0, 1, 1, 0], "stored_bytes": [MIB] * 4}
    picture = occupancy(blocks)
    (later_x, later_y), (_, top_y) = areas(picture)
    assert top_y.max() == pytest.approx(4)
    # Half a day after the third came, only it and the second are used again.
    between = (later_x > AT / 86400 - 2) & (later_x < AT / 86400 - 1)
    moments = np.unique(later_x)
    assert len(moments) == 5
    assert later_y[np.isclose(later_x, AT / 86400 - 2)].max() == pytest.approx(2)
    assert not between.any()
    # A block that was used at this very moment, or came at it, is among those that are used then.
    assert later_y[np.isclose(later_x, AT / 86400 - 1)].max() == pytest.approx(3)
    assert "stored size (MiB)" in texts(picture)
    assert "time (UTC)" in texts(picture)


@pytest.mark.parametrize("by", [None, "labels", "group"])
def test_the_stack_ends_at_the_sum_whatever_it_is_divided_by(by: str | None) -> None:
    blocks = table(4000)
    top = max(y.max() for _, y in areas(occupancy(blocks, by=by)))
    assert top * GIB == pytest.approx(blocks["stored_bytes"].sum(), rel=1e-6)


def test_it_is_divided_by_the_largest_parts_and_the_rest_is_one() -> None:
    blocks = table(300).assign(labels=[(f"label {index % 9}",) for index in range(300)])
    shown = texts(occupancy(blocks, by="labels"))
    assert "5 others" in shown
    assert sum(f"label {index}" in shown for index in range(9)) == 4
    two = blocks.assign(labels=[("a", "b") if index % 2 else () for index in range(300)])
    assert {"a, b", "none"} <= set(texts(occupancy(two, by="labels")).splitlines())


@pytest.mark.parametrize(
    ("draw", "axis"),
    [(ages, "blocks"), (reuse, "hits of a block"), (occupancy, "stored size (B)")],
    ids=["ages", "reuse", "occupancy"],
)
def test_a_table_without_blocks_gives_a_picture_that_says_so(draw: Any, axis: str) -> None:
    picture = draw(table(0))
    assert "no blocks are stored" in texts(picture)
    assert axis in texts(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [ages, reuse, occupancy], ids=["ages", "reuse", "occupancy"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_one_block_and_very_many_are_drawn_in_no_time(draw: Any, count: int) -> None:
    blocks = table(count)
    began = time.process_time()
    draw(blocks)._repr_png_()
    assert time.process_time() - began < 3


@pytest.mark.parametrize("options", [{"by": "hits"}, {"weight": "tokens"}, {"bins": 0}])
def test_what_cannot_be_drawn_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"in blocks or bytes|at least one"):
        ages(table(2), **options)
