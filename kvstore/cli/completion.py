"""`kvstore completion SHELL`: the script that makes a shell complete commands and options, and where it belongs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from kvstore.cli import cli
from kvstore.cli._common import emit_json, json_option
from kvstore.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["completion"]

_PLACES: Mapping[str, tuple[str, str, str]] = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/kvstore"),
    "zsh": ("ZDOTDIR", "", ".zfunc/_kvstore"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/kvstore.fish"),
}
"""Where each shell looks: below what a variable says, or else below a folder of the home folder."""

_BESIDES = {
    "bash": "It takes effect in new shells, where the package bash-completion is installed.",
    "zsh": "It takes effect in new shells whose .zshrc has, before compinit: fpath+=({folder})",
    "fish": "It takes effect in new shells.",
}


@click.command(epilog="\b\nExamples:\n  kvstore completion bash --install\n  source <(kvstore completion zsh)")
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.option("--install", is_flag=True, help="Write it where the shell looks for it, below the home folder.")
@json_option
def completion(shell: str, install: bool, as_json: bool) -> None:
    """Print the script that makes SHELL complete kvstore's commands and options.

    Where it belongs is said on stderr; --install puts it there.
    """
    made = get_completion_class(shell)
    if made is None:
        raise ConfigurationError(f"this version of click completes nothing in {shell}: pip install -U click")
    script, place = made(cli, {}, "kvstore", "_KVSTORE_COMPLETE").source(), _place(shell)
    if install:
        _write(place, script)
    if as_json:
        emit_json({"shell": shell, "path": str(place), "installed": install, "script": script})
        return
    if not install:
        click.echo(script)
    besides = _BESIDES[shell].format(folder=place.parent)
    click.echo(f"{'written to' if install else 'to keep it, put it into'} {place}. {besides}", err=True)


def _place(shell: str) -> Path:
    variable, below_home, name = _PLACES[shell]
    return Path(os.environ.get(variable) or Path.home() / below_home) / name


def _write(place: Path, script: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script)
    except OSError as error:
        raise ConfigurationError(
            f"{place} cannot be written: {error.strerror}; without --install it is printed"
        ) from error
