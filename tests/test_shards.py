"""Shards: what several ranks wrote is one block, and any other number of ranks reads its part of it.

The tests slice a full tensor themselves, by the rule as an engine has it, and never ask `Shards` what is right.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, chain_digests, open_store
from kvstore.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = 8
HEADS = BlockLayout.canonical(layers=6, tokens=TOKENS, heads=4, head_dim=16, dtype="bfloat16")
LATENT = BlockLayout.latent(layers=6, tokens=TOKENS, latent=40, dtype="float8_e4m3fn")
STATE = BlockLayout("float32", ("layer", "head", "dim", "state"), (2, 8, 4, 4))
SPACE = Namespace("model", "r1", (HEADS, LATENT, STATE), TOKENS)
DIGEST = chain_digests(range(TOKENS), TOKENS)[0]
KEYS = [BlockKey(DIGEST, group) for group in range(3)]


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    location = {"memory": "memory://shards", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://shards"):
        yield location[request.param]


def full(layout: BlockLayout, seed: int = 0) -> NDArray[np.generic]:
    """What the whole model computed, with values that every element type has exactly."""
    return np.random.default_rng(seed).integers(-8, 8, layout.shape).astype(layout.numpy_dtype)


def rank_slice(tensor: NDArray[np.generic], axis: int | None, rank: int, size: int) -> NDArray[np.generic]:
    """What tensor-parallel rank `rank` of `size` computed: its heads, as an engine gives them out."""
    if axis is None:
        return tensor
    heads = tensor.shape[axis]
    mine = [heads * rank // size] if size > heads else [head for head in range(heads) if head * size // heads == rank]
    return np.take(tensor, mine, axis=axis)


CASES = [(HEADS, 3), (LATENT, None), (STATE, 1)]


@pytest.mark.parametrize("writers", [4, 8])
def test_what_four_or_eight_ranks_wrote_two_ranks_and_one_read(url: str, writers: int) -> None:
    """Field report 13: zero or wrong hits with tensor-parallel ranks."""
    tensors = [full(layout, seed) for seed, (layout, _) in enumerate(CASES)]
    blocks = [np.zeros(layout.nbytes, np.uint8) for layout, _ in CASES]
    for (layout, axis), tensor, block in zip(CASES, tensors, blocks, strict=True):
        shards = Shards(layout, tensor=writers)
        for rank in shards.writers:
            shards.to_numpy(block, rank)[...] = rank_slice(tensor, axis, rank, writers)
    with open_store(url) as store:
        assert all(out.present for out in store.put_many(SPACE, list(map(BlockWrite, KEYS, blocks))))
    with open_store(url, readonly=True) as store:
        read = [np.zeros(layout.nbytes, np.uint8) for layout, _ in CASES]
        assert store.get_many_into(SPACE, list(map(BlockRead, KEYS, read))) == [GetOutcome.HIT] * 3
    for (layout, axis), tensor, block in zip(CASES, tensors, read, strict=True):
        for size in (1, 2, 4, 8):
            for rank in range(size):
                mine = Shards(layout, tensor=size).to_numpy(block, rank)
                assert np.array_equal(mine, rank_slice(tensor, axis, rank, size)), (layout.axes, rank, size)
        assert np.array_equal(layout.to_numpy(block), tensor)


def test_a_shard_is_a_view_for_numpy_and_for_torch() -> None:
    pytest.importorskip("torch")
    block = np.zeros(HEADS.nbytes, np.uint8)
    shards = Shards(HEADS, tensor=4)
    array, tensor = shards.to_numpy(block, 2), shards.to_torch(block, 2)
    assert np.shares_memory(array, block)
    assert tensor.untyped_storage().data_ptr() == block.ctypes.data
    tensor[...] = 3
    whole = HEADS.to_numpy(block).astype(np.float32)
    assert (whole[:, :, :, 2] == 3).all()
    assert not whole[:, :, :, [0, 1, 3]].any()
    assert (array.astype(np.float32) == 3).all()


@pytest.mark.parametrize(
    ("heads", "size", "held"),
    [
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (1, 2, [[0], [0]]),
        (4, 4, [[0], [1], [2], [3]]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_heads_go_to_ranks_as_in_vllm(heads: int, size: int, held: list[list[int]]) -> None:
    layout = BlockLayout.canonical(layers=1, tokens=1, heads=heads, head_dim=1, dtype="int8")
    numbered = np.tile(np.arange(heads, dtype=np.int8)[:, None], (1, 2, 1, 1, 1))
    shards = Shards(layout, tensor=size)
    assert [shards.to_numpy(numbered, rank)[0, 0, 0, :, 0].tolist() for rank in range(size)] == held
    assert shards.replicas == max(1, size // heads)


def test_of_ranks_that_hold_the_same_one_writes() -> None:
    assert Shards(LATENT, tensor=8).writers == {0}
    assert Shards(LATENT, tensor=4, stages=(3, 3)).writers == {0, 4}
    assert Shards(HEADS, tensor=8).writers == {0, 2, 4, 6}
    assert Shards(HEADS, tensor=4).writers == {0, 1, 2, 3}


def test_pipeline_stages_hold_their_layers() -> None:
    block = np.zeros(HEADS.nbytes, np.uint8)
    shards = Shards(HEADS, tensor=2, stages=(1, 3, 2))
    assert shards.ranks == 6
    shards.to_numpy(block, 3)[...] = 1  # second stage, second half of the heads
    whole = HEADS.to_numpy(block).astype(np.float32)
    assert (whole[1:4, :, :, 2:] == 1).all()
    assert whole.sum() == 3 * 2 * TOKENS * 2 * 16


def test_a_stage_without_layers_of_the_group_writes_nothing() -> None:
    shards = Shards(HEADS, tensor=2, stages=(0, 6))
    assert shards.writers == {2, 3}
    assert shards.to_numpy(np.zeros(HEADS.nbytes, np.uint8), 0).size == 0


@st.composite
def splits(draw: st.DrawFn) -> Shards:
    """Any layout that can be split, and any way to split it."""
    tensor = draw(st.integers(1, 8))
    heads = draw(st.sampled_from([count for count in range(1, 17) if count % tensor == 0 or tensor % count == 0]))
    stages = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)))
    layout = draw(
        st.sampled_from(
            [
                BlockLayout.canonical(layers=sum(stages), tokens=2, heads=heads, head_dim=2, dtype="float16"),
                BlockLayout("float32", ("head", "layer", "dim"), (heads, sum(stages), 3)),
                BlockLayout.latent(layers=sum(stages), tokens=2, latent=3, dtype="float8_e5m2"),
            ]
        )
    )
    return Shards(layout, tensor, stages if draw(st.booleans()) else ())


@given(splits())
def test_the_writers_write_every_element_once_and_every_rank_has_a_writers_part(shards: Shards) -> None:
    written = np.zeros(shards.layout.shape, np.uint8)
    for rank in shards.writers:
        assert written[shards.index(rank)].size
        written[shards.index(rank)] += 1
    assert (written == 1).all()
    parts = [str(shards.index(rank)) for rank in range(shards.ranks) if written[shards.index(rank)].size]
    assert set(parts) == {str(shards.index(rank)) for rank in shards.writers}
    assert sum(one != other for one, other in pairwise(parts)) == len(set(parts)) - 1, "replicas are neighbours"


@pytest.mark.parametrize(
    ("layout", "tensor", "stages", "said"),
    [
        (HEADS, 3, (), "4 KV heads.*3 ranks"),
        (HEADS, 6, (), "4 KV heads.*6 ranks"),
        (HEADS, 0, (), "size of 0"),
        (HEADS, 1, (2, 2), "add up to the 6"),
        (HEADS, 1, (7, -1), "add up to the 6"),
        (BlockLayout.opaque(64), 2, (), "namespace of its own"),
        (BlockLayout.opaque(64), 1, (1, 1), "add up to the 0"),
        (BlockLayout("int8", ("layer", "channel", "tap"), (2, 8, 3)), 2, (), "namespace of its own"),
    ],
)
def test_what_cannot_be_split_is_refused(layout: BlockLayout, tensor: int, stages: tuple[int, ...], said: str) -> None:
    """Field report 13: a shard that passes for the whole block is a wrong hit."""
    with pytest.raises(ValueError, match=said):
        Shards(layout, tensor, stages)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_has_no_part(rank: int) -> None:
    with pytest.raises(ValueError, match="ranks 0 to 3"):
        Shards(HEADS, tensor=4).index(rank)


def test_one_rank_holds_everything_of_any_layout() -> None:
    opaque = BlockLayout.opaque(64)
    assert Shards(opaque).writers == {0}
    assert Shards(opaque).to_numpy(bytes(64), 0).shape == (64,)
