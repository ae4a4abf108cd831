"""Which blocks of a tier are the prefix that somebody means: by its label, its tokens or its keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstore.archive.errors import SelectionError
from kvstore.deriving import keys_of_tokens
from kvstore.marks import Mark
from kvstore.types import NO_PARENT, NO_POSITION, BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore.abc import BlockStore
    from kvstore.keys import KeyExtras
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["Selection", "Start", "select"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Start:
    """Where the first block of a KV-cache group stands: its position, and the digest of the block before it."""

    position: int = 0
    parent: bytes = NO_PARENT


class Selection(list[BlockKey]):
    """Keys in the order of the prompt. `starts` has the groups whose first block is not the prompt's first.

    A group with a sliding window is one: an engine stores the last blocks of it.
    """

    def __init__(self, keys: Iterable[BlockKey], starts: Mapping[int, Start] | None = None) -> None:
        super().__init__(keys)
        self.starts = dict(starts or {})


def select(
    store: BlockStore,
    namespace: Namespace,
    *,
    label: str | None = None,
    tokens: Sequence[int] | None = None,
    keys: Sequence[BlockKey] | None = None,
    extras: KeyExtras | None = None,
    salt: str = "",
) -> Selection:
    """The blocks of one prefix in `store`, in order, from its first token on: by exactly one of three ways.

    `label`: all blocks that have it (in stores that keep marks). `tokens`: the whole blocks of these token ids, with
    `extras` and `salt` as the engine's (`keys_of_tokens`). `keys`: these, which are consecutive. Each KV-cache group is
    a chain of its own, without gaps; at least one of them begins with the prompt.

    Raises `SelectionError` where a block is missing, where labelled blocks are not one chain, or where nothing is
    found, and says what to do. What the store raises is passed on.
    """
    if sum(way is not None for way in (label, tokens, keys)) != 1:
        raise ValueError("select by exactly one of label, tokens and keys")
    if label is not None:
        return _labelled(store, namespace, label)
    if tokens is not None:
        derived = keys_of_tokens(namespace, tokens, extras=extras, salt=salt)
        if not derived:
            raise SelectionError(
                f"{len(tokens)} tokens are less than one block of {namespace.block_tokens}: nothing to archive"
            )
        return _of_tokens(store, namespace, derived)
    wanted = list(dict.fromkeys(keys or ()))
    if not wanted:
        raise SelectionError("no keys: nothing to archive")
    missing = _missing(store, namespace, wanted)
    if missing:
        first = next(key for key in wanted if key in missing)
        raise SelectionError(f"{store.url}: {len(missing)} of {len(wanted)} blocks are not there, such as {first!r}")
    return Selection(wanted)


def _missing(store: BlockStore, namespace: Namespace, keys: Sequence[BlockKey]) -> set[BlockKey]:
    found = store.contains_many(namespace, keys)
    return {key for key, there in zip(keys, found, strict=True) if not there}


# By tokens


def _of_tokens(store: BlockStore, namespace: Namespace, derived: Sequence[BlockKey]) -> Selection:
    missing = _missing(store, namespace, derived)
    starts: dict[int, Start] = {}
    for group in {key.group for key in derived}:
        chain = [key for key in derived if key.group == group]
        first = next((index for index, key in enumerate(chain) if key not in missing), len(chain))
        gap = next((index for index, key in enumerate(chain) if index > first and key in missing), None)
        if gap is not None or first == len(chain):
            raise SelectionError(_not_stored(store, chain, missing, group, gap if first == 0 and gap else 0))
        if first:
            starts[group] = Start(first, chain[first - 1].digest)
    if starts.keys() == {key.group for key in derived}:
        group = min(starts)
        chain = [key for key in derived if key.group == group]
        raise SelectionError(_not_stored(store, chain, missing, group, 0))
    return Selection((key for key in derived if key not in missing), starts)


def _not_stored(store: BlockStore, chain: Sequence[BlockKey], missing: set[BlockKey], group: int, usable: int) -> str:
    lost = sum(key in missing for key in chain)
    whole_end = usable and lost == len(chain) - usable
    advice = f"archive the tokens of the first {usable} blocks alone, or have" if whole_end else "have"
    return (
        f"{store.url}: {lost} of the {len(chain)} blocks of these tokens in KV-cache group {group} are not there, the"
        f" first of them at position {usable}: {advice} the engine read the prompt again. Salt and adapter are part of"
        " the keys: give those of the engine"
    )


# By label


def _labelled(store: BlockStore, namespace: Namespace, label: str) -> Selection:
    if not store.capabilities.marks:
        raise SelectionError(f"{store.url} keeps no labels: select by tokens or by keys")
    if not label:
        raise SelectionError("an empty label stands for every label: name one")
    try:
        mark = Mark(label)
    except ValueError as error:
        raise SelectionError(str(error)) from None
    what = f"{store.url}, label {label!r}"
    infos = list(store.scan_marked(namespace, mark))
    if not infos:
        raise SelectionError(f"{what}: no block of namespace {namespace.name} has it")
    chains = {group: _Chain(group, infos, what) for group in sorted({info.key.group for info in infos})}
    if all(chain.start.position for chain in chains.values()):
        first = next(iter(chains.values()))
        raise SelectionError(
            f"{what}: the blocks at positions 0 to {first.start.position - 1} are not there, or do not have it:"
            f" {_Chain.REMEDY}"
        )
    starts = {group: chain.start for group, chain in chains.items() if chain.start.position}
    return Selection((key for chain in chains.values() for key in chain.keys), starts)


class _Chain:
    """The blocks of one group as one chain. Raises `SelectionError` where they are not."""

    REMEDY = "have the engine read the whole prompt again, with this label"

    def __init__(self, group: int, infos: Sequence[BlockInfo], what: str) -> None:
        self._what = f"{what}, KV-cache group {group}"
        self._infos = {info.key.digest: info for info in infos if info.key.group == group}
        unplaced = [info for info in self._infos.values() if info.position == NO_POSITION]
        if unplaced:
            raise SelectionError(
                f"{self._what}: {len(unplaced)} of {len(self._infos)} blocks were stored without their position, such"
                f" as {unplaced[0].key!r}: select by tokens or by keys"
            )
        self._check_ends()
        ordered = sorted(self._infos.values(), key=lambda info: info.position)
        self._check_gaps(ordered)
        self.start = Start(ordered[0].position, ordered[0].parent)
        self.keys = [info.key for info in ordered]

    def _check_ends(self) -> None:
        parents = {info.parent for info in self._infos.values()}
        ends = [info for digest, info in self._infos.items() if digest not in parents]
        at_one_place = len({info.position for info in self._infos.values()}) < len(self._infos)
        if len(ends) > 1 and at_one_place:
            lengths = ", ".join(f"{end.key.digest.hex()[:16]}… (position {end.position})" for end in ends[:_SHOWN])
            raise SelectionError(
                f"{self._what}: these are {len(ends)} prefixes, not one; they end with {lengths}. Give each a label of"
                " its own, or select one by its tokens or keys"
            )

    def _check_gaps(self, ordered: Sequence[BlockInfo]) -> None:
        missing = sorted(set(range(ordered[0].position, ordered[-1].position)) - {info.position for info in ordered})
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
            raise SelectionError(
                f"{self._what}: {len(missing)} blocks are not there, or do not have it, at positions {shown}:"
                f" {self.REMEDY}"
            )
        for before, info in pairwise(ordered):
            if info.parent not in (NO_PARENT, before.key.digest):
                raise SelectionError(
                    f"{self._what}: the block at position {info.position} does not follow the one before it: these are"
                    " parts of several prefixes. Select one by its tokens or keys"
                )
