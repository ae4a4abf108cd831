"""One grammar for all commands: an example that can be parsed, --json, a line of help, a purpose; completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest
from cli_helpers import ROOT, kv

import kvstore.cli
from kvstore.cli import COMMANDS, EXIT_OK, EXIT_USAGE, cli, run

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [name for commands in COMMANDS.values() for name in commands]
SUMMARIES = {name: summary for commands in COMMANDS.values() for name, (_, summary) in commands.items()}


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def parts() -> list[str]:
    """Commands within commands, each behind the name of the outer one."""
    groups = [(name, group) for name in NAMES if isinstance(group := command_of(name), click.Group)]
    return [f"{name} {inner}" for name, group in groups for inner in group.commands]


def examples(shown: str) -> list[list[str]]:
    """The command lines below `Example:` or `Examples:` in a help text, as words behind `kvstore`."""
    block = re.search(r"Examples?:\n((?:[ ]+\S.*\n?)+)", shown)
    assert block is not None, shown
    lines = [re.split(r" && | \| |\)", line)[-1 if " && kvstore" in line else 0] for line in block[1].splitlines()]
    return [shlex.split(line.partition("kvstore ")[2]) for line in lines]


def test_every_command_stands_under_a_purpose_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{purpose}:\n") for purpose in COMMANDS]
    assert places == sorted(places)
    assert re.findall(r"^  ([a-z]+)  ", shown[places[0] :], re.MULTILINE) == NAMES
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", [*NAMES, *parts()])
def test_every_command_has_an_example_json_and_says_what_its_options_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outer, *inner = name.split()
    command = command_of(outer)
    for word in inner:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert command.name == name.split()[-1]
    assert run([*name.split(), "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: kvstore {name} ")
    for words in examples(shown):
        assert words[: len(inner) + 1] == name.split()
        for file in (word for word in words if re.fullmatch(r"\w+\.\w+", word)):
            (tmp_path / file).touch()  # which an option would open
        command.make_context(name, words[len(inner) + 1 :])
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert "--json" in {flag for one in options for flag in one.opts}
    assert [one.opts for one in options if not one.help] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_one_line_in_the_help_of_all(name: str) -> None:
    assert re.fullmatch(r"[A-Z].{10,74}\.", SUMMARIES[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_word_too_many_or_an_option_that_is_none_is_exit_code_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--no-such-option"], ["one", "two", "three", "four"]):
        assert run([name, *words]) == EXIT_USAGE
        out, err = capsys.readouterr()
        assert out == ""
        assert f"Try 'kvstore {name} " in err


def test_the_exit_codes_that_scripts_see_are_those_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {name: getattr(kvstore.cli, name) for name in kvstore.cli.__all__ if name.startswith("EXIT_")}
    assert run(["--help"]) == EXIT_OK
    listed = re.findall(r"^    (\d+)  ", capsys.readouterr().out, re.MULTILINE)
    assert [int(code) for code in listed] == [*sorted(codes.values()), 130]


def test_the_page_of_the_command_line_is_what_the_commands_say_of_themselves() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "cli_page.py"], capture_output=True, text=True, check=True, timeout=60
    )
    assert (ROOT / "docs" / "cli.md").read_text() == done.stdout, "python .ci/cli_page.py > docs/cli.md"


# Completion


def completed(line: str, *, cwd: Path) -> list[str]:
    """What a real bash offers at the end of `line`, through the script that the command prints."""
    words = shlex.split(line) + [""] * line.endswith(" ")
    script = f"""
        kvstore() {{ {shlex.quote(sys.executable)} -m kvstore "$@"; }}
        source <(kvstore completion bash 2>/dev/null)
        COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}
        complete -p kvstore | grep -q -- '-F _kvstore_completion' || exit 1
        _kvstore_completion ./kvstore; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    launcher = cwd / "kvstore"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvstore "$@"\n')
    launcher.chmod(0o755)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60, cwd=cwd)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvstore ver", ["verify"]),
        ("kvstore cp --dr", ["--dry-run"]),
        ("kvstore ls --na", ["--namespace"]),
        ("kvstore completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_commands_options_and_choices(line: str, offered: list[str], tmp_path: Path) -> None:
    assert completed(line, cwd=tmp_path) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_put_where_the_shell_looks(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["completion", shell, "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert (told["installed"], list(tmp_path.iterdir())) == (False, [])
    assert run(["completion", shell, "--install"]) == EXIT_OK
    assert told["path"] in capsys.readouterr().err
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert str(written) == told["path"]
    assert written.read_text() == told["script"]
    if shutil.which(shell):
        subprocess.run([shell, "-n", written], check=True, timeout=60)


def test_completing_a_command_imports_none() -> None:
    environment = os.environ | {"COMP_WORDS": "kvstore ", "COMP_CWORD": "1", "_KVSTORE_COMPLETE": "bash_complete"}
    code = (
        "import atexit, sys; from kvstore.cli import main; "
        "atexit.register(lambda: print([m for m in sys.modules if m.startswith('kvstore.cli.')])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[-1] == "['kvstore.cli._output']"
    assert done.stdout.splitlines()[:-1] == [f"plain,{name}" for name in NAMES]


def test_the_command_is_the_same_through_a_process() -> None:
    done = kv("completion", "fish")
    assert (done.returncode, done.stdout.count("kvstore") > 1) == (EXIT_OK, True)
