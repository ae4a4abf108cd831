"""Addresses: a namespace's fingerprint and a key. Whatever decides a block's bytes, or who may have it, is in there."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore import (
    BlockKey,
    BlockLayout,
    BlockRead,
    BlockWrite,
    GetOutcome,
    KeyExtras,
    Media,
    Namespace,
    block_keys,
    chain_digests,
    open_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = tuple(range(32))


@dataclass(frozen=True)
class Recipe:
    """All that an engine knows of a block, under the names that people confuse."""

    model: str = "m"
    revision: str = "r"
    dtype: str = "float16"
    axes: tuple[str, ...] = ("layer", "kv", "token", "head", "dim")
    shape: tuple[int, ...] = (2, 2, 16, 2, 4)
    block_tokens: int = 16
    adapter: str = ""
    salt: str = ""
    media: tuple[Media, ...] = ()
    group: int = 0
    digest_bytes: int = 32
    tokens: tuple[int, ...] = TOKENS

    @property
    def namespace(self) -> Namespace:
        layout = BlockLayout(self.dtype, self.axes, self.shape)
        return Namespace(self.model, self.revision, (layout, layout), self.block_tokens, digest_bytes=self.digest_bytes)

    @property
    def keys(self) -> list[BlockKey]:
        extras = KeyExtras(model=self.model, adapter=self.adapter, salt=self.salt, media=self.media)
        return block_keys(self.tokens, self.block_tokens, extras, group=self.group, digest_bytes=self.digest_bytes)

    @property
    def addresses(self) -> list[tuple[bytes, BlockKey]]:
        return [(self.namespace.fingerprint, key) for key in self.keys]


CAT, SOUND = (Media(3, b"cat"),), (Media(3, b"cat", kind="audio"),)
CHOICES: dict[str, tuple[object, ...]] = {
    "model": ("a", "ab"),
    "revision": ("", "b", "bb"),
    "dtype": ("float16", "bfloat16"),  # of equal size
    "axes": (("layer", "kv", "token", "head", "dim"), ("kv", "layer", "token", "head", "dim")),
    "shape": ((2, 2, 16, 2, 4), (2, 2, 16, 4, 2)),  # of equal size
    "block_tokens": (16, 32),
    "adapter": ("", "a", "ab"),
    "salt": ("", "b", "a"),
    "media": ((), CAT, SOUND, (Media(4, b"cat"),)),
}
PRODUCT = [Recipe(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]


def test_the_cross_product_never_shares_an_address() -> None:
    """Field reports 10 and 11: model, revision, dtype, layout, block size, adapter, salt, media, all at once."""
    addresses = [address for recipe in PRODUCT for address in recipe.addresses]
    assert len(addresses) > len(PRODUCT) == 3456
    assert len(set(addresses)) == len(addresses)


words = st.text(max_size=3)
media = st.lists(
    st.builds(Media, st.integers(0, 15), st.binary(max_size=2), st.sampled_from(["image", "audio", ""])), max_size=2
).map(lambda several: tuple(sorted(several, key=lambda one: (one.offset, one.kind, one.content_hash))))
shapes = st.sampled_from([(("byte",), (64,)), (("layer", "token"), (4, 16)), (("token", "layer"), (4, 16))])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    axes, shape = draw(shapes)
    return Recipe(
        model=draw(words.filter(bool)),
        revision=draw(words),
        dtype=draw(st.sampled_from(["int8", "uint8", "float8_e4m3fn", "float8_e5m2"])),
        axes=axes,
        shape=shape,
        block_tokens=draw(st.sampled_from([16, 32])),
        adapter=draw(words),
        salt=draw(words),
        media=draw(media),
        group=draw(st.integers(0, 1)),
        digest_bytes=draw(st.sampled_from([16, 32])),
    )


@given(recipes(), recipes())
def test_two_different_recipes_share_no_address(one: Recipe, other: Recipe) -> None:
    """Field reports 10 and 11."""
    assume(one != other)
    assert not set(one.addresses) & set(other.addresses)


@given(recipes(), st.data())
def test_one_difference_is_enough(one: Recipe, data: st.DataObject) -> None:
    """Field reports 10 and 11: nothing else has to differ, and the sizes do not either."""
    name = data.draw(
        st.sampled_from(["model", "revision", "dtype", "block_tokens", "adapter", "salt", "media", "group"])
    )
    other = replace(one, **{name: getattr(data.draw(recipes()), name)})
    assume(one != other)
    assert not set(one.addresses) & set(other.addresses)
    assert one.namespace.block_bytes() == other.namespace.block_bytes()


@given(recipes())
def test_the_same_recipe_has_the_same_addresses(recipe: Recipe) -> None:
    assert replace(recipe).addresses == recipe.addresses


prompts = st.lists(st.sampled_from([0, 1, 2**32, 2**32 + 1]), max_size=40)


@given(prompts, prompts, st.integers(1, 9))
def test_two_prompts_share_the_blocks_of_their_common_prefix_and_no_other(
    one: list[int], other: list[int], step: int
) -> None:
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    first, second = chain_digests(one, step), chain_digests(other, step)
    assert first[: common // step] == second[: common // step]
    assert not set(first[common // step :]) & set(second)
    assert len(set(first)) == len(one) // step


@given(st.lists(st.integers(0, 2**64 - 1).map(lambda token: token & 0x7FFF_FFFF_FFFF_FFFF), min_size=1, max_size=20))
def test_the_type_of_the_tokens_does_not_matter_and_shorter_digests_are_the_start_of_longer_ones(
    tokens: list[int],
) -> None:
    whole = chain_digests(tokens, 1)
    assert chain_digests(np.array(tokens, dtype=np.uint64), 1) == whole
    assert chain_digests(tokens, 1, digest_bytes=16) == [digest[:16] for digest in whole]


DIGESTS_OF_PRODUCT = """
import hashlib, sys
sys.path.insert(0, "tests")
from test_key_properties import PRODUCT
from kvstore import BlockLayout, Namespace
extra = {name: name.upper() for name in set("abcdefgh")}
space = Namespace("m", "r", (BlockLayout.opaque(8),), 1, extra=extra)
print(hashlib.sha256(repr([recipe.addresses for recipe in PRODUCT[::7]] + [space.fingerprint]).encode()).hexdigest())
"""


def test_processes_with_different_hash_seeds_agree_on_every_address() -> None:
    """Field report 12: a hash seed that differs per process, so that nothing is ever shared."""
    path = os.pathsep.join(sys.path)
    printed = {
        subprocess.run(
            [sys.executable, "-c", DIGESTS_OF_PRODUCT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "31337", "random")
    }
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 64


# In a store


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    location = {"memory": "memory://keys", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://keys"):
        yield location[request.param]


def filled(seed: int) -> np.ndarray:
    return np.full(64, seed, np.uint8)


def test_what_one_recipe_stored_is_a_miss_for_every_other_of_the_same_size(url: str) -> None:
    """Field reports 10 and 11: a mismatch is a miss and never a wrong block."""
    small = Recipe(dtype="uint8", axes=("layer", "token"), shape=(4, 16))
    changes: list[dict[str, object]] = [
        {"model": "other"},
        {"revision": "r2"},
        {"dtype": "float8_e4m3fn"},
        {"axes": ("token", "layer")},
        {"shape": (16, 4)},
        {"block_tokens": 32},
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"media": CAT},
        {"group": 1},
        {"digest_bytes": 16},
    ]
    others = [replace(small, **change) for change in changes]
    with open_store(url) as store:
        assert store.put_many(small.namespace, [BlockWrite(small.keys[0], filled(1))])[0].present
        for other in others:
            assert store.get_many_into(other.namespace, [BlockRead(other.keys[0], filled(0))]) == [GetOutcome.MISS]
        for seed, other in enumerate(others, start=2):
            assert store.put_many(other.namespace, [BlockWrite(other.keys[0], filled(seed))])[0].present
        for seed, recipe in enumerate([small, *others], start=1):
            buffer = filled(0)
            assert store.get_many_into(recipe.namespace, [BlockRead(recipe.keys[0], buffer)]) == [GetOutcome.HIT]
            assert buffer.tobytes() == filled(seed).tobytes()


@pytest.mark.parametrize("length", [16, 17, 32, 63, 64])
def test_digests_of_any_length_name_their_own_block_down_to_the_last_bit(url: str, length: int) -> None:
    """Engines bring digests of 16 (xxhash), 32 (sha256) and 64 (sha512) bytes."""
    space = Namespace("m", "r", (BlockLayout.opaque(64),), 16, key_scheme="engine", digest_bytes=length)
    base = hashlib.sha512(b"prompt").digest()[:length]
    bits = [0, 7, 8, 8 * length // 2, 8 * length - 8, 8 * length - 1]
    flipped = [(int.from_bytes(base, "big") ^ 1 << bit).to_bytes(length, "big") for bit in bits]
    names = [BlockKey(digest) for digest in (base, *flipped, bytes(length), b"\xff" * length)]
    with open_store(url) as store:
        outcomes = store.put_many(space, [BlockWrite(key, filled(seed)) for seed, key in enumerate(names)])
        assert all(outcome.present for outcome in outcomes)
    with open_store(url) as store:
        buffers = [filled(255) for _ in names]
        assert store.get_many_into(space, list(map(BlockRead, names, buffers))) == [GetOutcome.HIT] * len(names)
        assert [int(buffer[0]) for buffer in buffers] == list(range(len(names)))
        assert {info.key for info in store.scan(space)} == set(names)
        assert [found.to_manifest() for found in store.namespaces()] == [json.loads(json.dumps(space.to_manifest()))]
