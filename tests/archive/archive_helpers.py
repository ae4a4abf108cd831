"""What the tests of archives share: a prefix whose every byte is known, tiers that have it, what a tier says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Mark, Namespace, PutOutcome, open_store
from kvstore.archive import create
from kvstore.deriving import keys_of_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.archive import ArchiveInfo

BLOCKS = 7
STEP = 4
IDS = list(range(100, 100 + BLOCKS * STEP))
LABEL = "handbook"
KV = BlockLayout.canonical(layers=2, tokens=STEP, heads=2, head_dim=16, dtype="float32")
SPACE = Namespace("org/model", "revision-1", (KV,), STEP)
HYBRID = Namespace(
    "org/hybrid",
    "revision-1",
    (KV, BlockLayout.canonical(layers=1, tokens=STEP, heads=2, head_dim=16, dtype="float16"), BlockLayout.opaque(5000)),
    STEP,
)
OPAQUE = Namespace("org/opaque", "revision-1", (BlockLayout.opaque(6000),), STEP)
KEYS = keys_of_tokens(SPACE, IDS)


def values(space: Namespace, key: BlockKey) -> NDArray[Any]:
    """What belongs to a block and to no other, in its layout's shape."""
    layout = space.layouts[key.group]
    seed = int.from_bytes(key.digest[:8], "big") + key.group
    numbers = np.random.default_rng(seed).standard_normal(layout.shape)
    return (numbers * (100 if layout.dtype == "uint8" else 1)).astype(layout.numpy_dtype)


def prefix(space: Namespace, keys: Sequence[BlockKey]) -> list[BlockWrite]:
    """The puts of a prefix: of each group a chain from position 0 on."""
    last: dict[int, tuple[int, bytes]] = {}
    blocks: list[BlockWrite] = []
    for key in keys:
        position, parent = last.get(key.group, (-1, b""))
        blocks.append(BlockWrite(key, values(space, key), position + 1, parent))
        last[key.group] = position + 1, key.digest
    return blocks


def fill(store: BlockStore, space: Namespace = SPACE, label: str = LABEL) -> list[BlockKey]:
    """Put the prefix, labelled where that is possible; its keys."""
    keys = keys_of_tokens(space, IDS)
    assert set(store.put_many(space, prefix(space, keys))) == {PutOutcome.STORED}
    if store.capabilities.marks:
        store.mark_many(space, keys, Mark(label))
    return keys


def filled(folder: Path, space: Namespace = SPACE, scheme: str = "file") -> str:
    """A tier with the prefix: its URL."""
    url = f"{scheme}://{folder}"
    with open_store(url) as store:
        fill(store, space)
    return url


def held(store: BlockStore, space: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
    """Which blocks are there; one with other bytes than its own fails the test."""
    found: list[bool] = []
    for key in keys:
        into = np.empty(space.layouts[key.group].shape, space.layouts[key.group].numpy_dtype)
        outcome = store.get_many_into(space, [BlockRead(key, into)])[0]
        same = outcome is not GetOutcome.HIT or into.tobytes() == values(space, key).tobytes()
        assert same, f"wrong bytes of {key}"
        found.append(outcome is GetOutcome.HIT)
    return found


def facts(store: BlockStore, space: Namespace) -> dict[BlockKey, tuple[int, bytes, tuple[str, ...]]]:
    """Position, parent and labels of every block."""
    return {info.key: (info.position, info.parent, info.labels) for info in store.scan(space)}


def archived(folder: Path, space: Namespace = SPACE, tier: str | None = None, **words: Any) -> tuple[str, ArchiveInfo]:
    """An archive of the prefix in a tier of its own: its URL, and what creating it said."""
    tier = tier or filled(folder / "source", space)
    url = f"file://{folder}/archives/one"
    with open_store(tier) as store:
        info = create(url, store, space, keys_of_tokens(space, IDS), **{"label": LABEL, **words})
    return url, info
