"""The command line: help and how fast it comes, honest exit codes, errors in one line, output that goes astray."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest
from cli_helpers import KEYS, QUICK, damage, kv

import kvstore
from kvstore import BlockLayout, BlockWrite, Namespace
from kvstore.cli import EXIT_FAULT, EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore_memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


def test_the_main_help_lists_every_command_and_the_exit_codes() -> None:
    shown = kv("--help")
    assert shown.returncode == EXIT_OK
    for expected in ("stat", "ls", "verify", "bench", "demo", "Exit codes", *map(str, (0, 1, 2, 3))):
        assert expected in shown.stdout


def test_help_loads_neither_torch_nor_zarr_nor_a_backend_nor_tables() -> None:
    code = (
        "import sys; from kvstore.cli import run; run(['--help']); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'torch','zarr','lmdb','rich','transformers'}"
        " or m.startswith(('kvstore_', 'kvstore.cli.', 'kvstore.tiering')) and m != 'kvstore.cli._output'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


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


def test_a_fault_of_our_own_is_told_from_a_corrupt_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(_: object) -> NoReturn:
        raise ZeroDivisionError("a fault")

    with kvstore.open_store("memory://x"):
        monkeypatch.setattr(MemoryStore, "usage", faulty)
        assert run(["stat", "memory://x"]) == EXIT_FAULT
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "report it there" not in said


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
