"""A power cut, as far as one can be had without pulling a plug: what had reached the disk by then, and nothing else.

The tier is on an ext4 of its own, in an image behind a loop device. What the kernel has not yet written back is in the
upper file system's memory and not in the image, so a copy of the image is the disk after a power cut at that moment,
with whatever order the kernel wrote in. Mounted elsewhere, its journal is replayed as after a crash. The boot id in the
tier's `state` is changed, because a machine that lost its power has another one.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SIZE = "96M"

WRITER = """
import sys
import numpy as np
from worker import SPACE, block_key, expected
from kvstore import BlockWrite, open_store
with open_store(sys.argv[1], durability=sys.argv[2]) as store:
    print("open", flush=True)
    for line in sys.stdin:
        keys = [block_key(number) for number in map(int, line.split())]
        outcomes = store.put_many(SPACE, [BlockWrite(key, expected(key)) for key in keys])
        print(*(int(outcome.present) for outcome in outcomes), flush=True)
"""


@dataclass
class Machine:
    """A disk whose power can be cut while a process writes to it."""

    folder: Path
    image: Path
    disk: Path
    cuts: int = 0

    @contextlib.contextmanager
    def after_a_cut(self, path: str) -> Iterator[Path]:
        """Where the tier `path` of the disk stands on another one, as it would after the power was cut just now."""
        self.cuts += 1
        image, disk = self.folder / f"cut{self.cuts}.img", self.folder / f"cut{self.cuts}"
        shutil.copyfile(self.image, image)
        disk.mkdir()
        run("mount", "-o", "loop", image, disk)
        try:
            for state in disk.rglob("state"):
                state.write_text(state.read_text("ascii", "replace").replace("dirty ", "dirty another-boot-"))
            yield disk / path
        finally:
            run("umount", "-l", disk)
            image.unlink()


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """One with a new disk. Raises OSError where this machine lets nobody mount."""
    made = Machine(folder, folder / "disk.img", folder / "disk")
    made.disk.mkdir()
    run("truncate", "-s", SIZE, made.image)
    run("mkfs.ext4", "-q", "-F", "-m0", made.image)
    run("mount", "-o", "loop", made.image, made.disk)
    try:
        yield made
    finally:
        run("umount", "-l", made.disk)


class Writer:
    """A process that puts what it is told to."""

    def __init__(self, url: str, durability: str) -> None:
        command = [sys.executable, "-c", WRITER, url, durability]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def expect_open(self) -> None:
        """It has the tier open."""
        assert self._answer() == "open\n"

    def put(self, numbers: Sequence[int]) -> list[int]:
        """Those that are stored now."""
        self.begin(numbers)
        return self.stored(numbers)

    def begin(self, numbers: Sequence[int]) -> None:
        """Have it put them, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, numbers)) + "\n")
        self._process.stdin.flush()

    def stored(self, numbers: Sequence[int]) -> list[int]:
        """Wait for what was begun; those that are stored now."""
        said = map(int, self._answer().split())
        return [number for number, stored in zip(numbers, said, strict=True) if stored]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> None:
        """It is killed: what it did not bring to the disk is the kernel's affair."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def writer(url: str, durability: str) -> Iterator[Writer]:
    """A `Writer`, which is killed in the end."""
    process = Writer(url, durability)
    try:
        process.expect_open()
        yield process
    finally:
        process.end()


def run(*command: Any) -> None:
    """Raises OSError where it cannot be done."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr}")
