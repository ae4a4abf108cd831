"""The command line: right answers for machines and people, honest exit codes, and nothing changed by looking."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pytest
from readme_backend import install, install_wheel

import kvstore
from kvstore import BlockLayout, BlockWrite, Namespace, block_keys
from kvstore.bench import RawFiles, TierUnderTest
from kvstore.cli import EXIT_FAULT, EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, cli, run
from kvstore.errors import ConfigurationError, InvalidOptionError, StoreNotFoundError, TierUnavailable
from kvstore.url import TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
MODEL = Namespace("org/model", "revision-1", (BlockLayout.opaque(8192), BlockLayout.opaque(4096)), block_tokens=4)
OTHER = Namespace("org/other", "revision-1", (BlockLayout.opaque(4096),), block_tokens=4)
KEYS = block_keys(range(40), 4)
QUICK = ("--total", "512KiB", "--block-bytes", "64KiB", "--threads", "3", "--rounds", "2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def scheme(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The README's backend: files that a test can damage with its own hands."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *map(str, _source_tree())]))
    yield "dir"
    sys.modules.pop("kvstore_dir", None)


def _source_tree() -> list[Path]:
    """The source tree for child processes, if that is what is under test here."""
    return [ROOT, ROOT / "backends"] if Path(kvstore.__file__).is_relative_to(ROOT / "kvstore") else []


@pytest.fixture
def tier(scheme: str, tmp_path: Path) -> str:
    """A tier with ten blocks in two groups of one namespace and two blocks in another."""
    url = f"{scheme}://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        store.put_many(MODEL, [BlockWrite(key, np.full(8192, 7, np.uint8)) for key in KEYS[:6]])
        store.put_many(MODEL, [BlockWrite(key, bytes(4096)) for key in block_keys(range(16), 4, group=1)])
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:2]])
    return url


def kv(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "kvstore.cli", *args], capture_output=True, text=True, timeout=60)


def machine(capsys: pytest.CaptureFixture[str], *args: str, exit_code: int = EXIT_OK) -> Any:
    """The JSON that the command prints, and nothing else with it."""
    capsys.readouterr()
    assert run([*args, "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def occupied(tier: str, space: Namespace) -> int:
    """The sizes of the namespace's block files."""
    return sum(file.stat().st_size for file in Path(TierURL.parse(tier).location).glob(f"{space.name}-*"))


# Help, and how fast it comes


def test_the_main_help_lists_every_command_and_the_exit_codes() -> None:
    shown = kv("--help")
    assert shown.returncode == EXIT_OK
    for expected in ("stat", "ls", "verify", "bench", "demo", "Exit codes", *map(str, (0, 1, 2, 3))):
        assert expected in shown.stdout


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "bench"])
def test_every_command_shows_an_example_that_can_be_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    example = shown.split("Example")[1].split("\n")[1].split("&&")[0].split()
    assert example[:2] == ["kvstore", command]
    parsed = cli.get_command(click.Context(cli), command)
    assert parsed is not None
    assert parsed.make_context(command, example[2:]).params["url"].startswith("file:///")


def test_help_loads_neither_torch_nor_zarr_nor_a_backend_nor_tables() -> None:
    code = (
        "import sys; from kvstore.cli import run; run(['--help']); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'torch','zarr','lmdb','rich','transformers'}"
        " or m.startswith(('kvstore_', 'kvstore.cli.', 'kvstore.tiering')) and m != 'kvstore.cli._output'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# stat and ls


def test_stat_counts_namespaces_blocks_bytes_and_ages(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "stat", tier)
    first, second = told["namespaces"]
    assert (first["namespace"], first["model"], first["groups"], first["blocks"]) == (MODEL.name, "org/model", 2, 10)
    assert (second["namespace"], second["blocks"], second["bytes"]) == (OTHER.name, 2, occupied(tier, OTHER))
    assert first["bytes"] == occupied(tier, MODEL) > 6 * 8192 + 4 * 4096
    assert first["oldest"] <= first["newest"]
    assert told["usage"]["blocks"] == 12
    assert told["usage"]["capacity"] is None
    assert told["capabilities"]["io"] == "buffered"
    assert told["url"] == tier


def test_stat_tells_people_the_same(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stat", tier]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in (tier, "12 blocks", "no capacity set", "buffered", "org/model", "org/other", MODEL.name):
        assert expected in shown


def test_stat_shows_usage_against_the_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.open_store("memory://capped?capacity=100kB") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        assert run(["stat", "memory://capped?capacity=100kB"]) == EXIT_OK
        assert "4.1 kB of 100.0 kB (4%)" in capsys.readouterr().out
        assert machine(capsys, "stat", "memory://capped?capacity=100kB")["usage"]["capacity"] == 100_000


def test_ls_lists_namespaces_and_with_a_prefix_their_blocks(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    spaces = machine(capsys, "ls", tier)["namespaces"]
    assert {space["namespace"]: space["blocks"] for space in spaces} == {MODEL.name: 10, OTHER.name: 2}
    listed = machine(capsys, "ls", tier, "--namespace", OTHER.name[:8])
    assert {block["digest"] for block in listed["blocks"]} == {key.digest.hex() for key in KEYS[:2]}
    assert sum(block["bytes"] for block in listed["blocks"]) == occupied(tier, OTHER)
    assert not listed["truncated"]
    assert len(machine(capsys, "ls", tier, "--namespace", "")["blocks"]) == 12


def test_ls_stops_at_the_limit_and_says_so(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = machine(capsys, "ls", tier, "--namespace", MODEL.name, "--limit", "3")
    assert (len(listed["blocks"]), listed["truncated"]) == (3, True)
    listed = machine(capsys, "ls", tier, "--namespace", MODEL.name, "--limit", "0")
    assert (len(listed["blocks"]), listed["truncated"]) == (10, False)
    assert run(["ls", tier, "--namespace", MODEL.name, "--limit", "3"]) == EXIT_OK
    shown = capsys.readouterr()
    assert "--limit 0" in shown.err
    assert sum(line.count(key.digest.hex()) for key in KEYS for line in shown.out.splitlines()) == 3


def test_ls_of_a_namespace_that_is_not_there_lists_those_that_are(
    tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", tier, "--namespace", "zzz"]) == EXIT_USAGE
    assert MODEL.name in capsys.readouterr().err


# verify


def damage(tier: str, number: int, *, cut: bool = False) -> Path:
    file = Path(TierURL.parse(tier).location) / name_of(MODEL, KEYS[number])
    data = file.read_bytes()
    file.write_bytes(data[:100] if cut else bytes([data[0] ^ 1]) + data[1:])
    return file


def test_verify_of_an_intact_tier_reads_every_block(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "verify", tier)
    assert told == {
        "url": tier,
        "ok": True,
        "blocks": 12,
        "intact": 12,
        "bytes": 6 * 8192 + 6 * 4096,
        "removed_meanwhile": 0,
        "corrupt": [],
        "missing": [],
    }


@pytest.mark.parametrize("threads", ["1", "3"])
def test_verify_names_every_corrupt_block_and_leaves_it_where_it_is(
    tier: str, threads: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damage(tier, 1)
    damage(tier, 4, cut=True)
    before = tree(tmp_path / "kv")
    told = machine(capsys, "verify", tier, "--threads", threads, exit_code=EXIT_NOT_INTACT)
    assert (told["ok"], told["blocks"], told["intact"]) == (False, 12, 10)
    assert {block["digest"] for block in told["corrupt"]} == {KEYS[1].digest.hex(), KEYS[4].digest.hex()}
    assert {(block["namespace"], block["group"]) for block in told["corrupt"]} == {(MODEL.name, 0)}
    assert tree(tmp_path / "kv") == before
    assert run(["verify", tier]) == EXIT_NOT_INTACT
    assert f"corrupt: {MODEL.name} group 0 digest {KEYS[1].digest.hex()}" in capsys.readouterr().out


FORGETFUL = """
from kvstore import GetOutcome
from kvstore_memory import MemoryStore

class Forgetful(MemoryStore):
    def get_many_into(self, namespace, blocks):
        return [GetOutcome.MISS for _ in blocks]

class Evicting(Forgetful):
    def contains_many(self, namespace, keys):
        return [False for _ in keys]
"""


def test_a_block_that_is_listed_and_cannot_be_found_is_not_intact_unless_it_went_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schemes = {"forgetful": "forgetful:Forgetful", "evicting": "forgetful:Evicting"}
    monkeypatch.syspath_prepend(install_wheel(tmp_path, "forgetful", {"forgetful.py": FORGETFUL}, schemes))
    with kvstore.open_store("memory://x") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        told = machine(capsys, "verify", "forgetful://x", exit_code=EXIT_NOT_INTACT)
        assert (told["ok"], told["intact"]) == (False, 0)
        assert told["missing"] == [{"namespace": OTHER.name, "group": 0, "digest": KEYS[0].digest.hex()}]
        told = machine(capsys, "verify", "evicting://x")
        assert (told["ok"], told["intact"], told["removed_meanwhile"], told["missing"]) == (True, 0, 1, [])
    sys.modules.pop("forgetful")


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_looking_changes_nothing_and_creates_nothing(
    command: str, tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path / "kv")
    assert run([command, tier]) == EXIT_OK
    assert tree(tmp_path / "kv") == before
    assert run([command, f"dir://{tmp_path}/nothing"]) == EXIT_USAGE
    assert not (tmp_path / "nothing").exists()
    for option in ("readonly=false", "readonly=maybe"):
        assert run([command, f"{tier}?{option}"]) == EXIT_USAGE
        assert "readonly" in capsys.readouterr().err
    assert run([command, tier + "?readonly=yes"]) == EXIT_OK
    assert tree(tmp_path / "kv") == before
    capsys.readouterr()


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_looking_depends_on_no_capacity(command: str, shipped: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, f"{shipped}?capacity=lots"]) == EXIT_USAGE
    capsys.readouterr()
    for asked in ("900MB", "10kB"):
        assert run([command, f"{shipped}?capacity={asked}"]) == EXIT_OK
        assert "is not the tier's, which has none" in capsys.readouterr().err
    with kvstore.open_store(f"{shipped}?capacity=50MB"):
        assert run([command, f"{shipped}?capacity=900MB"]) == EXIT_OK
        assert f"{shipped}?capacity=900MB" in (said := capsys.readouterr().err)
        assert "50.0 MB (50000000 bytes)" in said


def test_bench_applies_a_capacity_unless_somebody_relies_on_another(
    shipped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = (*QUICK, "--namespace", "mine")
    assert run(["bench", f"{shipped}?capacity=50MB", *named]) == EXIT_OK
    assert machine(capsys, "stat", shipped)["usage"]["capacity"] == 50_000_000
    with kvstore.open_store(shipped):
        assert run(["bench", f"{shipped}?capacity=60MB", *named]) == EXIT_USAGE
        said = capsys.readouterr().err
        assert f"{shipped}?capacity=60MB: another process has this tier open" in said
        assert "50.0 MB (50000000 bytes)" in said
    assert run(["bench", f"{shipped}?capacity=1100kB", *named]) == EXIT_USAGE
    assert "would evict blocks of others" in capsys.readouterr().err
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2


def test_bench_of_a_tier_that_must_not_be_written_is_refused(shipped: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", f"{shipped}?readonly=true", *QUICK]) == EXIT_USAGE
    assert "a benchmark writes: leave out readonly" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_another_process_s_memory_is_said_to_be_out_of_sight(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "memory://nobody"]) == EXIT_USAGE
    assert "memory of another process cannot be seen" in capsys.readouterr().err


def test_a_share_of_no_disk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidOptionError, match="in bytes"):
        kvstore.open_store("memory://x?capacity=80%")
    assert run(["bench", "memory://x?capacity=80%", *QUICK]) == EXIT_USAGE
    capsys.readouterr()


@pytest.mark.parametrize("command", [["verify"], ["bench", "--namespace", "mine", *QUICK]])
def test_what_takes_long_says_how_far_it_is_where_no_terminal_is(
    command: list[str], tier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, tier]) == EXIT_OK
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("kvstore.cli._common.PROGRESS_S", 0.0)
    assert run([*command, tier]) == EXIT_OK
    total = 12 if command == ["verify"] else 8
    assert capsys.readouterr().err.endswith(f"ing: {total} of {total}\n")


# The backends that are shipped


@pytest.fixture(params=["file", "lmdb"])
def shipped(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier of two blocks on a shipped backend; the second is filled with nines."""
    url = f"{request.param}://{tmp_path}/tier"
    with kvstore.open_store(url) as store:
        blocks = [BlockWrite(key, np.full(65536, fill, np.uint8)) for key, fill in zip(KEYS[:2], (1, 9), strict=True)]
        store.put_many(LARGE, blocks)
    return url


LARGE = Namespace("org/large", "revision-1", (BlockLayout.opaque(65536),), block_tokens=4)


def flip_a_bit(folder: Path, fill: int) -> None:
    """In the middle of whatever file below `folder` holds a block filled with `fill`."""
    for file in folder.rglob("*"):
        if file.is_file() and bytes([fill]) * 8192 in (data := file.read_bytes()):
            place = data.index(bytes([fill]) * 8192) + 5000
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(bytes([fill ^ 1]))
            return
    raise AssertionError("no file holds the block")


def test_a_shipped_backend_is_inspected_like_any_other(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2
    assert [space["model"] for space in machine(capsys, "ls", shipped)["namespaces"]] == ["org/large"]
    listed = machine(capsys, "ls", shipped, "--namespace", LARGE.name)["blocks"]
    assert {block["digest"] for block in listed} == {key.digest.hex() for key in KEYS[:2]}
    assert machine(capsys, "verify", shipped)["intact"] == 2
    flip_a_bit(tmp_path / "tier", 9)
    told = machine(capsys, "verify", shipped, exit_code=EXIT_NOT_INTACT)
    assert told["corrupt"] == [{"namespace": LARGE.name, "group": 0, "digest": KEYS[1].digest.hex()}]
    # It is still there to be looked at.
    assert machine(capsys, "verify", shipped, exit_code=EXIT_NOT_INTACT)["corrupt"] == told["corrupt"]
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_location_where_nothing_is_stays_that_way(
    scheme: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        assert run([command, f"{scheme}://{tmp_path}/{name}", "--json"]) == EXIT_USAGE
        said = capsys.readouterr().err
        assert said.startswith("kvstore: ")
        assert f"{tmp_path}/{name}" in said
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_of_a_shipped_backend_leaves_nothing_behind(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mount").mkdir()
    for name in ("new", "mount"):
        told = machine(capsys, "bench", f"{scheme}://{tmp_path}/{name}", *QUICK)
        assert len(told["results"]) == 4
    assert list(tmp_path.rglob("*")) == [tmp_path / "mount"]


def test_bench_beside_blocks_of_others_on_a_shipped_backend_leaves_theirs(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", shipped, *QUICK]) == EXIT_USAGE
    assert "--namespace NAME" in capsys.readouterr().err
    machine(capsys, "bench", shipped, *QUICK, "--namespace", "mine")
    told = machine(capsys, "verify", shipped)
    assert (told["blocks"], told["intact"]) == (2, 2)
    assert [path for path in tmp_path.rglob("*") if "kvstore-bench" in path.name] == []


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_at_a_mount_point_leaves_what_stood_there_before(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rescued = tmp_path / "mount/lost+found/rescued"
    rescued.parent.mkdir(parents=True)
    rescued.write_bytes(b"precious")
    machine(capsys, "bench", f"{scheme}://{tmp_path}/mount", *QUICK)
    assert rescued.read_bytes() == b"precious"
    assert list(tmp_path.rglob("*")) == [tmp_path / "mount", rescued.parent, rescued]


OPEN_ELSEWHERE = """
import sys, kvstore
from kvstore import BlockLayout, BlockWrite, Namespace, block_keys
with kvstore.open_store(sys.argv[1]) as store:
    if sys.argv[2] == "put":
        space = Namespace("org/late", "r", (BlockLayout.opaque(4096),), block_tokens=4)
        print(store.put_many(space, [BlockWrite(block_keys(range(4), 4)[0], bytes(4096))]), flush=True)
        sys.exit()
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize("does", ["put", "stay"])
def test_bench_leaves_a_tier_that_another_process_uses_by_its_end(
    scheme: str, there_before: bool, does: str, tmp_path: Path
) -> None:
    if there_before:
        (tmp_path / "kv").mkdir()
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with TierUnderTest(url, 65536, 1 << 20) as bench:
        bench.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
        command = [sys.executable, "-c", OPEN_ELSEWHERE, str(url), does]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _source_tree()))}
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert other.stdout is not None
        assert other.stdout.readline()
        if does == "put":
            other.communicate()
    try:
        expected = "another process " + ("has it open" if does == "stay" else "stored 1 blocks there")
        assert any(f"{url} stays" in note and expected in note for note in bench.notes)
        with kvstore.open_store(url, readonly=True) as store:
            assert store.usage().blocks == (1 if does == "put" else 0)
            assert [space.model for space in store.namespaces() if any(store.scan(space))] == ["org/late"] * (
                does == "put"
            )
    finally:
        other.communicate()


@pytest.mark.parametrize("options", [(), ("--namespace", "mine")])
def test_bench_refuses_blocks_without_a_catalogue_whose_owners_cannot_be_told(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS])
    shutil.rmtree(tmp_path / "kv/.kvstore")
    before = tree(tmp_path)
    assert run(["bench", f"{url}?capacity=1MiB", *QUICK, *options]) == EXIT_USAGE
    assert "whose blocks are there cannot be told" in capsys.readouterr().err
    assert tree(tmp_path) == before


# Errors


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "bench"])
@pytest.mark.parametrize(
    "url", ["nope://x", "memory://x?capacty=1", "memory://x?capacity=lots", "no url", "file://rel"]
)
def test_a_bad_url_is_one_clear_message_and_exit_code_2(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, url, "--json"]) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvstore: ")
    assert "Traceback" not in err


def test_a_password_is_in_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stat", "redis://user:hunter2@host?x=1"]) == EXIT_USAGE
    assert "hunter2" not in capsys.readouterr().err


def test_processes_end_with_the_documented_codes(tier: str) -> None:
    assert kv("verify", tier).returncode == EXIT_OK
    damage(tier, 0)
    assert kv("verify", tier).returncode == EXIT_NOT_INTACT
    assert kv("verify", tier + "?nope=1").returncode == EXIT_USAGE
    assert kv("verify").returncode == EXIT_USAGE
    assert kv("nope").returncode == EXIT_USAGE
    assert kv("stat", tier, "--nope").returncode == EXIT_USAGE


FAULTY = """
from kvstore_memory import MemoryStore

class Faulty(MemoryStore):
    def usage(self):
        raise ZeroDivisionError("a fault")
"""


def test_a_fault_of_our_own_is_told_from_a_corrupt_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(install_wheel(tmp_path, "faulty", {"faulty.py": FAULTY}, {"faulty": "faulty:Faulty"}))
    with kvstore.open_store("memory://x"):
        assert run(["stat", "faulty://x"]) == EXIT_FAULT
    assert "Traceback" in capsys.readouterr().err
    sys.modules.pop("faulty")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `kvstore` is the command; on stdout comes its exit code, though it stand in a pipe."""
    script = f'kvstore() {{ {sys.executable} -m kvstore "$@"; }}; {command}; echo "${{PIPESTATUS[0]}}" >&3'
    return subprocess.run(["bash", "-c", f"exec 3>&1; {script}"], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments", ["--help", "stat --help", "ls {} --namespace ''", "verify {}", "verify {} --json"]
)
def test_a_reader_that_leaves_early_is_no_error_and_hides_none(tier: str, arguments: str) -> None:
    done = shell(f"kvstore {arguments.format(tier)} | true")
    assert (done.stdout.strip(), done.stderr) == ("0", "")
    damage(tier, 1)
    done = shell(f"kvstore {arguments.format(tier)} | true")
    assert (done.stdout.strip(), done.stderr) == ("1" if "verify" in arguments else "0", "")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("arguments", ["--help", "stat {}", "verify {} --json"])
def test_an_answer_that_cannot_be_written_is_one_clear_line(tier: str, arguments: str, redirection: str) -> None:
    done = shell(f"kvstore {arguments.format(tier)} {redirection}")
    assert done.stdout.strip() == "2"
    assert done.stderr.startswith("kvstore: stdout cannot be written: ")
    assert done.stderr.count("\n") == 1


def test_what_cannot_be_said_on_stderr_changes_no_exit_code(tier: str, tmp_path: Path) -> None:
    for redirection in ("2>&-", "2>/dev/full"):
        assert shell(f"kvstore verify {tier} >/dev/null {redirection}").stdout.strip() == "0"
        assert shell(f"kvstore stat dir://{tmp_path}/nothing {redirection}").stdout.strip() == "2"


def test_names_can_neither_steer_a_terminal_nor_break_a_table(tmp_path: Path) -> None:
    names = ("red\x1b[31m\x07", "lone \ud800", "two\nlines", "\u202egnp.exe", "[bold]m\u00f6del[/]")
    url = f"file://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        for name in names:
            try:
                space = Namespace(name, name, (BlockLayout.opaque(4096),), block_tokens=4)
            except ValueError:  # no name of a namespace
                continue
            store.put_many(space, [BlockWrite(KEYS[0], bytes(4096))])
    for command in ("stat", "ls", "verify"):
        done = subprocess.run([sys.executable, "-m", "kvstore", command, url], capture_output=True, timeout=60)
        assert done.returncode == EXIT_OK, done.stderr
        shown = done.stdout.decode()
        assert not set(shown) & set("\x1b\x07\u202e")
        assert "[bold]m\u00f6del[/]" in shown
        assert shown.count("kv") >= 1
    done = subprocess.run([sys.executable, "-m", "kvstore", "bench", url, *QUICK], capture_output=True, timeout=60)
    assert done.returncode == EXIT_USAGE
    assert not set(done.stderr.decode()) & set("\x1b\x07\u202e")


@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_that_is_told_to_end_leaves_nothing_behind(
    scheme: str, number: signal.Signals, says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvstore", "bench", f"{scheme}://{tmp_path}/kv", *QUICK[:-1], "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            deadline = time.monotonic() + 60
            while not any(path.name.startswith(".kvstore-bench-") for path in tmp_path.iterdir()):
                assert time.monotonic() < deadline
                assert running.poll() is None
                time.sleep(0.01)
            time.sleep(0.3)
            running.send_signal(number)
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (out, err.splitlines()[-1], running.returncode) == ("", f"kvstore: {says}", 128 + number)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# bench

KEYS_OF_A_FIGURE = {
    "op",
    "contestant",
    "block_bytes",
    "threads",
    "gb_per_s",
    "gb_per_s_min",
    "gb_per_s_max",
    "cpu_s_per_gb",
    "ratio",
}


def test_bench_measures_the_tier_and_the_bare_device_at_every_size(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = machine(
        capsys, "bench", f"{scheme}://{tmp_path}/new/kv", "--against", "raw", *QUICK, "--block-bytes", "5000"
    )
    figures = told["results"]
    assert [(figure["block_bytes"], figure["op"], figure["contestant"]) for figure in figures] == [
        (nbytes, op, contestant)
        for nbytes in (65536, 5000)
        for op in ("store", "load_cold")
        for contestant in ("kvstore", "raw")
    ]
    for figure in figures:
        assert set(figure) == KEYS_OF_A_FIGURE
        assert 0 < figure["gb_per_s_min"] <= figure["gb_per_s"] <= figure["gb_per_s_max"]
        assert figure["cpu_s_per_gb"] > 0
        assert figure["threads"] == 3
    assert all(figure["ratio"] == 1 for figure in figures if figure["contestant"] == "raw")
    assert all(figure["ratio"] > 0 for figure in figures)
    assert any("page cache" in note for note in told["notes"])
    assert any(note.startswith("raw: ") and ("direct" in note or "buffered" in note) for note in told["notes"])


def test_bench_tells_people_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory://bench", *QUICK]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in ("load_cold", "kvstore", "raw", "64 KiB", "ratio", "note: page cache", "note: kvstore: memory"):
        assert expected in shown


def test_bench_removes_everything_where_nothing_was(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    machine(capsys, "bench", f"{scheme}://{tmp_path}/deep/er/kv", *QUICK)
    assert tree(tmp_path).keys() == before.keys()


def test_bench_refuses_a_tier_with_blocks_of_others(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    assert run(["bench", tier, *QUICK]) == EXIT_USAGE
    assert "--namespace NAME" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_bench_beside_blocks_of_others_leaves_theirs_and_none_of_its_own(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: facts for path, facts in tree(tmp_path).items() if Path(path).is_file()}
    machine(capsys, "bench", tier, *QUICK, "--namespace", "mine")
    after = tree(tmp_path)
    assert {path: after[path] for path in before} == before
    assert [path for path in after.keys() - before.keys() if "0-" in path or ".kvstore-bench" in path] == []
    assert machine(capsys, "stat", tier)["usage"]["blocks"] == 12


def test_bench_never_evicts_blocks_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://shared?capacity=512KiB"
    with kvstore.open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        assert run(["bench", url, *QUICK, "--namespace", "mine"]) == EXIT_USAGE
        assert "would evict blocks of others (org/other)" in capsys.readouterr().err
        assert store.contains_many(OTHER, KEYS[:1]) == [True]


def test_bench_removes_what_a_killed_one_left(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with kvstore.open_store(url):
        pass
    killed = TierUnderTest(url, 65536, 1 << 20)
    killed.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
    with kvstore.open_store(url) as store:
        assert store.usage().blocks == 2
        machine(capsys, "bench", str(url), *QUICK)
        assert store.usage().blocks == 0
    killed.close()


def test_bench_that_is_interrupted_removes_what_it_had_written(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        with TierUnderTest(TierURL.parse(url), 65536, 1 << 20) as interrupted:
            interrupted.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
            assert store.usage().blocks == 2
        assert store.usage().blocks == 0


def test_bench_reports_no_figure_for_blocks_that_were_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory://small?capacity=200KiB", *QUICK]) == EXIT_USAGE
    assert "lower --total, raise capacity or make room" in capsys.readouterr().err


def test_bench_refuses_sizes_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (
        ("--total", "1KiB"),
        ("--block-bytes", "2XB"),
        ("--threads", "0"),
        ("--rounds", "0"),
        ("--against", "x"),
    ):
        assert run(["bench", "memory://x", *bad]) == EXIT_USAGE
    capsys.readouterr()


def test_the_bare_device_moves_blocks_whole_and_leaves_nothing(tmp_path: Path) -> None:
    page = memoryview(mmap.mmap(-1, 4096))
    page[:] = b"\5" * 4096
    with RawFiles(tmp_path, 4096) as raw:
        raw.store(KEYS[:1], [page])
        (file,) = raw.files()
        assert file.read_bytes() == bytes(page)
        os.truncate(file, 100)
        with pytest.raises(OSError, match="100 of 4096 bytes"):
            raw.load(KEYS[:1], [page])
    assert list(tmp_path.iterdir()) == []


def test_a_tier_under_test_reports_what_went_wrong_instead_of_a_figure(scheme: str, tmp_path: Path) -> None:
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with TierUnderTest(url, 4096, 1 << 20) as tier, pytest.raises(TierUnavailable, match="miss instead of hit"):
        tier.load(KEYS[:1], [memoryview(bytearray(4096))])
    with pytest.raises(StoreNotFoundError):
        kvstore.open_store(url, readonly=True)
    with pytest.raises(ConfigurationError):
        TierUnderTest(TierURL.parse("memory://x?nope=1"), 4096, 1 << 20)
