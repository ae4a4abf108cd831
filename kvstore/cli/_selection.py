"""Which blocks `kvstore archive create` is about: the token ids or keys that its options name, and in what files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.errors import MissingDependencyError
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["selected", "selecting"]


_OPTIONS: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]] = (
    click.option(
        "--label", help="Archive the blocks that have this label; with another selection, the archive's label."
    ),
    click.option(
        "--tokens",
        "tokens_file",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Archive the blocks of these token ids: a JSON list, or numbers between blanks.",
    ),
    click.option(
        "--text",
        "text_file",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Archive the blocks of this text, as --tokenizer cuts it. A chat template is part of the text.",
    ),
    click.option(
        "--tokenizer", metavar="PATH", help="A tokenizer.json, or a folder or hub id that transformers loads."
    ),
    click.option(
        "--keys",
        "keys_file",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Archive these blocks: digests in hex, one a line, in order; GROUP:DIGEST for another group than 0.",
    ),
)


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which prefix: keyword arguments of the command, for `selected`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def selected(ways: dict[str, Any]) -> tuple[list[int] | None, list[BlockKey] | None]:
    """Token ids, or keys, or (None, None) for a label alone. Raises a usage error where they do not go together."""
    given = [name for name in ("tokens_file", "text_file", "keys_file") if ways[name] is not None]
    if len(given) > 1 or not (given or ways["label"]):
        raise click.UsageError("which prefix? Give one of --tokens, --text and --keys, or --label alone")
    if (ways["text_file"] is None) != (ways["tokenizer"] is None):
        raise click.UsageError("--text and --tokenizer go together: a text has tokens only by a tokenizer")
    if ways["keys_file"] is not None:
        return None, _keys_in(Path(ways["keys_file"]))
    if ways["text_file"] is not None:
        return _tokenized(Path(ways["text_file"]).read_text(encoding="utf-8"), ways["tokenizer"]), None
    return (None if ways["tokens_file"] is None else _token_ids_in(Path(ways["tokens_file"]))), None


def _token_ids_in(file: Path) -> list[int]:
    text = file.read_text(encoding="utf-8")
    try:
        found: Any = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        if not all(type(one) is int and one >= 0 for one in found):
            raise ValueError("not all of them are whole numbers from 0 on")
    except ValueError as error:
        raise click.UsageError(
            f"--tokens {file}: a JSON list of token ids, or numbers between blanks ({error})"
        ) from None
    ids: list[int] = found
    return ids


def _keys_in(file: Path) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split(), start=1):
        group, _, digest = line.rpartition(":")
        try:
            keys.append(BlockKey(bytes.fromhex(digest), int(group or "0")))
        except ValueError:
            raise click.UsageError(f"--keys {file}: entry {number}, {line[:80]!r}, is no digest in hex") from None
    return keys


def _tokenized(text: str, tokenizer: str) -> list[int]:
    """By the `tokenizers` library for a tokenizer.json, else by transformers."""
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            ids: list[int] = Tokenizer.from_file(str(file)).encode(text).ids
            return ids
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(f"--text needs a tokenizer library ({error}): pip install transformers") from error
    loaded: Any = AutoTokenizer
    try:
        found: list[int] = list(loaded.from_pretrained(tokenizer)(text)["input_ids"])
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--tokenizer {tokenizer}: {error}") from None
    return found
