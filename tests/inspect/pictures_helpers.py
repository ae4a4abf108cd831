"""What pictures are drawn of in tests: trees and tables of any size, without a tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from kvstore.inspect.pictures import Picture

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
BLOCK_BYTES = 737_552
BLOCK_TOKENS = 16


@dataclass
class Node:
    """A run of blocks as `PrefixTree` has it."""

    start: int
    blocks: int
    hits: int = 0
    stored_bytes: int = 0
    labels: tuple[str, ...] = ()
    children: list[Node] = field(default_factory=list)
    last_used: datetime = NOW
    created: datetime = NOW

    def __post_init__(self) -> None:
        self.stored_bytes = self.stored_bytes or self.blocks * BLOCK_BYTES

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


def every(roots: list[Node]) -> list[Node]:
    """All runs, parents first."""
    found = list(roots)
    for node in found:
        found += node.children
    return found


def forest(seed: int = 1, prompts: int = 3, users: int = 6, turns: int = 3) -> list[Node]:
    """A few system prompts, users who continue them, conversations that branch."""
    random = np.random.default_rng(seed)
    names = ("assistant", "handbook", "support", "code review")
    roots: list[Node] = []
    for number in range(prompts):
        blocks = int(random.integers(20, 120))
        root = Node(0, blocks, int(blocks * random.integers(20, 400)), labels=(names[number % len(names)],))
        root.last_used = NOW - timedelta(minutes=float(random.exponential(60)))
        for _ in range(int(random.integers(1, users + 1))):
            root.children.append(_talk(random, root.start + root.blocks, turns))
        roots.append(root)
    return roots


def _talk(random: np.random.Generator, start: int, turns: int) -> Node:
    blocks = int(random.integers(2, 40))
    node = Node(start, blocks, int(blocks * random.integers(0, 6)))
    node.last_used = NOW - timedelta(hours=float(random.exponential(40)))
    if turns > 1:
        node.children = [_talk(random, start + blocks, turns - 1) for _ in range(int(random.integers(0, 3)))]
    return node


def wide(runs: int) -> list[Node]:
    """One prefix with so many continuations."""
    random = np.random.default_rng(2)
    lengths = random.integers(1, 8, runs)
    children = [Node(64, int(length), int(length * (index % 5))) for index, length in enumerate(lengths)]
    return [Node(0, 64, 6400, labels=("system",), children=children)]


def deep(runs: int) -> list[Node]:
    """A chain that branches at every block."""
    root = node = Node(0, 1)
    for start in range(1, runs):
        node.children = [Node(start, 1), Node(start, 1)]
        node = node.children[0]
    return [root]


def table(count: int, seed: int = 1) -> pd.DataFrame:
    """`count` blocks with the columns of `NamespaceView.blocks()`, stored within 20 days."""
    random = np.random.default_rng(seed)
    age = random.random(count) * 20 * 86400
    hits = np.where(random.random(count) < 0.6, 0, random.zipf(1.6, count).clip(max=5000))
    idle = np.where(hits == 0, age, age * random.random(count))
    labels = [("", "handbook", "support")[index] for index in random.integers(0, 3, count)]
    columns: dict[str, Any] = {
        "group": np.zeros(count, np.int64),
        "digest": [f"{index:064x}" for index in range(count)],
        "position": np.arange(count) % 64,
        "parent": "",
        "stored_bytes": random.integers(700_000, 740_000, count),
        "created": pd.to_datetime(NOW.timestamp() - age, unit="s", utc=True),
        "last_used": pd.to_datetime(NOW.timestamp() - idle, unit="s", utc=True),
        "hits": hits,
        "labels": [(label,) if label else () for label in labels],
        "tenants": [()] * count,
        "pinned": False,
    }
    return pd.DataFrame(columns, index=range(count))


def texts(picture: Picture) -> str:
    """Everything that can be read on a picture: titles, axes, labels, legends, notes."""
    from matplotlib.text import Text

    found = [str(artist.get_text()) for artist in picture.findobj(Text)]
    return "\n".join(text for text in found if text)
