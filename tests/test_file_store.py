"""`file://` beyond the contract: adoption and rebuilding, readers against evictions, others in the tree.

What every backend promises is in `tests/backends`; what holds when processes are killed in `tests/crash`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
from file_store_helpers import (
    BLOCK,
    CORRUPT,
    EXISTS,
    FULL,
    HIT,
    MIB,
    MISS,
    SPACE,
    STORED,
    file_of,
    fill,
    get,
    key,
    occupied,
    put,
)

from kvstore import (
    PutOutcome,
    open_store,
)
from kvstore.errors import NotAStoreError, StoreDamagedError, StoreNotFoundError
from kvstore.testing.patience import within
from kvstore_zarr import calls
from kvstore_zarr.format import BlockFrame

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


class TestTree:
    def test_whatever_is_no_block_lies_in_one_folder(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, range(20))
            assert {path.name for path in root.iterdir()} == {".kvstore", SPACE.name}
            files = [path for path in (root / SPACE.name).rglob("*") if path.is_file() and path.name != "zarr.json"]
            assert set(files) == {file_of(root, number) for number in range(20)}
            assert not list((root / ".kvstore" / "drafts").iterdir())

    def test_usage_is_what_the_device_says(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=64 * MIB) as store:
            put(store, range(50))
            usage = store.usage()
            assert usage.used == sum(file_of(root, number).stat().st_blocks * 512 for number in range(50))
            tree = occupied(root)
            assert tree <= usage.used + usage.overhead <= tree + 1 * MIB
            assert usage.reserved == 0

    def test_files_that_mode_widens_are_so_whatever_the_umask(self, root: Path) -> None:
        before = os.umask(0o077)
        try:
            with open_store(f"file://{root}", mode="0640") as store:
                put(store, range(3))
        finally:
            os.umask(before)
        assert {oct(file_of(root, number).stat().st_mode & 0o777) for number in range(3)} == {"0o640"}
        assert oct(file_of(root, 1).parent.stat().st_mode & 0o777) == "0o750"

    def test_a_mount_point_with_lost_and_found_is_empty(self, root: Path) -> None:
        (root / "lost+found").mkdir(parents=True)
        with open_store(f"file://{root}") as store:
            assert put(store, [1]) == [STORED]

    def test_durable_blocks_are_stored_and_read_alike(self, root: Path) -> None:
        with open_store(f"file://{root}", durability="fsync") as store:
            assert put(store, range(3)) == [STORED] * 3
            assert get(store, range(3)) == [HIT] * 3


class TestWithoutItsCatalogue:
    def test_blocks_that_came_without_a_catalogue_are_adopted_with_their_facts(
        self, root: Path, tmp_path: Path
    ) -> None:
        with open_store(f"file://{root}") as store:
            put(store, range(30))
            known = {info.key: info for info in store.scan(SPACE)}
        shutil.copytree(root / SPACE.name, tmp_path / "copy" / SPACE.name)
        with open_store(f"file://{tmp_path}/copy") as store:
            found = {info.key: info for info in store.scan(SPACE)}
            assert found.keys() == known.keys()
            assert {k: (i.position, i.parent, i.created) for k, i in found.items()} == {
                k: (i.position, i.parent, i.created) for k, i in known.items()
            }
            assert store.namespaces() == [SPACE]
            assert get(store, range(30)) == [HIT] * 30
            assert put(store, [30, 3]) == [STORED, EXISTS]

    def test_read_only_says_that_it_would_have_to_be_opened_once(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1])
        shutil.rmtree(root / ".kvstore")
        with pytest.raises(StoreNotFoundError, match="open it once without readonly=true"):
            open_store(f"file://{root}", readonly=True)

    def test_beside_something_else_they_are_not_adopted(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1])
        shutil.rmtree(root / ".kvstore")
        (root / "notes").write_text("mine")
        with pytest.raises(NotAStoreError, match="notes"):
            open_store(f"file://{root}")
        assert file_of(root, 1).exists()

    @pytest.mark.parametrize(
        "harm",
        [
            lambda inner: (inner / "catalogue" / "data.mdb").write_bytes(b"no catalogue" * 9999),
            lambda inner: os.truncate(inner / "catalogue" / "data.mdb", 5000),
            lambda inner: (inner / "catalogue" / "data.mdb").unlink(),
            lambda inner: (inner / "state").write_text("dirty another-boot\n"),
            lambda inner: (inner / "state").write_text("rebuilding\n"),
            lambda inner: (inner / "state").unlink(),
        ],
        ids=["garbage", "cut", "gone", "after a restart of the machine", "half rebuilt", "no state"],
    )
    def test_a_catalogue_that_cannot_be_trusted_is_made_anew(self, root: Path, harm: Callable[[Path], object]) -> None:
        with open_store(f"file://{root}", capacity=16 * MIB) as store:
            put(store, range(30))
            before = store.usage()
        os.truncate(file_of(root, 1), 8192)
        shutil.copy(file_of(root, 2), file_of(root, 3))
        with file_of(root, 4).open(
            "r+b"
        ) as file:  # the tail is there, the payload a hole: as a power loss may leave it
            closing = file.read()[BlockFrame(BLOCK).whole :]
            file.truncate(0)
            os.pwrite(file.fileno(), closing, BlockFrame(BLOCK).whole)
        (file_of(root, 5).parent / "notes.txt").write_text("not ours")
        drafts = [root / ".kvstore" / "drafts" / "left-over", file_of(root, 6).parent / "draft-0123-4-5"]
        for draft in drafts:
            draft.write_bytes(bytes(9000))
        harm(root / ".kvstore")
        with open_store(f"file://{root}", capacity=16 * MIB) as store:
            assert get(store, range(30)) == [HIT, MISS, HIT, MISS, MISS, *[HIT] * 25]
            usage = store.usage()
            size = file_of(root, 0).stat().st_blocks * 512
            assert (usage.blocks, usage.used, usage.reserved) == (27, before.used - 3 * size, 0)
            assert occupied(root) <= usage.used + usage.overhead
            assert (file_of(root, 5).parent / "notes.txt").read_text() == "not ours"
            assert not file_of(root, 1).exists()
            assert not [draft for draft in drafts if draft.exists()]
            assert put(store, [1, 3, 4]) == [STORED] * 3
        with open_store(f"file://{root}", readonly=True) as store:
            assert get(store, range(30)) == [HIT] * 30

    def test_read_only_does_not_rebuild(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1])
        os.truncate(root / ".kvstore" / "catalogue" / "data.mdb", 5000)
        with pytest.raises(StoreDamagedError, match="without readonly=true"):
            open_store(f"file://{root}", readonly=True)

    def test_a_tree_over_its_cap_is_trimmed_before_anything_else(self, root: Path) -> None:
        """Field report 2: a restarted cache that trusts a directory over its cap."""
        with open_store(f"file://{root}") as store:
            put(store, range(200))
        shutil.rmtree(root / ".kvstore")
        with open_store(f"file://{root}", capacity=8 * MIB) as store:
            assert occupied(root) <= 8 * MIB
            assert 0 < store.usage().blocks < 110
            assert put(store, [500]) == [STORED]


class TestReadersAndEvictions:
    def test_a_block_that_is_being_read_is_not_evicted(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=6 * MIB) as store:
            put(store, [0])
            with file_of(root, 0).open("rb") as reader:
                fcntl.flock(reader, fcntl.LOCK_SH)
                following = fill(store, start=1)
                put(store, range(following, following + 20))
                assert get(store, [0, 1]) == [HIT, MISS]

    def test_an_evicted_blocks_file_is_overwritten_in_place(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=6 * MIB) as store:
            number = fill(store)
            with ExitStack() as closing:
                files = [closing.enter_context(path.open("rb")) for path in (root / SPACE.name).rglob("*.0")]
                assert set(put(store, range(number, number + 30))) == {STORED}
                alive = sum(os.fstat(file.fileno()).st_nlink for file in files)
            assert alive >= len(files) - 10  # a few give way to new folders

    def test_space_is_free_on_return_though_somebody_has_the_file_open(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1])
            with file_of(root, 1).open("rb") as onlooker:
                assert os.fstat(onlooker.fileno()).st_blocks > 0
                assert store.delete_many(SPACE, [key(1)]) == [True]
                assert os.fstat(onlooker.fileno()).st_blocks == 0

    def test_a_get_waits_out_an_eviction_that_did_not_happen_and_gives_up_on_one_that_hangs(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1])
            with file_of(root, 1).open("rb") as evictor:
                fcntl.flock(evictor, fcntl.LOCK_EX)
                with within(0.1):
                    assert get(store, [1]) == [MISS]
                timer = threading.Timer(0.01, lambda: fcntl.flock(evictor, fcntl.LOCK_UN))
                timer.start()
                assert get(store, [1]) == [HIT]
                timer.join()
            assert store.usage().blocks == 1

    def test_a_child_that_was_forked_during_a_get_keeps_no_block_from_eviction(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        children: list[int] = []
        read = os.preadv

        def read_and_fork(*arguments: Any) -> int:
            children.append(os.fork())
            if not children[-1]:
                time.sleep(60)
                os._exit(0)
            return read(*arguments)

        with open_store(f"file://{root}") as store:
            put(store, [1])
            monkeypatch.setattr(calls, "made_by", calls.PYTHON)
            monkeypatch.setattr(os, "preadv", read_and_fork)
            try:
                assert get(store, [1]) == [HIT]
                with file_of(root, 1).open("rb") as evictor:
                    fcntl.flock(evictor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.kill(children[0], 9)
                os.waitpid(children[0], 0)

    def test_gets_beside_evictions_never_see_a_wrong_or_a_corrupt_block(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=4 * MIB) as store, ThreadPoolExecutor(6) as pool:

            def write(seed: int) -> set[object]:
                return {outcome for step in range(60) for outcome in put(store, [(seed * 31 + step) % 70])}

            def read(seed: int) -> set[object]:
                return {outcome for step in range(120) for outcome in get(store, [(seed * 17 + step * 3) % 70])}

            writers = [pool.submit(write, seed) for seed in range(3)]
            readers = [pool.submit(read, seed) for seed in range(3)]
            assert set().union(*(job.result() for job in writers)) <= {STORED, EXISTS, FULL}
            assert set().union(*(job.result() for job in readers)) <= {HIT, MISS}
            assert occupied(root) <= 4 * MIB


class TestOthersInTheTree:
    def test_a_namespace_removed_by_hand_is_missed_counted_out_and_made_again(self, root: Path) -> None:
        """Field report 4: deletes by another path that never decrement."""
        with open_store(f"file://{root}") as store:
            put(store, range(10))
            shutil.rmtree(root / SPACE.name)
            assert get(store, range(10)) == [MISS] * 10
            assert (store.usage().blocks, store.usage().used) == (0, 0)
            assert put(store, range(10)) == [STORED] * 10
            assert get(store, range(10)) == [HIT] * 10
        assert (root / SPACE.name / "zarr.json").exists()

    def test_files_removed_by_hand_make_room_when_their_turn_comes(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=6 * MIB) as store:
            number = fill(store)
            for path in (root / SPACE.name).rglob("*.0"):
                path.unlink()
            assert put(store, range(number, number + 30)) == [STORED] * 30
            assert get(store, range(number, number + 30)) == [HIT] * 30

    def test_something_else_under_a_blocks_name_is_no_hit_and_no_exception(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            put(store, [1, 2])
            file_of(root, 1).unlink()
            file_of(root, 1).mkdir()
            assert get(store, [1, 2])[0] in (MISS, CORRUPT)
            assert get(store, [2]) == [HIT]

    def test_threads_that_put_the_same_blocks_at_once_store_each_once(self, root: Path) -> None:
        with open_store(f"file://{root}") as store, ThreadPoolExecutor(8) as pool:
            for start in range(0, 80, 4):
                together = threading.Barrier(8)

                def at_once(start: int = start, together: threading.Barrier = together) -> list[PutOutcome]:
                    together.wait()
                    return put(store, range(start, start + 4))

                outcomes = [outcome for job in [pool.submit(at_once) for _ in range(8)] for outcome in job.result()]
                assert sorted(outcomes, key=str) == [EXISTS] * 28 + [STORED] * 4
            assert (store.usage().blocks, store.usage().reserved) == (80, 0)
            assert get(store, range(80)) == [HIT] * 80

    def test_processes_that_put_the_same_blocks_leave_one_file_each_and_exact_books(self, root: Path) -> None:
        with open_store(f"file://{root}") as store, ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
            outcomes = list(pool.map(put_all, [str(root)] * 4))
            assert all(set(found) <= {STORED, EXISTS} for found in outcomes)
            assert sum(found.count(STORED) for found in outcomes) == 40
            assert (store.usage().blocks, store.usage().reserved) == (40, 0)
            assert len(list((root / SPACE.name).rglob("*.0"))) == 40
            assert get(store, range(40)) == [HIT] * 40


def put_all(root: str) -> list[PutOutcome]:
    """Put the same forty blocks as everybody else."""
    with open_store(f"file://{root}") as store:
        return [outcome for start in range(0, 40, 4) for outcome in put(store, range(start, start + 4))]
