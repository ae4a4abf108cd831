"""The `kvstore` command: what is in a tier, whether it is intact, how fast it is, what it needs, and the demo.

Each subcommand lives in a module of its own that is imported when it is called, so that `kvstore --help` is quick and
loads neither torch nor a backend. Machine output (`--json`) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys

try:
    import importlib
    import signal
    import threading
    import traceback
    from contextlib import contextmanager, nullcontext, suppress
    from typing import TYPE_CHECKING, NoReturn

    import click

    from kvstore.cli._output import OutputError, guarded_output, hold_standard_descriptors, printable
    from kvstore.errors import KVStoreError
except KeyboardInterrupt:  # a traceback through other people's modules tells nobody anything
    sys.stderr.write("kvstore: interrupted\n")
    sys.exit(130)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import FrameType

    from click.shell_completion import CompletionItem

__all__ = ["COMMANDS", "EXIT_FAULT", "EXIT_FULL", "EXIT_NOT_INTACT", "EXIT_OK", "EXIT_USAGE", "cli", "main", "run"]

EXIT_OK = 0
EXIT_NOT_INTACT = 1
EXIT_USAGE = 2
EXIT_FAULT = 3
EXIT_FULL = 4

COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Look": {
        "stat": ("kvstore.cli.stat:stat", "What is in a tier: namespaces, blocks, bytes, ages, how full it is."),
        "ls": ("kvstore.cli.ls:ls", "List a tier's namespaces, or the blocks of some of them."),
        "show": ("kvstore.cli.show:show", "A block or a prefix: its facts, its axes, what its numbers are like."),
        "top": ("kvstore.cli.top:top", "Watch a tier: how full, stores and evictions a second, hot prefixes."),
        "verify": ("kvstore.cli.verify:verify", "Read every block of a tier through its checks."),
    },
    "Move": {
        "cp": ("kvstore.cli.cp:cp", "Copy the blocks of one tier into another, checked on the way."),
        "archive": (
            "kvstore.cli.archive:archive",
            "Named copies of shared prefixes: make, list, check, restore, remove.",
        ),
        "warm": ("kvstore.cli.warm:warm", "Restore archives into a tier before its engines ask for them."),
    },
    "Keep": {
        "gc": ("kvstore.cli.gc:gc", "What is too old, too much or left over in a tier, and its removal."),
        "purge": ("kvstore.cli.purge:purge", "Blocks that are to be gone for good, with a receipt of what remains."),
        "rekey": ("kvstore.cli.rekey:rekey", "New keys for encrypted tiers: the operator's, or the data keys."),
        "pin": ("kvstore.cli.pin:pin", "Blocks that are to stay: neither evicted nor expiring."),
        "unpin": ("kvstore.cli.pin:unpin", "Take pins back."),
        "reindex": ("kvstore.cli.reindex:reindex", "Make a local tier know the blocks that were copied into it."),
    },
    "Try and measure": {
        "doctor": ("kvstore.cli.doctor:doctor", "What a tier needs at its place, and whether it is there."),
        "bench": ("kvstore.cli.bench:bench", "How fast a tier is, beside the bare device, in one run."),
        "demo": ("kvstore.cli.demo:demo", "Answer from blocks that another process computed, on a real model."),
    },
    "Shell": {
        "completion": ("kvstore.cli.completion:completion", "What makes bash, zsh or fish complete this command."),
    },
}
"""By purpose: each command's dotted path, imported when it is called, and its one-line help."""

_TABLE = {name: entry for commands in COMMANDS.values() for name, entry in commands.items()}

_EPILOG = """\
\b
A tier is a URL:
  file:///mnt/nvme/kv        lmdb:///mnt/nvme/kv.lmdb        s3://bucket/prefix

\b
Exit codes:
  0    done; what was checked is intact
  1    something is not intact, or was not done for every block; the output names it
  2    the command line, the URL or the location is wrong, or the tier cannot be used
  3    a fault in kvstore: please report the traceback
  4    the tier has no room left: what was done until then stays
  130  interrupted; 128 + the number of another signal that ended it
A reader that leaves early (kvstore verify … | head) changes none of them.
"""


class _LazyGroup(click.Group):
    """Commands by dotted path, imported when they are called; their one-line help stands in the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_TABLE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _TABLE:
            return None
        module, _, name = _TABLE[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for purpose, commands in COMMANDS.items():
            with formatter.section(purpose):
                width = max(map(len, _TABLE))
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click's own, but that no command is imported for its one-line help."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, (_, text) in _TABLE.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)


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
    """Run the command line and return its exit code; nothing is raised and no traceback shown for known errors.

    In the main thread, a signal that asks the process to end is handled like Ctrl-C: whatever was made is cleaned up.
    """
    with guarded_output(), _ended_like_interrupted() as ended_by:
        try:
            result = cli.main(args, prog_name="kvstore", standalone_mode=False)
            with suppress(OutputError) if result else nullcontext():  # the verdict stands
                sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            return EXIT_USAGE
        except KVStoreError as error:
            click.echo("kvstore: " + printable(str(error), keep="\n"), err=True)
            return EXIT_USAGE
        except (click.Abort, KeyboardInterrupt):
            number = ended_by[0] if ended_by else signal.SIGINT
            click.echo(f"kvstore: {'ended by ' + number.name if ended_by else 'interrupted'}", err=True)
            return 128 + number
        except Exception as error:
            traceback.print_exc()
            from kvstore.registry import package_at_fault

            package = package_at_fault(error)
            if package is None:
                return EXIT_FAULT
            click.echo(f"kvstore: this is a fault in the {package}, not in kvstore: report it there", err=True)
            return EXIT_USAGE
        return result if isinstance(result, int) else EXIT_OK


@contextmanager
def _ended_like_interrupted() -> Generator[list[signal.Signals]]:
    """Within the body, SIGTERM and SIGHUP raise KeyboardInterrupt, once; yields those that came."""
    came: list[signal.Signals] = []

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not to be cut short
        came.append(signal.Signals(number))
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if in_main and _is_default(number)]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _is_default(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def main() -> NoReturn:
    """The entry point of the `kvstore` script."""
    try:
        hold_standard_descriptors()
        code = run()
    except KeyboardInterrupt:  # just before `run` minds it, or just after
        code = 128 + signal.SIGINT
    sys.exit(code)
