"""A tier through its contract: `put_many` and `get_many_into`, checks on, in a namespace of the benchmark's own."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvstore.bench.contestant import Contestant
from kvstore.bench.footprint import Footprint
from kvstore.bench.fresh import laps_in_a_fresh_process
from kvstore.bench.runner import OPERATIONS
from kvstore.bench.traffic import ThroughTheTier
from kvstore.errors import ConfigurationError, InvalidOptionError, StoreNotFoundError, TierUnavailable
from kvstore.interrupts import uninterrupted
from kvstore.layout import BlockLayout
from kvstore.namespace import Namespace
from kvstore.objects.side import side_by_side
from kvstore.registry import backend_class, open_store
from kvstore.types import BlockKey, BlockRead, BlockWrite, GetOutcome, PutOutcome
from kvstore.url import CAPACITY, MODE, READONLY, format_size

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.bench.contestant import Traffic
    from kvstore.bench.workload import Lap, Workload
    from kvstore.url import Capacity, TierURL

__all__ = ["BENCH_MODEL", "TierApart", "TierUnderTest"]

BENCH_MODEL = "kvstore-bench"
"""The model name of every namespace a benchmark writes: nothing else uses it, so what is there may be removed."""

_MARGIN = 1.1
"""Bytes a block may occupy, in payloads: framing, padding, records."""


class TierUnderTest(Contestant):
    """The tier at `url`, written and read in the namespace (`kvstore-bench`, `own_name`).

    Raises `ConfigurationError`, before anything is written, where the tier holds blocks of others and no `own_name` is
    given, or where `total_bytes` would push them out. Where no tier was, what opening one made is removed at the end,
    unless others use it by then (`notes` says so); where one was, the namespace that the benchmark wrote.
    """

    name: ClassVar[str] = "kvstore"

    operations: Sequence[str]
    """What of it is worth timing: behind a network a warm load is a load."""

    def __init__(self, url: TierURL, block_bytes: int, total_bytes: int, own_name: str | None = None) -> None:
        self._url = url
        layouts = (BlockLayout.opaque(block_bytes),)
        self._namespace = Namespace(BENCH_MODEL, own_name or "default", layouts, block_tokens=1, key_scheme="random")
        checked = url.validated(backend_class(url).options)
        if checked.option(READONLY):
            raise InvalidOptionError(f"{url}: a benchmark writes: leave out readonly")
        self._footprint = _footprint(url, own_name, total_bytes, checked.option(CAPACITY))
        self.notes = []
        self._filling = memoryview(bytes(block_bytes))
        self._folders: set[bytes] = set()
        self._closed = False
        self._store: BlockStore | None = open_store(url)
        self._made = self._footprint.made() if self._footprint else frozenset[str]()
        try:
            self._clear_own(self._store)
        except BaseException:
            self.close()
            raise
        can = self._store.capabilities
        self.batch_bytes = can.batch_bytes
        self.persistent, self._io = can.persistent, can.io
        self.operations = OPERATIONS[:2] if can.io == "network" else OPERATIONS
        self.notes += [f"kvstore: {can.io}, checks on", *(f"kvstore: {note}" for note in can.notes)]
        if can.io == "network":
            self.notes.append("kvstore: the 256 documents of a tier's folders are there before the time is taken")
        if can.io in ("buffered", "mmap"):
            self.notes.append("kvstore: a store ends in the page cache; what the device takes later is not in the time")

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        blocks = [BlockWrite(key, source) for key, source in zip(keys, sources, strict=True)]
        outcomes = self._open().put_many(self._namespace, blocks)
        self._expect(PutOutcome.STORED, outcomes)

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        blocks = [BlockRead(key, target) for key, target in zip(keys, targets, strict=True)]
        outcomes = self._open().get_many_into(self._namespace, blocks)
        self._expect(GetOutcome.HIT, outcomes)

    def expect(self, keys: Sequence[BlockKey]) -> None:
        # The first block of one of 256 folders brings a document along, once in a tier's life: in a race it would be
        # nearly every block.
        if self._io == "network":
            first = {key.digest[:1] for key in keys} - self._folders
            self._folders |= first
            filled = [BlockKey(folder + bytes(31)) for folder in first]
            side_by_side(lambda key: self.store([key], [self._filling]), filled)
            self.clear(filled)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._open().delete_many(self._namespace, keys)

    @contextmanager
    def cooling(self) -> Generator[None]:
        # Pages that are mapped stay in memory whatever is dropped; closing unmaps them. What an opening reads is there
        # again then, as after a restart. A network has no pages, and a bare client keeps its connections too.
        if not self.persistent or self._io == "network":
            yield
            return
        try:
            with uninterrupted():
                self._open().close()
            yield
        finally:
            with uninterrupted():
                self._store = open_store(self._url)

    def warm_elsewhere(self, load: Workload, keys: Sequence[BlockKey], passes: int) -> list[Lap]:
        if self._io == "direct":
            self.notes.append("kvstore: direct I/O reads from the device, load_warm too")
        if self._io != "mmap":
            return []
        self.notes.append(
            "kvstore: load_warm is timed in a process of its own: pass 1 fills the page tables of a new mapping,"
            " pass 2 finds them"
        )
        return laps_in_a_fresh_process(self._url, self._namespace, load, keys, passes)

    def traffic(self, memory: NDArray[np.uint8], threads: int) -> Traffic:
        return ThroughTheTier(self._open(), self._namespace, threads, memory)

    def traffic_apart(self, memory: NDArray[np.uint8], threads: int) -> Traffic:
        """`traffic`, through a process of its own."""
        return ThroughTheTier(self._url, self._namespace, threads, memory)

    def files(self) -> list[Path]:
        path = Path(self._url.location)
        return [file for file in path.rglob("*") if file.is_file()] if path.is_absolute() else []

    def close(self) -> None:
        if self._closed:
            return
        self._closed, store, self._store = True, self._open(), None
        with store:
            self._clear_own(store)
            mode = store.url.option(MODE)
        if self._footprint is not None:
            reason = self._footprint.remove(self._made | self._footprint.bearing(self._namespace.name), mode)
            if reason is not None:
                self.notes.append(f"{self._url} stays, without the benchmark's blocks: {reason}")

    def _clear_own(self, store: BlockStore) -> None:
        """Remove what this benchmark wrote, and what one that was killed left behind."""
        for space in store.namespaces():
            if space.model == BENCH_MODEL and space.revision == self._namespace.revision:
                store.drop_namespace(space)

    def _expect(self, wanted: PutOutcome | GetOutcome, outcomes: Sequence[PutOutcome | GetOutcome]) -> None:
        others = sorted({outcome.value for outcome in outcomes if outcome is not wanted})
        if others:
            what = f"{', '.join(others)} instead of {wanted.value}"
            raise TierUnavailable(f"{self._url}: {what}: lower --total, raise capacity or make room")

    def _open(self) -> BlockStore:
        if self._store is None:
            raise TierUnavailable(f"{self._url}: the benchmark is over")
        return self._store


class TierApart(Contestant):
    """The tier of `under_test`, in the same namespace, with its bytes moved by a process of its own."""

    name: ClassVar[str] = "kvstore, io_process"

    def __init__(self, under_test: TierUnderTest) -> None:
        self.notes = []
        self._same = under_test

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        self._same.store(keys, sources)

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        self._same.load(keys, targets)

    def expect(self, keys: Sequence[BlockKey]) -> None:
        self._same.expect(keys)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._same.clear(keys)

    def traffic(self, memory: NDArray[np.uint8], threads: int) -> Traffic:
        return self._same.traffic_apart(memory, threads)

    def close(self) -> None:
        """Nothing is its own."""


def _footprint(url: TierURL, own_name: str | None, total_bytes: int, wanted: Capacity | None) -> Footprint | None:
    """What stands where no tier is; None where one is, once it is sure that its blocks are safe."""
    try:
        # Without the capacity: the tier may have another one, until it is opened for writing.
        options = {name: value for name, value in url.raw_options.items() if name != "capacity"}
        store = open_store(replace(url, raw_options={**options, "readonly": True}))
    except StoreNotFoundError as error:
        path = Path(url.location)
        if not path.is_absolute():
            return None
        footprint = Footprint.of(path)
        if footprint.strangers:
            raise ConfigurationError(
                f"{url} is not empty, and whose blocks are there cannot be told: {error}. Benchmark an empty location"
            ) from error
        return footprint
    with store:
        _spare_others(store, url, own_name, total_bytes, wanted)
    return None


def _spare_others(
    store: BlockStore, url: TierURL, own_name: str | None, total_bytes: int, wanted: Capacity | None
) -> None:
    """Raise `ConfigurationError` if opening the tier with the capacity `wanted`, or the blocks, would evict others."""
    others = [space for space in store.namespaces() if space.model != BENCH_MODEL and any(store.scan(space))]
    if not others:
        return
    models = ", ".join(sorted({space.model for space in others}))
    if own_name is None:
        raise ConfigurationError(
            f"{url} holds blocks of others ({models}): benchmark an empty location, or say with --namespace NAME that"
            " the benchmark may write beside them, in a namespace of its own that it removes"
        )
    usage = store.usage()
    capacity = _resolved(wanted, url) or usage.capacity
    taken = usage.used + usage.reserved + usage.overhead
    if capacity is not None and taken + int(total_bytes * _MARGIN) > capacity:
        raise ConfigurationError(
            f"{url} holds {format_size(taken, exact=True)} of {format_size(capacity, exact=True)}:"
            f" {format_size(total_bytes, exact=True)} more would evict blocks of others ({models})."
            " Lower --total, or benchmark an empty location"
        )


def _resolved(capacity: Capacity | None, url: TierURL) -> int | None:
    path = Path(url.location)
    if capacity is None or (capacity.bytes is None and not path.is_absolute()):
        return None
    return capacity.resolve(path)
