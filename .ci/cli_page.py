"""The page of the command line, from what the commands say of themselves: `python .ci/cli_page.py > docs/cli.md`."""

from __future__ import annotations

import sys

import click

from kvstore.cli import COMMANDS, cli

WIDTH = 110

HEAD = """\
# The command line

What `kvstore --help` and the `--help` of each command say, on one page; a test keeps it that way. To make it anew:
`python .ci/cli_page.py > docs/cli.md`.

- **Tiers are URLs**, with their options behind the `?`: `'file:///mnt/nvme/kv?capacity=500GB'` (quoted, for the shell).
  Secrets of object stores come from the environment, as their own tools take them.
- **`--json`** gives one JSON value on stdout and nothing else there. Everything that is said besides, and how far a
  command is, goes to stderr.
- **Looking changes nothing.** Commands that only look open the tier read-only, also beside an engine that writes.
- **Completion**: `kvstore completion bash --install` (or zsh, fish).
"""


def main() -> None:
    """Write the page to stdout."""
    context = click.Context(cli, info_name="kvstore", terminal_width=WIDTH, max_content_width=WIDTH)
    parts = [HEAD, section("kvstore", cli.get_help(context))]
    for purpose, commands in COMMANDS.items():
        parts.append(f"## {purpose}\n")
        for name in commands:
            command = cli.get_command(context, name)
            assert command is not None
            inner = click.Context(
                command, info_name=name, parent=context, terminal_width=WIDTH, max_content_width=WIDTH
            )
            parts.append(section(f"kvstore {name}", command.get_help(inner), "###"))
            for part in command.commands.values() if isinstance(command, click.Group) else ():
                innermost = click.Context(
                    part, info_name=part.name, parent=inner, terminal_width=WIDTH, max_content_width=WIDTH
                )
                parts.append(section(f"kvstore {name} {part.name}", part.get_help(innermost), "####"))
    sys.stdout.write("\n".join(parts))


def section(title: str, text: str, level: str = "##") -> str:
    """A heading and a help text as it is shown."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"{level} {title}\n\n```\n{lines}\n```\n"


if __name__ == "__main__":
    main()
