"""The `kvstore` command: what is in a tier, whether it is intact, how fast it is, and the demo.

Each subcommand lives in a module of its own that is imported when it is called, so that `kvstore --help` is quick and
loads neither torch nor a backend. Machine output (`--json`) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import click

from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXIT_FAULT", "EXIT_NOT_INTACT", "EXIT_OK", "EXIT_USAGE", "cli", "main", "run"]

EXIT_OK = 0
EXIT_NOT_INTACT = 1
EXIT_USAGE = 2
EXIT_FAULT = 3
EXIT_INTERRUPTED = 130

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("kvstore.cli.demo:demo", "Answer from blocks that another process computed, on a real model."),
    "stat": ("kvstore.cli.stat:stat", "What is in a tier: namespaces, blocks, bytes, ages, how full it is."),
    "ls": ("kvstore.cli.ls:ls", "List a tier's namespaces, or the blocks of some of them."),
    "verify": ("kvstore.cli.verify:verify", "Read every block of a tier through its checks."),
    "bench": ("kvstore.cli.bench:bench", "How fast a tier is, beside the bare device, in one run."),
}

_EPILOG = """\
\b
A tier is a URL:
  file:///mnt/nvme/kv        lmdb:///mnt/nvme/kv.lmdb        memory://name

\b
Exit codes:
  0    done; what was checked is intact
  1    something is not intact (verify: a block; demo: an answer)
  2    the command line, the URL or the location is wrong, or the tier cannot be used
  3    a fault in kvstore: please report the traceback
  130  interrupted
"""


class _LazyGroup(click.Group):
    """Commands by dotted path, imported when they are called; their one-line help stands in the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"kvstore {version('kvstore-tiers')}")
    except PackageNotFoundError:
        click.echo("kvstore (run from a source tree, not installed)")
    ctx.exit()


@click.group(
    cls=_LazyGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """kvstore: tiers of KV-cache blocks, each one a URL."""


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing is raised and no traceback shown for known errors."""
    try:
        result = cli.main(args, prog_name="kvstore", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except KVStoreError as error:
        click.echo(f"kvstore: {error}", err=True)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvstore: interrupted", err=True)
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as leaving:
        return _left_early(leaving)
    except Exception:
        traceback.print_exc()
        return EXIT_FAULT
    return result if isinstance(result, int) else EXIT_OK


def _left_early(leaving: BrokenPipeError | SystemExit) -> int:
    """Whoever read our output has seen enough (`kvstore ls … | head`): no error, whatever click and rich make of it."""
    if isinstance(leaving, SystemExit) and not isinstance(leaving.__context__, BrokenPipeError):
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAULT
    # The interpreter flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK


def main() -> NoReturn:
    """The entry point of the `kvstore` script."""
    sys.exit(run())
