"""What goes wrong in a put, a delete or a purge is undone, at once or by whoever comes by: nothing is owed for good."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_helpers import CORRUPT, HIT, MISS, STORED, file_of

import kvstore_zarr.get
import kvstore_zarr.purge
import kvstore_zarr.removal
import kvstore_zarr.steps
from kvstore import open_store
from kvstore.catalog import Catalog, address_of
from kvstore.environment import Environment
from kvstore.errors import TierUnavailable
from kvstore.marks import Mark
from kvstore.purging import Request, purge
from kvstore.testing.supply import MIB, SPACE, content, get, keys, writes
from kvstore_zarr.deleting import remove
from kvstore_zarr.intents import reclaim
from kvstore_zarr.names import NameLocks
from kvstore_zarr.reindex import reindex
from kvstore_zarr.removal import Patience
from kvstore_zarr.store import LocalZarrStore
from kvstore_zarr.tier import pack_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    import lmdb

    from kvstore import BlockStore
    from kvstore.change import Change
    from kvstore_zarr.tier import LocalTier


def left_of(root: Path, numbers: Iterable[int]) -> set[int]:
    """The blocks whose bytes stand in some file of the tier."""
    data = b"\0".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    return {number for number in numbers if content(number)[:64].tobytes() in data}


def drafts(root: Path) -> list[Path]:
    return list((root / SPACE.name).rglob("draft-*"))


def tier_of(store: BlockStore) -> LocalTier:
    assert isinstance(store, LocalZarrStore)
    return store._tier


class BadSector:
    """A file that cannot be overwritten while this lasts: that of the second block of an intent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = True
        self._fill = kvstore_zarr.removal.fill_with_zeros
        monkeypatch.setattr(kvstore_zarr.removal, "fill_with_zeros", self._failing)

    def _failing(self, fd: int) -> int:
        if self.broken and str(Path(f"/proc/self/fd/{fd}").readlink()).endswith("-1"):
            raise OSError(errno.EIO, "Input/output error")
        return self._fill(fd)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_purge_is_not_complete_while_a_purged_block_is_on_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    url, asked = f"file://{root}", Request(tenant="acme")
    with open_store(url) as engine:  # has the tier open all the time, as ever
        engine.put_many(SPACE, writes(range(6)))
        engine.mark_many(SPACE, keys(range(4)), Mark(tenant="acme"))
        sector = BadSector(monkeypatch)
        if not overwrite:
            monkeypatch.setattr(kvstore_zarr.purge, "erase", failing_erase)
        for _ in range(2):
            (receipt,) = purge([url], asked, dry_run=False, overwrite=overwrite).tiers
            assert not receipt.complete
            assert len(left_of(root, range(4))) == 1
        (receipt,) = purge([url], asked, dry_run=False, overwrite=overwrite).tiers
        assert "purge again" in receipt.failed[0]
        sector.broken = False
        (receipt,) = purge([url], asked, dry_run=False, overwrite=overwrite).tiers
        assert receipt.complete
        assert left_of(root, range(6)) == {4, 5}
        assert engine.usage().reserved == 0
        assert not drafts(root)


def failing_erase(path: str, *_: object) -> None:
    raise OSError(errno.EIO, "Input/output error", path)


@contextmanager
def locked_out(monkeypatch: pytest.MonkeyPatch, store: BlockStore, after: int) -> Generator[None]:
    """This store writes so many more transactions to its catalogue, and then no more."""
    real, catalog, left = Catalog.write, tier_of(store).catalog, after

    @contextmanager
    def write(self: Catalog, *args: float) -> Generator[Change]:
        nonlocal left
        if self is catalog:
            left -= 1
            if left < 0:
                raise TierUnavailable("another process has held up all writers")
        with real(self, *args) as change:
            yield change

    monkeypatch.setattr(Catalog, "write", write)
    yield


VERBS: Mapping[str, Callable[[BlockStore], object]] = {
    "put": lambda store: store.put_many(SPACE, writes(range(10, 14))),
    "delete": lambda store: store.delete_many(SPACE, keys(range(3))),
    "purge": lambda store: store.purge_many(SPACE, keys(range(3)), refuse_s=0),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_process_leaves_that_could_not_end_what_it_did_is_ended_by_others(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"file://{root}") as engine:
        engine.put_many(SPACE, writes(range(6)))
        store = open_store(f"file://{root}")
        with locked_out(monkeypatch, store, 1):
            with suppress(TierUnavailable):
                VERBS[verb](store)
            assert engine.usage().reserved > 0
            store.close()
        tier_of(engine).reclaimed = -math.inf
        engine.put_many(SPACE, writes([20]))
        assert engine.usage().reserved == 0
        assert not drafts(root)
        assert not left_of(root, range(10, 14))


@pytest.mark.parametrize("verb", VERBS)
def test_what_an_error_ended_is_undone_at_once(verb: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"file://{root}") as store:
        store.put_many(SPACE, writes(range(6)))
        real, left = Catalog.write, 2

        def write(self: Catalog, *args: float) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise TierUnavailable("another process has held up all writers")
            return real(self, *args)

        monkeypatch.setattr(Catalog, "write", write)
        with suppress(TierUnavailable):
            VERBS[verb](store)
        assert store.usage().reserved == 0
        assert not drafts(root)
        assert not left_of(root, range(10, 14))


@pytest.mark.parametrize("verb", VERBS)
def test_what_was_not_committed_is_owed_by_nobody(verb: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit that takes a job's room fails: the next job has its number, its drafts their names."""
    real, failing = Environment.write, True

    @contextmanager
    def write(self: Environment, *args: float) -> Generator[lmdb.Transaction]:
        with real(self, *args) as txn:
            yield txn
            if failing:
                raise OSError(errno.ENOSPC, "No space left on device")

    def reclaim_once(step: str) -> None:
        if step == "written":
            reclaim(tier_of(store))
            reserved.append(store.usage().reserved)

    reserved: list[int] = []
    with open_store(f"file://{root}?capacity=64MB") as store:
        store.put_many(SPACE, writes(range(6)))
        monkeypatch.setattr(Environment, "write", write)
        with suppress(OSError):
            VERBS[verb](store)
        failing = False
        assert tier_of(store).stranded == []
        monkeypatch.setattr(kvstore_zarr.steps, "checkpoint", reclaim_once)
        assert store.put_many(SPACE, writes([30])) == [STORED]
        assert min(reserved) > 0
        assert store.usage().reserved == 0


def forgotten(tier: LocalTier, numbers: Iterable[int]) -> list[bytes]:
    """Blocks whose files stand where they were, and of which the catalogue knows no more."""
    addresses = [address_of(SPACE, key) for key in keys(numbers)]
    with tier.catalog.write() as change:
        change.discard(addresses)
    return addresses


def reclaim_a_deletion(store: BlockStore) -> None:
    tier = tier_of(store)
    addresses = forgotten(tier, range(8))
    with tier.catalog.write() as change:
        change.reserve(os.urandom(16), MIB, pack_addresses(addresses))
    reclaim(tier)


def purge_unknown(store: BlockStore) -> None:
    forgotten(tier_of(store), range(8))
    store.purge_unseen(names=[SPACE.name], refuse_s=0, overwrite=False)


def reindex_torn(store: BlockStore) -> None:
    tier = tier_of(store)
    for address in forgotten(tier, range(8)):
        os.truncate(str(tier.path(address)), 5000)
    reindex(tier, unreadable_for_s=-1.0)


REMOVALS: Mapping[str, Callable[[BlockStore], object]] = {
    "delete": lambda store: store.delete_many(SPACE, keys(range(8))),
    "purge": lambda store: store.purge_many(SPACE, keys(range(8)), refuse_s=0),
    "reclaim": reclaim_a_deletion,
    "purge of what is unknown": purge_unknown,
    "reindex": reindex_torn,
}


@pytest.mark.parametrize("verb", REMOVALS)
def test_blocks_that_are_being_read_are_waited_for_together_and_nobody_waits_along(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waiting = kvstore_zarr.removal._wait_for_readers, threading.Event()
    waited, patiences, inodes = list[int](), set[Patience](), dict[int, int]()

    def wait(fd: int, patience: Patience) -> bool:
        waited.append(inodes[os.fstat(fd).st_ino])
        patiences.add(patience)
        waiting.set()
        return real(fd, patience)

    monkeypatch.setattr(kvstore_zarr.removal, "READER_PATIENCE_S", 1000.0)
    monkeypatch.setattr(kvstore_zarr.removal, "_wait_for_readers", wait)
    with open_store(f"file://{root}") as store:
        with ExitStack() as files:
            store.put_many(SPACE, writes(range(8)))
            for number in range(8):
                fcntl.flock(files.enter_context(file_of(root, number).open("rb")), fcntl.LOCK_SH)
                inodes[file_of(root, number).stat().st_ino] = number
            removing = threading.Thread(target=REMOVALS[verb], args=(store,))
            removing.start()
            assert waiting.wait(60)
            put = store.put_many(SPACE, writes(waited))
            assert (put, removing.is_alive()) == ([STORED], True)
        removing.join(60)
        assert not removing.is_alive()
        assert (sorted(waited), len(patiences)) == ([*range(8)], 1)
        assert get(store, range(8)) == [HIT if number == waited[0] else MISS for number in range(8)]
        assert store.usage().reserved == 0


@pytest.mark.parametrize("verb", ["delete_many", "purge_many"])
def test_no_call_locks_more_than_a_few_names_at_once(verb: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, most = NameLocks.hold, 0

    def hold(self: NameLocks, addresses: Sequence[bytes]) -> object:
        nonlocal most
        most = max(most, len(addresses))
        return real(self, addresses)

    with open_store(f"file://{root}") as store:
        store.put_many(SPACE, writes(range(3)))
        monkeypatch.setattr(NameLocks, "hold", hold)
        asked = [*keys([0, 1, 0]), *keys(range(1000, 1300)), *keys([2, 1])]
        gone = getattr(store, verb)(SPACE, asked)
        assert [place for place, went in enumerate(gone) if went] == [0, 1, len(asked) - 2]
        assert 0 < most <= 64


def test_another_file_than_the_one_that_was_seen_is_not_removed(root: Path) -> None:
    with open_store(f"file://{root}") as store:
        store.put_many(SPACE, writes([1]))
        address, inode = address_of(SPACE, keys([1])[0]), file_of(root, 1).stat().st_ino
        for seen in (None, inode + 1):
            assert remove(tier_of(store), [address], seen={address: seen}) == [False]
            assert get(store, [1]) == [HIT]
        assert remove(tier_of(store), [address], seen={address: inode}) == [True]


def test_a_block_that_was_replaced_since_it_was_found_damaged_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvstore_zarr.get.remove
    with open_store(f"file://{root}") as store, open_store(f"file://{root}") as other:

        def late(*args: object, **options: object) -> list[bool]:
            assert other.delete_many(SPACE, keys([1])) == [True]
            assert other.put_many(SPACE, writes([1])) == [STORED]
            return real(*args, **options)  # type: ignore[arg-type]

        store.put_many(SPACE, writes([1, 2]))
        for number in (1, 2):
            with file_of(root, number).open("r+b") as file:
                file.write(b"damage")
        assert get(store, [2]) == [CORRUPT]
        monkeypatch.setattr(kvstore_zarr.get, "remove", late)
        assert get(store, [1]) == [MISS]  # the new file has the old one's inode, often as not
        assert get(store, [1, 2]) == [HIT, MISS]
