"""vLLM's real engine in processes of its own, and what is done to a tier's files between two of them.

As a script it is such a process, with a tier that hangs: `python -P engine_helpers.py < job.json`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.demo import stock
from kvstore.demo.model import model_folder
from kvstore.vllm.demo import engine
from kvstore.vllm.demo.run import prompts_about

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Damaged", "block_files", "fresh_process", "prompts", "threads_that_sleep"]

PREFIX_TOKENS = 1_024
HERE = Path(__file__)


def threads_that_sleep() -> dict[str, str]:
    """OpenMP's threads sleep while they wait: spinning ones take the cores from each other on a busy machine."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def prompts(count: int, tokens: int = PREFIX_TOKENS) -> list[list[int]]:
    """`count` prompts that differ from their first block on; each fills `tokens // 32` blocks and some of the next."""
    model = model_folder(print)
    (text,) = prompts_about(model, ["What is this about?"], 4 * tokens)
    return [text[start : start + tokens + 5] for start in range(0, 97 * count, 97)]


def fresh_process(
    asked: Sequence[Sequence[int]],
    tiers: list[dict[str, Any]] | None,
    folder: Path,
    *,
    new_tokens: int = 64,
    hanging: bool = False,
    **more: Any,
) -> list[dict[str, Any]]:
    """What the real engine answers. `folder` gets what it writes to stderr; an exception in it is a failed test."""
    command = (str(HERE),) if hanging else ("-m", "kvstore.vllm.demo.engine")
    return engine.answers(
        model_folder(print),
        asked,
        tiers,
        folder,
        print,
        command=command,
        new_tokens=new_tokens,
        **{"in_process": True, **more},
    )


def block_files(folder: Path, nbytes: int = 1 << 20) -> list[Path]:
    """The files that hold blocks, in the order in which they were written."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".mdb"]
    files = [path for path in files if path.stat().st_size >= nbytes]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


class Damaged:
    """What is done to files of blocks; every method takes those of one prompt."""

    @staticmethod
    def flipped(files: Sequence[Path]) -> None:
        """One byte of each: a number's sign and exponent, which no answer survives unnoticed."""
        for path in files:
            with path.open("r+b", buffering=0) as file:
                file.seek(400_003)
                byte = file.read(1)[0]
                file.seek(400_003)
                file.write(bytes([byte ^ 0x40]))

    @staticmethod
    def truncated(files: Sequence[Path]) -> None:
        """Half of each is left."""
        for path in files:
            os.truncate(path, path.stat().st_size // 2)

    @staticmethod
    def deleted(files: Sequence[Path]) -> None:
        """Behind the tier's back."""
        for path in files:
            path.unlink()

    @staticmethod
    def swapped(files: Sequence[Path]) -> None:
        """Each pair under each other's name."""
        for one, other in zip(files[::2], files[1::2], strict=False):
            spare = one.with_name("spare")
            one.rename(spare)
            other.rename(one)
            spare.rename(other)

    @staticmethod
    def unreadable(files: Sequence[Path]) -> None:
        """Their directories are none any more, which stops root as well."""
        for folder in {path.parent for path in files}:
            folder.rename(folder.with_name(f"{folder.name}.away"))
            folder.write_bytes(b"")


def serve_with_a_hang(job: dict[str, Any]) -> dict[str, Any]:
    """As the engine's process does; lookups are answered, but every read of a block hangs as on a dead network."""
    from kvstore.testing.faults import FaultyStore, Hanging
    from kvstore.tiering import secondary

    opened = secondary.open_store

    def open_store(*values: Any, **options: Any) -> FaultyStore:
        store = FaultyStore(opened(*values, **options), can_hang=True)
        store.plan["get"] = Hanging()
        return store

    secondary.open_store = open_store
    return engine.serve(job)


if __name__ == "__main__":
    stock.main(serve_with_a_hang)
    sys.stdout.flush()
    os._exit(0)
