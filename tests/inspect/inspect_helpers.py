"""Prompts to look into: their blocks stored as an engine stores them, with known values, on any tier."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore.inspect
from kvstore import BlockLayout, BlockWrite, Namespace, block_keys, open_store
from kvstore.cli import EXIT_OK, run
from kvstore.types import NO_PARENT, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest
    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.inspect import Inspection
    from kvstore.types import BlockKey, BlockRead, GetOutcome

TOKENS = 4
"""In a block."""
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
LAYOUT = BlockLayout.canonical(layers=3, tokens=TOKENS, heads=2, head_dim=8, dtype="float16")
SPACE = Namespace("org/model", "revision-1", (LAYOUT,), block_tokens=TOKENS)
PROMPT = list(range(40))
KEYS = block_keys(PROMPT, TOKENS)


def space_of(dtype: str) -> Namespace:
    layout = BlockLayout.canonical(layers=3, tokens=TOKENS, heads=2, head_dim=8, dtype=dtype)
    return Namespace("org/model", "revision-1", (layout,), block_tokens=TOKENS)


def values(key: BlockKey, layout: BlockLayout) -> NDArray[Any]:
    """Numbers that belong to `key` and to no other."""
    numbers = np.random.default_rng(int.from_bytes(key.digest[:8], "big"))
    return numbers.standard_normal(layout.shape).astype(layout.numpy_dtype)


def store_prompt(
    store: BlockStore, space: Namespace = SPACE, tokens: Sequence[int] = PROMPT, *, start: int = 0, group: int = 0
) -> list[BlockKey]:
    """Put the blocks of a prompt from the `start`-th on, each with its place and the block before it."""
    keys = block_keys(tokens, TOKENS, group=group)
    writes = [
        BlockWrite(
            key,
            values(key, space.layouts[group]).view(np.uint8).data,
            number,
            keys[number - 1].digest if number else NO_PARENT,
        )
        for number, key in enumerate(keys)
    ]
    assert set(store.put_many(space, writes[start:])) <= {PutOutcome.STORED, PutOutcome.EXISTS}
    return keys


@contextmanager
def looking(url: str, *spaces: Namespace) -> Iterator[Inspection]:
    """A tier into which the prompt was stored, as a reader sees it that came later."""
    with open_store(url) as store:
        for space in spaces:
            store_prompt(store, space)
        if not store.capabilities.persistent:
            with kvstore.inspect.open(url) as look:
                yield look
            return
    with kvstore.inspect.open(url) as look:
        yield look


class Reads:
    """The blocks that a real store was asked for, one list for each call."""

    def __init__(self, look: Inspection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[BlockKey]] = []
        ask = look.store.get_many_into

        def noted(namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
            self.calls.append([block.key for block in blocks])
            return ask(namespace, blocks)

        monkeypatch.setattr(look.store, "get_many_into", noted)

    @property
    def keys(self) -> list[BlockKey]:
        return [key for call in self.calls for key in call]


def machine(capsys: pytest.CaptureFixture[str], *args: str, exit_code: int = EXIT_OK) -> Any:
    """The JSON that the command prints."""
    capsys.readouterr()
    assert run([*args, "--json"]) == exit_code
    return json.loads(capsys.readouterr().out)
