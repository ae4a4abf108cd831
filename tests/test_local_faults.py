"""What goes wrong around a local tier: foreign things in its tree, full disks, damaged records, other users."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import BlockLayout, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.errors import NewerFormatError, NotAStoreError, StoreDamagedError, StoreFullError, TierUnavailable
from kvstore.testing.supply import KIB, MIB, SPACE, get, key, keys, write, writes
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS, FULL, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, PutOutcome.FAILED

OTHER = Namespace("other", "revision-1", (BlockLayout.opaque(SPACE.block_bytes()),), block_tokens=16)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def file_of(root: Path, number: int, space: Namespace = SPACE) -> Path:
    return root / NamespaceTree(space).block(key(number))


def occupied(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))


def contradict(path: Path) -> None:
    path.write_text(path.read_text().replace("other", "another"))


def make_newer(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 0', '"format": 7'))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


class TestOneBadNamespace:
    @pytest.mark.parametrize(
        "harm",
        [
            contradict,
            make_newer,
            lambda path: path.write_text("{"),
            lambda path: path.write_bytes(b"\xff\xfe\x00"),
            lambda path: path.write_text("[1]"),
            make_pipe,
            make_directory,
        ],
        ids=["contradicts its folder", "newer", "no JSON", "no text", "not ours", "pipe", "directory"],
    )
    def test_it_is_set_aside_and_the_others_are_served(
        self, root: Path, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        with open_store(f"file://{root}", capacity=16 * MIB) as store:
            store.put_many(OTHER, [write(number, OTHER) for number in range(20)])
            store.put_many(SPACE, writes(range(20)))
        manifest = root / OTHER.name / "zarr.json"
        harm(manifest)
        left = sorted((root / OTHER.name).rglob("*"))
        for again in ("read-only", "with its catalogue", "rebuilt"):
            if again == "rebuilt":
                (root / ".kvstore" / "state").unlink()
            caplog.clear()
            with open_store(f"file://{root}", readonly=again == "read-only") as store:
                assert [OTHER.name in note and "set aside" in note for note in store.capabilities.notes].count(
                    True
                ) == 1
                assert [record.levelno for record in caplog.records] == [logging.WARNING]
                assert store.namespaces() == [SPACE]
                assert get(store, range(20)) == [HIT] * 20
                assert get(store, [1], OTHER) == [MISS]
                assert store.contains_many(OTHER, keys([1])) == [False]
                assert store.put_many(OTHER, [write(1, OTHER)]) == [FAILED]
                assert store.delete_many(OTHER, keys([1])) == [False]
                assert list(store.scan(OTHER)) == []
                assert {info.key for info in store.scan(SPACE)} == set(keys(range(20)))
                usage = store.usage()
                assert occupied(root) <= usage.used + usage.overhead
        with open_store(f"file://{root}", capacity=4 * MIB) as store:
            store.put_many(SPACE, writes(range(20, 200)))
            assert get(store, [199]) == [HIT]
            assert occupied(root) <= 4 * MIB
        assert sorted((root / OTHER.name).rglob("*")) == left

    def test_a_tier_that_is_newer_altogether_is_newer(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes([1]))
            store.put_many(OTHER, [write(1, OTHER)])
        for space in (SPACE, OTHER):
            make_newer(root / space.name / "zarr.json")
        with pytest.raises(NewerFormatError, match="upgrade"):
            open_store(f"file://{root}")

    def test_one_that_turns_bad_while_the_tier_is_open_stops_nobody(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=8 * MIB) as store:
            store.put_many(OTHER, [write(number, OTHER) for number in range(20)])
        with open_store(f"file://{root}") as store:
            contradict(root / OTHER.name / "zarr.json")
            store.put_many(SPACE, writes(range(300)))
            assert get(store, [299]) == [HIT]
            assert occupied(root) <= 8 * MIB
        assert file_of(root, 1, OTHER).exists()

    def test_an_unreadable_manifest_of_an_lmdb_tier_is_said_and_written_anew(self, root: Path) -> None:
        with open_store(f"lmdb://{root}") as store:
            store.put_many(SPACE, writes(range(3)))
            with store._tier.catalog.write() as change:  # type: ignore[attr-defined]
                change.txn.put(SPACE.fingerprint, b"{", db=change._namespaces)
        with open_store(f"lmdb://{root}") as store:
            (note,) = store.capabilities.notes
            assert SPACE.name in note
            assert "3 blocks" in note
            assert get(store, range(3)) == [HIT] * 3
            assert store.put_many(SPACE, writes([4])) == [STORED]
            assert store.namespaces() == [SPACE]


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


class TestNoRegularFile:
    @pytest.mark.parametrize(
        "make",
        [
            os.mkfifo,
            os.mkdir,
            make_socket,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path.name),
        ],
        ids=["pipe", "directory", "socket", "link to a device", "link to itself"],
    )
    @pytest.mark.parametrize("io", ["auto", "buffered"])
    def test_in_place_of_a_block_it_is_corrupt_and_makes_way(
        self, root: Path, make: Callable[[Path], object], io: str
    ) -> None:
        with open_store(f"file://{root}", capacity=8 * MIB, io=io) as store:
            store.put_many(SPACE, writes(range(3)))
            for number in (0, 1):
                file_of(root, number).unlink()
                make(file_of(root, number))
            assert get(store, [0, 2]) == [CORRUPT, HIT]
            assert get(store, [0]) == [MISS]
            assert store.put_many(SPACE, writes([0])) == [STORED]
            assert get(store, [0]) == [HIT]
            store.put_many(SPACE, writes(range(10, 400)))  # evicts the other
            assert store.contains_many(SPACE, keys([1])) == [False]
            assert store.put_many(SPACE, writes([1])) == [STORED]
            assert get(store, [1]) == [HIT]
            file_of(root, 1).unlink()
            make(file_of(root, 1))
        (root / ".kvstore" / "state").unlink()  # rebuilt
        with open_store(f"file://{root}") as store:
            assert get(store, [1]) == [MISS]
            assert store.put_many(SPACE, writes([1])) == [STORED]

    def test_a_directory_with_something_in_it_stays_and_is_logged_once(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes([1]))
            file_of(root, 1).unlink()
            (file_of(root, 1) / "mine").mkdir(parents=True)
            assert get(store, [1]) == [CORRUPT]
            assert store.put_many(SPACE, writes([1, 2])) == [FAILED, STORED]
            assert store.put_many(SPACE, writes([1])) == [FAILED]
            assert (file_of(root, 1) / "mine").is_dir()
            assert [str(file_of(root, 1)) in record.getMessage() for record in caplog.records] == [True]


SMALL = Namespace("small", "revision-1", (BlockLayout.opaque(8 * KIB),), block_tokens=16)


def stored(outcomes: list[PutOutcome]) -> int:
    assert set(outcomes) <= {STORED, FULL}
    return outcomes.count(STORED)


def fill_up(disk: Path) -> None:
    """What a neighbour does."""
    with (disk / "neighbour").open("wb", buffering=0) as file:
        for size in (1 * MIB, 4 * KIB):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@pytest.fixture(params=["file", "lmdb"])
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


class TestFullDisk:
    @pytest.mark.parametrize("batch", [1, 300])
    def test_a_cap_beyond_the_disk_evicts_and_goes_on(
        self, scheme: str, small_disk: Callable[[int], Path], batch: int
    ) -> None:
        disk = small_disk(4 * MIB)
        with open_store(f"{scheme}://{disk}/tier?capacity=1GB") as store:
            for start in range(0, 900, batch):
                outcomes = store.put_many(SMALL, writes(range(start, start + batch), SMALL))
                assert set(outcomes) == {STORED}, start
            assert get(store, [899], SMALL) == [HIT]
            assert store.usage().blocks >= 80

    def test_a_neighbour_that_fills_the_disk_costs_room_and_nothing_else(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(12 * MIB)
        with open_store(f"{scheme}://{disk}/tier?capacity=8MB") as store:
            store.put_many(SPACE, writes(range(60)))
            fill_up(disk)
            assert [store.put_many(SPACE, writes([number])) for number in range(100, 200)] == [[STORED]] * 100
            assert get(store, [199]) == [HIT]

    def test_one_put_into_a_small_empty_disk_stores_what_fits(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(4 * MIB)
        with open_store(f"{scheme}://{disk}/tier") as store:
            assert stored(store.put_many(SMALL, writes(range(400), SMALL))) >= 180
            known = store.contains_many(SMALL, keys(range(400)))
            assert get(store, range(400), SMALL) == [HIT if there else MISS for there in known]
            assert all(store.delete_many(SMALL, keys(number for number in range(400) if known[number])))
            assert stored(store.put_many(SMALL, writes(range(100), SMALL))) == 100

    @pytest.mark.parametrize("capacity", ["", "?capacity=8MB"])
    def test_a_tier_opens_on_a_full_disk_and_serves_its_blocks(
        self, scheme: str, small_disk: Callable[[int], Path], capacity: str
    ) -> None:
        disk = small_disk(12 * MIB)
        with open_store(f"{scheme}://{disk}/tier{capacity}") as store:
            store.put_many(SPACE, writes(range(60)))
        fill_up(disk)
        with open_store(f"{scheme}://{disk}/tier") as store:
            for _ in range(5):  # notes of use that cannot be written fail no read
                assert get(store, range(60)) == [HIT] * 60
            outcomes = [store.put_many(SPACE, writes([number]))[0] for number in range(100, 110)]
            assert outcomes == [STORED if capacity else FULL] * 10
        with open_store(f"{scheme}://{disk}/tier") as store:
            assert get(store, [109 if capacity else 59]) == [HIT]

    def test_what_a_full_disk_says_names_no_file_that_is_none(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(1 * MIB)
        fill_up(disk)
        with pytest.raises(StoreFullError, match="make room") as caught:
            open_store(f"{scheme}://{disk}/tier")
        assert "None" not in str(caught.value)


TINY = Namespace("tiny", "revision-1", (BlockLayout.opaque(64),), block_tokens=1)


def catalogue_of(root: Path) -> Path:
    return next(root.rglob("data.mdb"))


def use(url: str) -> list[str]:
    """Each error that every verb in turn raises, by the verb's name; what is not of kvstore's tree fails the caller."""
    try:
        store = open_store(url)
    except StoreDamagedError as error:
        return [f"open: {error}"]
    said: list[str] = []
    verbs: dict[str, Callable[[], object]] = {
        "put": lambda: store.put_many(TINY, writes(range(5000, 5050), TINY)),
        "get": lambda: get(store, range(0, 300, 10), TINY),
        "contains": lambda: store.contains_many(TINY, keys(range(0, 300, 10))),
        "scan": lambda: list(store.scan(TINY)),
        "usage": store.usage,
        "namespaces": store.namespaces,
        "touch": lambda: store.touch_many(TINY, keys(range(300))),
        "delete": lambda: store.delete_many(TINY, keys(range(20))),
        "close": store.close,
    }
    for name, verb in verbs.items():
        try:
            verb()
        except TierUnavailable as error:
            said.append(f"{name}: {error}")
    return said


class TestDamagedCatalogue:
    def test_whichever_page_it_is_errors_are_ours_and_say_what_to_do(
        self, scheme: str, root: Path, tmp_path: Path, fresh_process: Executor
    ) -> None:
        path = tmp_path / "whole"
        with open_store(f"{scheme}://{path}") as store:
            store.put_many(TINY, writes(range(300), TINY))
        pages = catalogue_of(path).stat().st_size // 4096
        met = 0
        for page in range(2, pages, max(1, pages // 8)):
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(path, root)
            with catalogue_of(root).open("r+b") as file:
                os.pwrite(file.fileno(), b"\xff" * 4096, page * 4096)
            said = fresh_process.submit(use, f"{scheme}://{root}").result()
            met += bool(said)
            assert not [text for text in said if "owner" in text or "close" in text]
            if scheme == "lmdb":
                assert all("emove the" in text for text in said)
                continue
            assert all("no block is lost" in text for text in said), said
            again = fresh_process.submit(use, f"{scheme}://{root}").result()
            assert again == []
        assert met or scheme == "file"

    def test_what_opening_a_file_tier_finds_damaged_it_makes_anew(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes(range(10)))
        with catalogue_of(root).open("r+b") as file:
            for page in range(2, os.fstat(file.fileno()).st_size // 4096):
                os.pwrite(file.fileno(), b"\xff" * 4096, page * 4096)
        with pytest.raises(StoreDamagedError, match=r"remove .*/\.kvstore/catalogue .*no block is lost"):
            open_store(f"file://{root}", readonly=True)
        with open_store(f"file://{root}") as store:
            assert "made anew" in store.capabilities.notes[-1]
            assert get(store, range(10)) == [HIT] * 10


def as_user(uid: int, url: str, numbers: range, umask: int = 0o077) -> None:
    """Open, put, read and close in a process of that user."""
    source = f"""
import kvstore, os, tempfile
from kvstore.testing.supply import SPACE, get, writes
scheme = {url!r}.split(":")[0]
with tempfile.TemporaryDirectory() as folder, kvstore.open_store(scheme + "://" + folder + "/t") as store:
    store.put_many(SPACE, writes([1])), get(store, [1])  # imports all that the user below may not be able to read
os.umask({umask}); os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
with kvstore.open_store({url!r}) as store:
    print([outcome.name for outcome in store.put_many(SPACE, writes(range({numbers.start}, {numbers.stop})))])
    print([outcome.name for outcome in get(store, range({numbers.stop}))])
    print(store.delete_many(SPACE, [writes([0])[0].key]), store.put_many(SPACE, writes([0]))[0].name)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == [
        str(["STORED"] * len(numbers)),
        str(["HIT"] * numbers.stop),
        "[True] STORED",
    ], done.stderr


@pytest.fixture
def open_parents(tmp_path: Path) -> Path:
    folder = tmp_path
    while folder != folder.parent and not folder.stat().st_mode & 0o001:
        folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent
    return tmp_path


class TestTwoUsers:
    @pytest.mark.parametrize("mode", ["0666", "0600"])
    @pytest.mark.parametrize("umask", [0o022, 0o077, 0])
    def test_everything_has_exactly_the_mode_that_was_asked_for(
        self, scheme: str, root: Path, mode: str, umask: int
    ) -> None:
        before = os.umask(umask)
        try:
            with open_store(f"{scheme}://{root}?mode={mode}") as store:
                store.put_many(SPACE, writes(range(3)))
                found = [root, *root.rglob("*")]
                modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in found}
                assert {path.stat().st_mode & 0o777 for path in found} == set(modes.values())
        finally:
            os.umask(before)
        assert modes == {True: 0o777 if mode == "0666" else 0o700, False: int(mode, 8)}

    def test_who_may_write_need_not_own_and_an_opening_without_mode_shuts_nobody_out(
        self, scheme: str, open_parents: Path
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("two users take root")
        shared = open_parents / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        url = f"{scheme}://{shared}/tier"
        as_user(65533, f"{url}?mode=0666", range(5))
        as_user(65532, f"{url}?mode=0666", range(5, 10))
        as_user(65533, url, range(10, 15))
        as_user(65532, url, range(15, 20))
        as_user(65533, f"{url}?capacity=16MB", range(20, 25))
        as_user(65532, url, range(25, 30))


class TestRemovedWhileOpen:
    @pytest.mark.parametrize("readonly", [False, True])
    @pytest.mark.parametrize("again", [False, True], ids=["gone", "and another tier made there"])
    def test_every_verb_says_so_and_close_ends_well(
        self, scheme: str, root: Path, stranger: Executor, readonly: bool, again: bool
    ) -> None:
        with open_store(f"{scheme}://{root}") as store:
            store.put_many(SPACE, writes(range(3)))
        store = open_store(f"{scheme}://{root}", readonly=readonly)
        shutil.rmtree(root)
        if again:
            assert stranger.submit(use, f"{scheme}://{root}").result() == []
            before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        verbs: list[Callable[[], object]] = [
            lambda: store.put_many(SPACE, writes([1])),
            lambda: get(store, [1]),
            lambda: store.contains_many(SPACE, keys([1])),
            lambda: list(store.scan(SPACE)),
            store.usage,
            store.namespaces,
            lambda: store.delete_many(SPACE, keys([1])),
        ]
        for verb in verbs[1:-1] if readonly else verbs:
            with pytest.raises(TierUnavailable, match="open it again"):
                verb()
        store.close()
        assert root.exists() == again
        if again:
            assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
            assert stranger.submit(use, f"{scheme}://{root}").result() == []


class TestWhatIsSaid:
    def test_a_dangling_link_is_called_one(self, scheme: str, root: Path) -> None:
        root.symlink_to("nowhere")
        with pytest.raises(NotAStoreError, match="dangling symlink to nowhere"):
            open_store(f"{scheme}://{root}")

    def test_too_little_address_space_is_told_from_memory(self, scheme: str, root: Path) -> None:
        source = f"""
import kvstore, resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
kvstore.open_store("{scheme}://{root}")
"""
        assert "ulimit -v" in said_by(source).splitlines()[-1]

    def test_a_path_that_the_locale_cannot_say(self, scheme: str, tmp_path: Path) -> None:
        source = f"import kvstore; kvstore.open_store('{scheme}://{tmp_path}/gr%C3%BCn')"
        said = said_by(source, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
        assert said.splitlines()[-1].startswith("kvstore.errors.StoreAccessError"), said
        assert "PYTHONUTF8=1" in said.splitlines()[-1]


def said_by(source: str, **environment: str) -> str:
    """The error output of that program."""
    search = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **search, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stderr
