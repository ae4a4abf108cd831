"""What a tier of a million blocks costs beside one of ten thousand: opening, lookups, puts, gets, evictions.

    python benchmarks/scale.py                      both local tiers, 10,000 and 1,000,000 blocks (minutes, 5 GB)
    python benchmarks/scale.py --blocks 100000      a tenth of it
    python benchmarks/scale.py --files 1000000      as many real files, too

Blocks have 3,584 bytes, so that each is one page or one file of one page: what is measured is what a block costs beside
its bytes. Each figure is the median over batches, in microseconds of CPU (all threads of this process) and of time.
Gets (of the same blocks), puts and evictions are measured in passes: the first one finds pages that the process has
not mapped and that no cache of the processor has, `later` is the last one, of a process that has been at work.
Lookups are asked of the store (`contains_many`), of LMDB with nothing around it (`bare`), and through `SecondaryTier`,
as a manager asks. What gets, puts and evictions cost in bare LMDB is measured in an environment of its own with as many
records (`bare_lmdb.py`; for `file://` those of its catalogue); `beside LMDB` is what kvstore takes more. The catalogue
of `file://` is brought up to date with the files at the end, when it knows them all and when it knows none, and made
anew by an opening, as after a power loss: for each 100,000 real files.

`lmdb://` holds real blocks. Of `file://` a million files are too slow to make for every run: there, `--files` blocks
are real (the first ones, which are therefore evicted first), and the rest stands in the catalogue alone, entered
through its own API. Lookups, puts and evictions meet the whole catalogue, and only real files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from bare_lmdb import BareLMDB, address
from rich.console import Console
from rich.table import Table

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.catalog import Entry, addresses_of
from kvstore.retention import now_ns
from kvstore.tiering.secondary import SecondaryTier
from kvstore_lmdb.entry import HEADER_BYTES
from kvstore_zarr.format import BlockFacts
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore import BlockStore
    from kvstore.catalog import Catalog
    from kvstore.environment import Environment

BLOCK_BYTES = 3584
STORED_BYTES = 4096
SPACE = Namespace("scale", "revision-1", (BlockLayout.opaque(BLOCK_BYTES),), block_tokens=16)

PUT_TOGETHER, LOOKED_UP_TOGETHER = 64, 1000
BATCHES, LOOKUPS = 40, 200
PASSES = 4
PUT_BLOCKS = PASSES * BATCHES * PUT_TOGETHER
"""What all passes of puts together bring: room for them is left below the cap."""
PUT_FIRST = 4_000
"""Blocks of `file://` that are put; more come as files."""
STEP_S = 1e-4
"""How long the steps of the manager lie apart, here."""
LMDB_BESIDE = 1.2
"""What the capacity of `lmdb://` is, as a multiple of its blocks: it is given at once, for its file does not shrink."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one block cost in one kind of call: microseconds, CPU of this process and time on the wall."""

    cpu: float
    wall: float

    @property
    def rate(self) -> float:
        """Blocks a second of CPU."""
        return 1e6 / self.cpu


@dataclass(frozen=True, slots=True)
class Figures:
    """One tier of `blocks` blocks. `bare` is LMDB's own lookup of the same addresses, without a store around it."""

    scheme: str
    blocks: int
    open_s: float
    usage: Cost
    hit: Cost
    miss: Cost
    bare_hit: Cost
    bare_miss: Cost
    get: Cost
    get_later: Cost
    put: Cost
    put_later: Cost
    evict: Cost
    evict_later: Cost
    tier_hit: Cost
    tier_miss: Cost
    bare_get: Cost
    bare_get_later: Cost
    bare_put: Cost
    bare_put_later: Cost
    bare_evict: Cost
    bare_evict_later: Cost
    known: Cost | None = None
    unknown: Cost | None = None
    anew: Cost | None = None


def keys(start: int, stop: int) -> list[BlockKey]:
    """The keys of blocks by number."""
    return [BlockKey(hashlib.sha256(b"%d" % number).digest()) for number in range(start, stop)]


def cost_of(call: Callable[[Any], object], batches: Sequence[Sequence[Any]]) -> Cost:
    """The median over `batches`, for each element of one."""
    spent: list[tuple[float, float]] = []
    for batch in batches:
        cpu, wall = time.process_time(), time.perf_counter()
        call(batch)
        spent.append(((time.process_time() - cpu) / len(batch), (time.perf_counter() - wall) / len(batch)))
    return Cost(*(1e6 * median(one[kind] for one in spent) for kind in (0, 1)))


def in_passes(name: str, call: Callable[[Any], object], passes: Iterable[Sequence[Any]]) -> dict[str, Cost]:
    """The cost in the first and in the last of several passes, under their names in `Figures`."""
    costs = [cost_of(call, batches) for batches in passes]
    return {name: costs[0], f"{name}_later": costs[-1]}


def put(store: BlockStore, some: Sequence[BlockKey]) -> None:
    """Store blocks, all of them new."""
    data = np.zeros(BLOCK_BYTES, np.uint8).data
    outcomes = store.put_many(SPACE, [BlockWrite(key, data) for key in some])
    if set(outcomes) != {PutOutcome.STORED}:
        sys.exit(f"{store}: not all of {len(some)} blocks were stored: {sorted({one.value for one in outcomes})}")


def get(store: BlockStore, some: Sequence[BlockKey]) -> None:
    """Load blocks, all of them there."""
    into = np.empty((len(some), BLOCK_BYTES), np.uint8)
    outcomes = store.get_many_into(SPACE, [BlockRead(key, row.data) for key, row in zip(some, into, strict=True)])
    if set(outcomes) != {GetOutcome.HIT}:
        sys.exit(f"{store}: not all of {len(some)} blocks were hits")


def fill(store: BlockStore, blocks: int, real: int) -> None:
    """Store the first `real` blocks, and enter the rest into the catalogue, as younger ones without a file."""
    put_first = real if store.url.scheme == "lmdb" else min(real, PUT_FIRST)
    for start in range(0, put_first, 1000):
        put(store, keys(start, min(put_first, start + 1000)))
        told(f"{store.url.scheme}://: {start} of {real} blocks stored")
    if put_first < real:
        copy_in(store, put_first, real)
    catalog: Catalog = cast("Any", store)._tier.catalog
    for start in range(real, blocks, 1000):
        now = now_ns()
        addresses = addresses_of(SPACE, keys(start, min(blocks, start + 1000)))
        with catalog.write() as change:
            first = change.generations(len(addresses))
            change.publish([Entry(address, STORED_BYTES, now, now, first + n) for n, address in enumerate(addresses)])
        told(f"{store.url.scheme}://: {start} of {blocks} blocks entered")


def copy_in(store: BlockStore, start: int, stop: int) -> None:
    """Blocks that come as files, as a copy of another tier would bring them: faster than by puts."""
    tree, root, payload = NamespaceTree(SPACE), store_path(str(store.url)), np.zeros(BLOCK_BYTES, np.uint8)
    closing = np.zeros(STORED_BYTES, np.uint8)
    for number in range(start, stop):
        (key,) = keys(number, number + 1)
        facts = BlockFacts(SPACE.fingerprint, key, BLOCK_BYTES, number, now_ns(), -1, b"")
        tree.frames[0].seal(closing, payload, facts)
        fd = os.open(f"{root}/{tree.block(key)}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(fd, closing.data)
        os.close(fd)
        told(f"{store.url.scheme}://: {number} of {stop} blocks written")
    reindexed(store)


def bare(store: BlockStore) -> Callable[[Sequence[bytes]], object]:
    """A lookup in the same environment with nothing around it: py-lmdb's own call for many keys."""
    environment: Environment = cast("Any", store)._tier.environment
    meta = environment.databases["meta"]

    def look(addresses: Sequence[bytes]) -> object:
        with environment.read() as txn:
            return txn.cursor(meta).getmulti(addresses, values=False)

    return look


def bare_changes(store: BlockStore, blocks: int) -> dict[str, Cost]:
    """Gets, puts and evictions of LMDB with nothing around it, beside as many records as the tier has."""
    place = Path(tempfile.mkdtemp(prefix="bare-", dir=store_path(str(store.url)).parent))
    base = BareLMDB(place, HEADER_BYTES + BLOCK_BYTES if store.url.scheme == "lmdb" else 0)
    try:
        for start in range(0, blocks, 1000):
            base.put([address(number) for number in range(start, min(blocks, start + 1000))])
        os.sync()
        numbers = (list(map(address, range(start, start + PUT_TOGETHER))) for start in count(1 << 41, PUT_TOGETHER))
        random = random_numbers(0, blocks)
        got = [[address(number) for number in islice(random, PUT_TOGETHER)] for _ in range(BATCHES)]

        def new() -> Iterator[list[list[bytes]]]:
            return (list(islice(numbers, BATCHES)) for _ in range(PASSES))

        costs = in_passes("bare_get", base.get, [got] * PASSES) | in_passes("bare_put", base.put, new())
        for batch in islice(numbers, BATCHES):
            base.evict_and_put(batch)
        return costs | in_passes("bare_evict", base.evict_and_put, new())
    finally:
        base.close()
        shutil.rmtree(place)


def batches_of(numbers: Iterator[int], size: int, batches: int) -> list[list[BlockKey]]:
    """`batches` batches of `size` keys, by number."""
    return [[key for number in islice(numbers, size) for key in keys(number, number + 1)] for _ in range(batches)]


def random_numbers(start: int, stop: int) -> Iterator[int]:
    """Without end, the same in every run."""
    random = Random(7)
    while True:
        yield random.randrange(start, stop)


def measured(url: str, blocks: int, real: int) -> Figures:
    """Fill a tier nearly to its cap, close it, and measure it from its next opening on."""
    begin = time.perf_counter()
    with open_store(url) as store:
        fill(store, blocks, real)
    with open_store(url) as store:  # which has a look at how large the catalogue has become
        usage = store.usage()
    os.sync()  # the kernel would write what was filled in during what is measured
    told(f"{url}: filled in {time.perf_counter() - begin:.0f} s", always=True)
    if usage.capacity is None:
        with open_store(url, capacity=usage.used + usage.overhead + 2 * PUT_BLOCKS * STORED_BYTES):
            pass
    begin = time.perf_counter()
    with open_store(url) as store:
        open_s = time.perf_counter() - begin
        hits = batches_of(random_numbers(0, blocks), LOOKED_UP_TOGETHER, LOOKUPS)
        misses = batches_of(random_numbers(1 << 43, 1 << 44), LOOKED_UP_TOGETHER, LOOKUPS)
        addresses = [[addresses_of(SPACE, batch) for batch in kind] for kind in (hits, misses)]
        look = bare(store)
        got = batches_of(random_numbers(0, real), PUT_TOGETHER, BATCHES)
        figures = Figures(
            scheme=store.url.scheme,
            blocks=blocks,
            open_s=open_s,
            usage=cost_of(lambda _: store.usage(), [[None]] * LOOKUPS),
            hit=cost_of(lambda batch: store.contains_many(SPACE, batch), hits),
            bare_hit=cost_of(look, addresses[0]),
            miss=cost_of(lambda batch: store.contains_many(SPACE, batch), misses),
            bare_miss=cost_of(look, addresses[1]),
            **in_passes("get", lambda batch: get(store, batch), [got] * PASSES),
            **in_passes("put", lambda batch: put(store, batch), new_blocks(iter(range(1 << 41, 1 << 42)))),
            **evictions(store),
            tier_hit=through_a_tier(
                store, batches_of(random_numbers(blocks // 2, blocks), LOOKED_UP_TOGETHER, LOOKUPS)
            ),
            tier_miss=through_a_tier(store, misses),
            **bare_changes(store, blocks),
        )
        if store.url.scheme != "file" or real < blocks:
            return figures
        files = store.usage().blocks
        known = once(lambda: reindexed(store), files)
        catalog: Catalog = cast("Any", store)._tier.catalog
        with catalog.write() as change:
            change.clear()
        unknown = once(lambda: reindexed(store), files)
    shutil.rmtree(store_path(url) / ".kvstore" / "catalogue")
    anew = once(lambda: open_store(url).close(), files)
    return replace(figures, known=known, unknown=unknown, anew=anew)


def store_path(url: str) -> Path:
    """The folder of a local tier."""
    return Path(url.partition("://")[2].partition("?")[0])


def reindexed(store: BlockStore) -> None:
    """The catalogue brought up to date with the files."""
    found = cast("Any", store).reindex()
    told(f"{store.url}: {found}", always=True)


def once(call: Callable[[], object], files: int) -> Cost:
    """What one call costs for each 100,000 of the files, in microseconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    share = 1e6 * 100_000 / files
    return Cost(share * (time.process_time() - cpu), share * (time.perf_counter() - wall))


def through_a_tier(store: BlockStore, batches: Sequence[Sequence[BlockKey]]) -> Cost:
    """Lookups as a manager asks them: noted, handed to a thread, and collected at one of the steps that follow."""
    tier = SecondaryTier(store, SPACE)

    def ask(batch: Sequence[BlockKey]) -> None:
        tier.ask(batch)
        tier.submit()
        while not tier.poll().answers:
            time.sleep(STEP_S)

    try:
        return cost_of(ask, batches)
    finally:
        tier.close(10)


def new_blocks(numbers: Iterator[int]) -> Iterator[list[list[BlockKey]]]:
    """Batches for passes of puts."""
    return (batches_of(numbers, PUT_TOGETHER, BATCHES) for _ in range(PASSES))


def evictions(store: BlockStore) -> dict[str, Cost]:
    """What a put costs that has to evict as many blocks: at the cap, which is reached first."""
    numbers, before = iter(range(1 << 42, 1 << 43)), -1
    while store.usage().blocks > before:
        before = store.usage().blocks
        for batch in batches_of(numbers, PUT_TOGETHER, 40):
            put(store, batch)
    return in_passes("evict", lambda batch: put(store, batch), new_blocks(numbers))


TOLD_EVERY_S = 10.0
_told_at = 0.0


def told(text: str, *, always: bool = False) -> None:
    """A line of progress every few seconds."""
    global _told_at
    if always or time.monotonic() - _told_at > TOLD_EVERY_S:
        _told_at = time.monotonic()
        print(text, file=sys.stderr)


def show(few: Figures, many: Figures) -> None:
    """Both tiers side by side."""
    table = Table(title=f"{few.scheme}://", title_justify="left")
    for name in ("", f"{few.blocks:,} blocks", f"{many.blocks:,} blocks", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("opening", f"{few.open_s:.3f} s", f"{many.open_s:.3f} s", f"{many.open_s / few.open_s:.2f}")
    for name in ("hit", "miss", "bare_hit", "bare_miss", "tier_hit", "tier_miss"):
        one, other = getattr(few, name), getattr(many, name)
        cells = (f"{cost.rate:,.0f} a second of CPU, {1e6 / cost.wall:,.0f} in time" for cost in (one, other))
        table.add_row(name.replace("_", " ") + " (lookups)", *cells, f"{one.rate / other.rate:.2f}")
    for name in ("usage", "get", "get_later", "put", "put_later", "evict", "evict_later"):
        one, other = getattr(few, name), getattr(many, name)
        cells = (f"{cost.cpu:.0f} us CPU, {cost.wall:.0f} us" for cost in (one, other))
        table.add_row(name.replace("_", " "), *cells, f"{other.cpu / one.cpu:.2f} CPU, {other.wall / one.wall:.2f}")
        if name != "usage":
            show_beside_bare(table, name, few, many)
    for name in ("known", "unknown", "anew"):
        one, other = getattr(few, name), getattr(many, name)
        if one is not None and other is not None:
            cells = (f"{cost.cpu / 1e6:.1f} s CPU, {cost.wall / 1e6:.1f} s" for cost in (one, other))
            table.add_row(
                f"{name} (100,000 files)", *cells, f"{other.cpu / one.cpu:.2f} CPU, {other.wall / one.wall:.2f}"
            )
    Console(width=150).print(table)


def show_beside_bare(table: Table, name: str, few: Figures, many: Figures) -> None:
    """What the same costs in bare LMDB, and what kvstore takes more."""
    ours = [getattr(figures, name).cpu for figures in (few, many)]
    bare = [getattr(figures, f"bare_{name}").cpu for figures in (few, many)]
    more = [one - other for one, other in zip(ours, bare, strict=True)]
    for title, (one, other) in (("  bare LMDB", bare), ("  beside LMDB", more)):
        table.add_row(title, f"{one:.0f} us CPU", f"{other:.0f} us CPU", f"{other / one:.2f} CPU")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", type=int, default=10_000, help="blocks of the small tier")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the large tier")
    parser.add_argument("--files", type=int, default=100_000, help="real files of the large file:// tier")
    parser.add_argument("--schemes", default="lmdb,file", help="which tiers")
    parser.add_argument("--dir", type=Path, default=None, help="where (5 GB); default: the temporary directory")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    arguments = parser.parse_args()
    for scheme in arguments.schemes.split(","):
        pair: list[Figures] = []
        for blocks in (arguments.small, arguments.blocks):
            place = Path(tempfile.mkdtemp(prefix="kvstore-scale-", dir=arguments.dir))
            try:
                if scheme == "lmdb":
                    capacity = int((blocks + PUT_BLOCKS) * STORED_BYTES * LMDB_BESIDE) + (8 << 20)
                    pair.append(measured(f"lmdb://{place}/tier?capacity={capacity}", blocks, blocks))
                else:
                    pair.append(measured(f"{scheme}://{place}/tier", blocks, min(blocks, arguments.files)))
            finally:
                shutil.rmtree(place)
        if arguments.json:
            print(*(f"{asdict(one)}" for one in pair), sep="\n")
        else:
            show(*pair)


if __name__ == "__main__":
    main()
