"""Prefixes as a tree: blocks that follow each other without a branch are one run, as in a radix tree.

A store keeps each block's parent (the digest before it) and position. A block whose parent is not there begins a tree
of its own, which is incomplete unless it stands at position 0. Blocks of which neither is known, and whose like nobody
calls its parent, are no tree: they are counted apart (`PrefixTree.loose`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.inspect.axes import tokens_of
from kvstore.inspect.wording import age, counted, short
from kvstore.types import NO_PARENT, NO_POSITION
from kvstore.url import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.inspect.scanned import Scanned
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["PrefixTree", "Run"]

LINES = 40
"""Runs in a tree's text."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Blocks of one KV-cache group that follow each other and have the same labels; `children` follow the last.

    `stored_bytes` and `hits` are sums over the blocks, `created` is when the first of them was stored and `last_used`
    when the last of them was used, in seconds since the epoch.
    """

    group: int
    infos: tuple[BlockInfo, ...] = field(repr=False)
    block_tokens: int
    """Tokens of each block of the group."""
    complete: bool
    """Every block before it is there, from position 0 on."""
    stored_bytes: int
    hits: int
    created: float
    last_used: float
    labels: tuple[str, ...]
    children: tuple[Run, ...] = field(repr=False)

    @property
    def first(self) -> str:
        """The digest of the first block, in hex."""
        return self.infos[0].key.digest.hex()

    @property
    def last(self) -> str:
        """The digest of the last block, in hex: it names the prefix up to here."""
        return self.infos[-1].key.digest.hex()

    @property
    def start(self) -> int:
        """The position of the first block in its prefix, in blocks; `NO_POSITION` where it is not known."""
        return self.infos[0].position

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.infos)

    @property
    def tokens(self) -> int:
        """How many they hold."""
        return len(self.infos) * self.block_tokens

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Run]]:
        """This run and all below it with their depths, each before its children."""
        stack: list[tuple[int, Run]] = [(depth, self)]
        while stack:
            level, run = stack.pop()
            yield level, run
            stack.extend((level + 1, child) for child in reversed(run.children))

    def line(self) -> str:
        """The run in a line, for people."""
        marks = "".join(f" [{label}]" for label in self.labels)
        return f"{short(self.last)} {self.words()}{marks}"

    def words(self) -> str:
        """Where it is in its prefix, and its sums, for people."""
        return (
            f"{_places(self.start, self.blocks)} ({self.tokens:,} tokens, {format_size(self.stored_bytes)},"
            f" {self.hits:,} hits, used {age(self.last_used)} ago)"
        )


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The prefixes of a namespace, of all its KV-cache groups, as trees of `Run`s.

    `roots` are ordered by group, then the largest first; `loose` are blocks of which nobody knows where they belong.
    """

    namespace: Namespace = field(repr=False)
    roots: tuple[Run, ...] = field(repr=False)
    loose: tuple[BlockInfo, ...] = field(repr=False)
    where: str = ""
    """The tier's URL."""

    @classmethod
    def of(cls, scanned: Scanned) -> PrefixTree:
        """The tree of what a scan found."""
        roots: list[Run] = []
        loose: list[BlockInfo] = []
        for group, known in scanned.by_group.items():
            grown = _Grown(group, known, tokens_of(scanned.namespace, group))
            roots += grown.roots()
            loose += grown.loose
        return cls(scanned.namespace, tuple(roots), tuple(loose), scanned.where)

    def runs(self) -> Iterator[tuple[int, Run]]:
        """Every run with its depth, each before its children."""
        for root in self.roots:
            yield from root.walk()

    @property
    def blocks(self) -> int:
        """All of them, the loose ones included."""
        return sum(run.blocks for _, run in self.runs()) + len(self.loose)

    def text(self, most: int = LINES) -> str:
        """The tree for people, at most so many runs of it."""
        lines: list[str] = []
        runs = 0
        for depth, run in self.runs():
            runs += 1
            if runs <= most:
                lines.append(f"{'  ' * depth}{self.heading(run) if depth == 0 else ''}{run.line()}")
        if runs > most:
            lines.append(f"… and {runs - most:,} more runs")
        if self.loose:
            lines.append(f"{counted(len(self.loose), 'block')} without position and parent")
        return "\n".join(lines or ["no blocks"])

    def heading(self, root: Run) -> str:
        """What is said of a root alone: its group, where there are several, and whether its beginning is missing."""
        group = f"group {root.group}: " if len(self.namespace.layouts) > 1 else ""
        return group + ("" if root.complete else "(beginning not stored) ")

    def __repr__(self) -> str:
        blocks = counted(self.blocks, "block")
        return f"<PrefixTree of {short(self.namespace.name)} in {self.where}: {blocks}>\n{self.text()}"

    def _repr_html_(self) -> str:
        from kvstore.inspect.html import tree_html

        return tree_html(self)


def _places(start: int, count: int) -> str:
    if start == NO_POSITION:
        return counted(count, "block")
    return f"block {start}" if count == 1 else f"blocks {start}–{start + count - 1}"


class _Grown:
    """The trees of one group, built from the leaves up so that no depth of a prefix is too deep."""

    def __init__(self, group: int, known: Mapping[bytes, BlockInfo], block_tokens: int) -> None:
        self._group = group
        self._tokens = block_tokens
        self._after: defaultdict[bytes, list[BlockInfo]] = defaultdict(list)
        beginnings: list[BlockInfo] = []
        for info in known.values():
            (self._after[info.parent] if info.parent in known else beginnings).append(info)
        self.loose = [info for info in beginnings if self._is_loose(info)]
        self._beginnings = [info for info in beginnings if not self._is_loose(info)]
        self._reached = len(self.loose)
        self._known = known

    def _is_loose(self, info: BlockInfo) -> bool:
        return info.parent == NO_PARENT and info.position == NO_POSITION and info.key.digest not in self._after

    def roots(self) -> list[Run]:
        """Every tree, the largest first. Parents in a circle, which no engine writes, are loose."""
        found = [self._grow(info) for info in self._beginnings]
        if self._reached < len(self._known):
            reached = {info.key.digest for root in found for _, run in root.walk() for info in run.infos}
            reached.update(info.key.digest for info in self.loose)
            self.loose += [info for digest, info in self._known.items() if digest not in reached]
        return sorted(found, key=lambda root: -sum(run.blocks for _, run in root.walk()))

    def _grow(self, beginning: BlockInfo) -> Run:
        complete = beginning.parent == NO_PARENT and beginning.position == 0
        order: list[tuple[list[BlockInfo], Sequence[BlockInfo]]] = []
        stack = [beginning]
        while stack:
            infos, after = self._straight(stack.pop())
            order.append((infos, after))
            self._reached += len(infos)
            stack.extend(after)
        made: dict[bytes, Run] = {}
        for infos, after in reversed(order):
            children = tuple(made.pop(info.key.digest) for info in after)
            made[infos[0].key.digest] = self._run(infos, children, complete)
        return made[beginning.key.digest]

    def _straight(self, info: BlockInfo) -> tuple[list[BlockInfo], Sequence[BlockInfo]]:
        """The blocks from `info` on that belong in one run, and those that come after it."""
        infos, labels = [info], info.labels if info.marks else ()
        while True:
            after = self._after.get(infos[-1].key.digest, ())
            if len(after) != 1 or (after[0].labels if after[0].marks else ()) != labels:
                return infos, after
            infos.append(after[0])

    def _run(self, infos: Sequence[BlockInfo], children: tuple[Run, ...], complete: bool) -> Run:
        return Run(
            group=self._group,
            infos=tuple(infos),
            block_tokens=self._tokens,
            complete=complete,
            stored_bytes=sum(info.stored_bytes for info in infos),
            hits=sum(info.hits for info in infos),
            created=min(info.created for info in infos),
            last_used=max(info.last_used for info in infos),
            labels=infos[0].labels,
            children=children,
        )
