"""Namespaces: whatever makes blocks differ makes the fingerprint differ, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace
from kvstore.errors import InvalidBlockError

LAYOUT = BlockLayout.canonical(layers=2, tokens=16, heads=2, head_dim=8, dtype="float16")
SPACE = Namespace("model", "rev", (LAYOUT, BlockLayout.opaque(1000)), block_tokens=16)

OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "model2"},
    "revision": {"revision": "rev2"},
    "dtype": {"layouts": (dataclasses.replace(LAYOUT, dtype="bfloat16"), BlockLayout.opaque(1000))},
    "shape of equal size": {
        "layouts": (dataclasses.replace(LAYOUT, shape=(2, 2, 16, 1, 16)), BlockLayout.opaque(1000))
    },
    "axes": {
        "layouts": (
            dataclasses.replace(LAYOUT, axes=("kv", "layer", "token", "head", "dim")),
            BlockLayout.opaque(1000),
        )
    },
    "order of groups": {"layouts": (BlockLayout.opaque(1000), LAYOUT)},
    "one group fewer": {"layouts": (LAYOUT,)},
    "tokens per block": {"block_tokens": 32},
    "key scheme": {"key_scheme": "vllm-sha256"},
    "digest length": {"digest_bytes": 16},
    "extra": {"extra": {"rope": "yarn"}},
    "extra split elsewhere": {"extra": {"ro": "peyarn"}},
    "model and revision split elsewhere": {"model": "modelr", "revision": "ev"},
}


@pytest.mark.parametrize("changed", OTHERS)
def test_whatever_makes_blocks_differ_changes_the_fingerprint(changed: str) -> None:
    """Field report 10: model revision, dtype or layout missing from the namespace, of equal size."""
    others = {name: dataclasses.replace(SPACE, **fields).fingerprint for name, fields in OTHERS.items()}
    fingerprint = others.pop(changed)
    assert fingerprint != SPACE.fingerprint
    assert fingerprint not in others.values()


def test_the_order_in_which_extras_are_given_does_not_matter() -> None:
    one = dataclasses.replace(SPACE, extra={"a": "1", "b": "2"})
    two = dataclasses.replace(SPACE, extra={"b": "2", "a": "1"})
    assert one.fingerprint == two.fingerprint
    assert hash(one) == hash(two)


def test_the_fingerprint_is_the_documented_one_in_every_process() -> None:
    # Written down once; it must never change, or every stored block would be a miss.
    source = (
        "from kvstore import *\n"
        "layout = BlockLayout.canonical(layers=2, tokens=16, heads=2, head_dim=8, dtype='float16')\n"
        "print(Namespace('model', 'rev', (layout, BlockLayout.opaque(1000)), block_tokens=16).name)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert printed == SPACE.name == "3429b54182408fb3426e2b22ac5d4847"


TEXT = st.text(max_size=12)


@given(TEXT.filter(bool), TEXT, st.integers(1, 4096), TEXT, st.integers(16, 64), st.dictionaries(TEXT, TEXT))
def test_a_namespace_survives_its_manifest_as_json(
    model: str, revision: str, tokens: int, scheme: str, digest_bytes: int, extra: dict[str, str]
) -> None:
    space = Namespace(model, revision, (LAYOUT, BlockLayout.opaque(7)), tokens, scheme, digest_bytes, extra)
    back = Namespace.from_manifest(json.loads(json.dumps(space.to_manifest())))
    assert back == space
    assert back.fingerprint == space.fingerprint


@pytest.mark.parametrize(
    "fields",
    [{"model": ""}, {"layouts": ()}, {"block_tokens": 0}, {"digest_bytes": 15}, {"digest_bytes": 65}],
    ids=lambda fields: next(iter(fields)),
)
def test_an_impossible_namespace_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).replace("layouts", "layout")):
        dataclasses.replace(SPACE, **fields)


def test_each_group_has_the_size_of_its_own_layout() -> None:
    assert SPACE.block_bytes() == SPACE.block_bytes(0) == LAYOUT.nbytes
    assert SPACE.block_bytes(1) == 1000
    with pytest.raises(InvalidBlockError, match="groups 0 to 1"):
        SPACE.block_bytes(2)


@pytest.mark.parametrize("key", [BlockKey(bytes(31)), BlockKey(bytes(33)), BlockKey(bytes(32), 2), BlockKey(b"", 0)])
def test_a_key_that_cannot_name_a_block_here_is_refused(key: BlockKey) -> None:
    with pytest.raises(InvalidBlockError):
        SPACE.check_key(key)
    with pytest.raises(InvalidBlockError):
        SPACE.check_key(BlockKey(bytes(32), -1))


def test_a_batch_of_keys_is_checked_as_each_of_them_is() -> None:
    sound = [BlockKey(bytes([number]) * 32, number % 2) for number in range(5)]
    assert SPACE.check_keys(sound) == [key.digest for key in sound]
    assert SPACE.check_keys([]) == []
    wrong: list[Any] = [BlockKey(bytes(31)), BlockKey(bytes(32), 2), BlockKey(bytes(32), -1), BlockKey(bytearray(32))]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for key in wrong:
        with pytest.raises(InvalidBlockError):
            SPACE.check_keys([*sound, key, *sound])


def test_a_write_is_checked_with_all_that_it_says() -> None:
    block = BlockWrite(BlockKey(bytes(32), 1), bytes(1000), 7, bytes(32))
    assert SPACE.check_write(block).nbytes == 1000
    for wrong in ({"parent": bytes(16)}, {"position": -2}, {"position": 1 << 63}, {"data": bytes(999)}):
        with pytest.raises(InvalidBlockError):
            SPACE.check_write(dataclasses.replace(block, **wrong))


def test_a_buffer_is_checked_against_the_group_of_its_key() -> None:
    key = BlockKey(bytes(32), 1)
    assert SPACE.check_buffer(key, bytes(1000)).nbytes == 1000
    with pytest.raises(InvalidBlockError, match=r"999 bytes.*1000"):
        SPACE.check_buffer(key, bytes(999))
    with pytest.raises(InvalidBlockError, match="read-only"):
        SPACE.check_buffer(key, bytes(1000), writable=True)
    buffer = np.zeros(1000, np.uint8)
    assert np.shares_memory(SPACE.check_buffer(key, buffer, writable=True), buffer)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"revision": None}, "revision of a namespace is text, not None"),
        ({"model": 5}, "model of a namespace is text"),
        ({"extra": {"a": 1}}, r"extra\['a'\] of a namespace is text"),
        ({"extra": {1: "a"}}, "a name in extra"),
        ({"block_tokens": 2.5}, "integer"),
        ({"model": "\ud800"}, "lone surrogate"),
    ],
)
def test_what_would_not_be_read_back_the_same_is_refused(changed: dict[str, Any], match: str) -> None:
    fields: dict[str, Any] = {"model": "m", "revision": "r", "layouts": (BlockLayout.opaque(8),), "block_tokens": 1}
    with pytest.raises((TypeError, ValueError), match=match):
        Namespace(**(fields | changed))


def test_numpys_integers_count_as_integers() -> None:
    layout = BlockLayout("uint8", ("byte",), (np.int64(8),))  # pyright: ignore[reportArgumentType]
    space = Namespace("m", "r", (layout,), block_tokens=np.int32(4))  # pyright: ignore[reportArgumentType]
    assert space == Namespace("m", "r", (BlockLayout.opaque(8),), block_tokens=4)
    assert Namespace.from_manifest(space.to_manifest()).fingerprint == space.fingerprint


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.zeros((4, 4), np.uint8)[:, :2], "ascontiguousarray"),
        (np.array([None] * 8), "Python objects"),
        ("eight by", "bytes-like"),
        (memoryview(bytes(16))[::2], "contiguous"),
    ],
)
def test_data_that_is_no_block_is_refused_by_the_name_of_its_key(data: Any, match: str) -> None:
    space = Namespace("m", "r", (BlockLayout.opaque(8),), block_tokens=1)
    with pytest.raises(InvalidBlockError, match=rf"BlockKey\(0000.*{match}"):
        space.check_write(BlockWrite(BlockKey(bytes(32)), data))


def test_a_digest_of_text_is_refused() -> None:
    space = Namespace("m", "r", (BlockLayout.opaque(8),), block_tokens=1)
    with pytest.raises(InvalidBlockError, match="a digest is bytes, not str"):
        space.check_key(BlockKey("0" * 32))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
"""Any value of any type that a document can have."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values stand in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, one in inner for place in places(one, (*path, name)))]


def changed(value: Any, place: tuple[Any, ...], by: Any) -> Any:
    if not place:
        return by
    copy = value.copy()
    copy[place[0]] = changed(value[place[0]], place[1:], by)
    return copy


@given(st.data(), JSON)
def test_whatever_a_manifest_says_it_is_a_namespace_or_a_value_error(data: st.DataObject, by: Any) -> None:
    manifest = dataclasses.replace(SPACE, extra={"rope": "yarn"}).to_manifest()
    damaged = changed(manifest, data.draw(st.sampled_from(places(manifest))), by)
    text = json.dumps(damaged).encode("ascii")
    try:
        found = Namespace.from_json(text)
    except ValueError:
        return
    assert json.loads(json.dumps(found.to_manifest())) == json.loads(text)


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"{}", b"null", b"\xff", b'{"a": 1', b"9" * 10_000])
def test_what_is_no_manifest_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Namespace.from_json(text)


@pytest.mark.parametrize("name", SPACE.to_manifest())
def test_a_manifest_that_lacks_a_field_is_a_value_error(name: str) -> None:
    manifest = SPACE.to_manifest()
    del manifest[name]
    with pytest.raises(ValueError, match=name if name != "extra" else "match"):
        Namespace.from_manifest(manifest)
