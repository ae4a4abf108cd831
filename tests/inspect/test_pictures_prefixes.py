"""Pictures of prefixes: what is drawn is what is stored, in proportion, whatever the shape of the tree."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason='pip install "kvstore-tiers[inspect]"')

from hypothesis import given
from hypothesis import strategies as st
from pictures_helpers import BLOCK_BYTES, NOW, Node, deep, every, forest, texts, wide

from kvstore.inspect.pictures import Picture, prefix_tree, treemap
from kvstore.inspect.pictures._forest import squarify

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIB = 1 << 20


def corners(picture: Picture, gid: str) -> NDArray[np.float64]:
    """The polygons of one kind, as (number, corner, x and y)."""
    (found,) = [artist for artist in picture.axes[0].collections if artist.get_gid() == gid]
    return np.array([path.vertices[:4] for path in found.get_paths()], np.float64).reshape(-1, 4, 2)


def extents(picture: Picture, gid: str = "runs") -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of each."""
    each = corners(picture, gid)
    return [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in each]


def shades(picture: Picture) -> list[float]:
    (found,) = [artist for artist in picture.axes[0].collections if artist.get_gid() == "runs"]
    array: Any = found.get_array()
    return list(np.asarray(array))


PAIR = [Node(0, 10, 30, labels=("handbook",), children=[Node(10, 4, 4), Node(10, 2)]), Node(0, 3)]


def test_a_bar_begins_where_what_it_continues_ends_and_is_as_long_as_its_tokens() -> None:
    drawn = extents(prefix_tree(PAIR))
    assert [(left, right) for left, right, _, _ in drawn] == [(0, 160), (160, 224), (160, 192), (0, 48)]
    assert [(top, bottom) for _, _, top, bottom in drawn] == [(0, 2), (0, 1), (1, 2), (2, 3)]


def test_a_beginning_is_as_high_as_all_ends_however_deep_they_are() -> None:
    branch = [Node(20, 1, children=[Node(21, 1), Node(21, 2), Node(21, 3)]), Node(20, 5)]
    drawn = extents(prefix_tree([Node(0, 10, children=[Node(10, 10, children=branch)])]))
    assert [bottom - top for _, _, top, bottom in drawn][:2] == [4, 4]


def test_nothing_is_folded_where_there_is_a_row_for_each_end() -> None:
    roots = forest(3)
    ends = sum(not node.children for node in every(roots))
    assert len(extents(prefix_tree(roots, most_rows=ends))) == len(every(roots))
    assert len(extents(prefix_tree(roots, most_rows=ends - 1))) < len(every(roots))


def test_as_bytes_a_bar_is_as_long_as_what_is_stored() -> None:
    picture = prefix_tree(PAIR, width="bytes")
    lengths = [right - left for left, right, _, _ in extents(picture)]
    assert np.allclose(np.array(lengths) * MIB, np.array([10, 4, 2, 3]) * BLOCK_BYTES)
    assert "stored size (MiB)" in texts(picture)


def test_a_prefix_whose_beginning_is_gone_stands_where_it_belongs() -> None:
    assert extents(prefix_tree([Node(100, 5)]))[0][:2] == (1600, 1680)
    assert extents(prefix_tree([Node(-1, 5)]))[0][:2] == (0, 80)


@pytest.mark.parametrize("seed", range(5))
def test_every_run_has_its_place_and_no_two_the_same(seed: int) -> None:
    roots = forest(seed, prompts=4, users=8)
    drawn = extents(prefix_tree(roots, most_rows=10_000))
    assert len(drawn) == len(every(roots))
    ends = sum(not node.children for node in every(roots))
    assert max(bottom for *_, bottom in drawn) == ends
    area = sum((right - left) * (bottom - top) for left, right, top, bottom in drawn)
    grid = set()
    for left, right, top, bottom in drawn:
        grid |= {(x, y) for x in range(int(left), int(right), 16) for y in range(int(top), int(bottom))}
    assert len(grid) * 16 == area


def test_colours_are_hits_per_block_or_the_time_since_the_last_use() -> None:
    assert shades(prefix_tree(PAIR)) == [3.0, 1.0, 0.0, 0.0]
    assert "hits per block" in texts(prefix_tree(PAIR))
    old = Node(0, 1)
    old.last_used = NOW - timedelta(days=3)
    picture = prefix_tree([old, Node(0, 1)], colour="age", now=NOW.timestamp())
    assert shades(picture) == pytest.approx([3.0, 0.0])
    assert "days since the last use" in texts(picture)


def test_moments_may_be_seconds_as_well_as_datetimes() -> None:
    node: Any = Node(0, 1)
    node.last_used = NOW.timestamp() - 7200
    assert shades(treemap([node], colour="age", now=NOW.timestamp())) == pytest.approx([2.0])


def test_labels_tokens_and_sums_can_be_read() -> None:
    shown = texts(prefix_tree(PAIR))
    assert "handbook: 160 tokens" in shown
    assert "Prefixes: 19 blocks, 13.4 MiB, 3 ends" in shown
    assert "position in the prompt (tokens)" in shown


@pytest.mark.parametrize("rows", [2, 7, 40])
def test_what_there_is_no_room_for_is_folded_and_counted(rows: int) -> None:
    roots = forest(3, prompts=5, users=12)
    picture = prefix_tree(roots, most_rows=rows)
    shown, folded = extents(picture), extents(picture, "folded")
    assert max(bottom for *_, bottom in shown + folded) <= rows
    assert folded
    said = [text for text in texts(picture).splitlines() if "more run" in text or text.startswith("+ ")]
    counts = [int(text.removeprefix("+ ").split()[0].replace(",", "")) for text in said]
    assert sum(counts) <= len(every(roots)) - len(shown)
    assert "more continuations than there is room for" in texts(picture)
    if rows == 40:
        assert sum(counts) > 0


def test_the_largest_are_drawn_and_the_folded_one_says_how_many_and_how_much_is_missing() -> None:
    children = [Node(4, size) for size in (1, 9, 2, 8)]
    picture = prefix_tree([Node(0, 4, children=children)], most_rows=3)
    assert [right - left for left, right, _, _ in extents(picture)] == [64, 144, 128]
    assert extents(picture, "folded") == [(64, 96, 2, 3)]
    assert "2 more runs" in texts(prefix_tree([Node(0, 4, children=[Node(4, 40), *(Node(4, 30),) * 2])], most_rows=2))


@pytest.mark.parametrize("size", ["bytes", "tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_areas_of_the_map_are_in_proportion_and_fill_it(seed: int, size: str) -> None:
    roots = forest(seed)
    picture = treemap(roots, size=size)
    areas = [np.prod(c.max(0) - c.min(0)) for c in corners(picture, "runs")]
    canvas = picture.axes[0]
    whole = np.prod([np.ptp(canvas.get_xlim()), np.ptp(canvas.get_ylim())])
    assert sum(areas) == pytest.approx(whole)
    wanted = np.array([node.stored_bytes if size == "bytes" else node.tokens for node in preorder(roots)])
    assert np.allclose(np.sort(areas) / whole, np.sort(wanted) / wanted.sum())


def preorder(roots: list[Node]) -> list[Node]:
    return [node for root in roots for node in (root, *preorder(root.children))]


def test_a_continuation_lies_within_the_rectangle_of_its_prefix() -> None:
    boxes = dict(zip(("handbook", "long", "short", "alone"), extents(treemap(PAIR)), strict=True))
    left, right, low, high = (
        pick(box[index] for name, box in boxes.items() if name != "alone")
        for index, pick in enumerate((min, max, min, max))
    )
    whole = sum((r - x) * (top - y) for x, r, y, top in boxes.values())
    assert (right - left) * (high - low) == pytest.approx(whole * 16 / 19)


def test_a_map_says_names_sizes_and_what_the_whole_is() -> None:
    shown = texts(treemap(PAIR))
    assert "handbook\n7.03 MiB" in shown
    assert "the whole area is 13.4 MiB as stored" in shown
    assert "the whole area is 304 tokens" in texts(treemap(PAIR, size="tokens"))


@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=60).map(lambda sizes: sorted(sizes, reverse=True)),
    st.floats(0.2, 5),
)
def test_rectangles_have_the_areas_asked_for_and_do_not_overlap(sizes: list[float], height: float) -> None:
    boxes = squarify(sizes, (1.0, 2.0, 1.0, height))
    areas = [w * h for _, _, w, h in boxes]
    assert np.allclose(areas, np.array(sizes) / sum(sizes) * height, rtol=1e-6)
    for left, bottom, width, high in boxes:
        assert left >= 1 - 1e-6
        assert bottom >= 2 - 1e-6
        assert left + width <= 2 + 1e-6
        assert bottom + high <= 2 + height + 1e-6
    for index, (left, bottom, width, high) in enumerate(boxes):
        for other in boxes[:index]:
            across = min(left + width, other[0] + other[2]) - max(left, other[0])
            along = min(bottom + high, other[1] + other[3]) - max(bottom, other[1])
            assert min(across, along) < 1e-6


def test_equal_sizes_become_squares() -> None:
    assert all(w == pytest.approx(h) for _, _, w, h in squarify([1.0] * 16, (0, 0, 1, 1)))


@pytest.mark.parametrize("draw", [prefix_tree, treemap])
def test_a_tier_without_blocks_gives_a_picture_that_says_so(draw: Any) -> None:
    picture = draw([])
    assert "no blocks are stored" in texts(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [prefix_tree, treemap])
def test_one_block_and_a_very_deep_chain_are_drawn(draw: Any) -> None:
    assert len(extents(draw([Node(0, 1)]))) == 1
    assert draw(deep(3000))._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [prefix_tree, treemap])
def test_a_hundred_thousand_runs_take_a_few_seconds(draw: Any) -> None:
    roots = wide(100_000)
    began = time.process_time()
    draw(roots)._repr_png_()
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("draw", "options", "says"),
    [
        (prefix_tree, {"width": "blocks"}, "its bytes or its tokens, not its 'blocks'"),
        (treemap, {"size": "hits"}, "its bytes or its tokens, not its 'hits'"),
        (treemap, {"colour": "red"}, "by hits or by age, not by 'red'"),
    ],
)
def test_what_cannot_be_drawn_is_said(draw: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        draw(PAIR, **options)


def test_a_notebook_shows_a_picture_and_equal_pictures_are_equal_files() -> None:
    one, other = prefix_tree(PAIR)._repr_png_(), prefix_tree(PAIR)._repr_png_()
    assert one == other
    assert b"Software" not in one


def test_neither_a_display_nor_global_state_is_used() -> None:
    import subprocess
    import sys

    code = """
import sys
import matplotlib
before = matplotlib.rcParams.copy()
from types import SimpleNamespace as Run
from kvstore.inspect.pictures import ages, norms, prefix_tree
import numpy as np
run = Run(start=0, blocks=2, tokens=32, stored_bytes=9, hits=1, last_used=1.0, labels=(), children=())
prefix_tree([run])._repr_png_()
norms(np.ones((1, 2, 3, 1, 4), np.float32))._repr_png_()
ages({"created": [1.0], "last_used": [2.0], "hits": [1], "stored_bytes": [5]})._repr_png_()
print("matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy() == before, "pandas" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_without_matplotlib_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kvstore.errors import MissingDependencyError

    for name in [name for name in sys.modules if name.startswith("kvstore.inspect.pictures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "kvstore-tiers\[inspect\]"'):
        __import__("kvstore.inspect.pictures.use")
