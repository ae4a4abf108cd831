"""What is killed: a process that puts and gets, and checks every byte it gets, until it dies."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from content import content

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from ctypes import Array, c_int64

SPACE = Namespace("crash", "1", (BlockLayout.opaque(256 << 10), BlockLayout.opaque(100_000)), block_tokens=16)

KEYS = 400
FOLDERS = 8
"""First digest bytes in use: each costs a `file://` tier a folder and a document, which a small cap would feel."""

COUNTS = ("inside", "opened", "puts", "stored", "exists", "full", "failed", "gets", "hit", "miss", "corrupt", "wrong")
"""Each worker's numbers on the board, which outlive it. `inside`: it is in `put_many` now."""


def block_key(number: int) -> BlockKey:
    """The `number`-th of the workers' keys."""
    digest = hashlib.sha256(f"crash {number}".encode()).digest()
    return BlockKey(bytes([number % FOLDERS]) + digest[1:], number % len(SPACE.layouts))


def expected(key: BlockKey) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that belong to `key`."""
    return content(SPACE.fingerprint, key.group, key.digest, SPACE.block_bytes(key.group))


def leak(kind: str, root: str, kept: list[object]) -> None:
    """Leak a little of that kind, for tests of what finds leaks; nothing where `kind` is empty."""
    if kind == "memory":
        kept.append(np.ones(16 << 10, np.uint8))
    elif kind == "descriptors":
        kept.append(open(os.devnull))  # noqa: SIM115
    elif kind == "threads":
        kept.append(thread := threading.Thread(target=threading.Event().wait, daemon=True))
        thread.start()
    elif kind in ("disk", "records"):
        Path(root, f"lease-of-nobody-{os.getpid()}-{len(kept)}").write_bytes(b"x" * (kind == "disk") * 12_000)
        kept.append(None)


class Worker:
    """One worker at its seat on the board. `leaks` is a kind that `leak` knows, twenty times a second at most."""

    leaks = ""

    def __init__(self, url: str, options: Mapping[str, Any], seat: int, seed: int, board: Array[c_int64]) -> None:
        self.url, self.options = url, options
        self.chance = random.Random(seed)
        self.tenants = ("", "acme", "beta", f"worker-{seed}")  # the last is new: where blocks are sealed, so is its key
        self.board = board
        self.at = {name: seat * len(COUNTS) + place for place, name in enumerate(COUNTS)}

    def count(self, name: str, more: int = 1) -> None:
        self.board[self.at[name]] += more

    def run(self) -> None:
        parent, kept, due = os.getppid(), list[object](), 0.0
        with open_store(self.url, **self.options) as store:
            self.count("opened")
            while os.getppid() == parent:  # nobody is to work on for a harness that was killed itself
                keys = [block_key(number) for number in self.chance.sample(range(KEYS), self.chance.randint(1, 4))]
                if self.chance.random() < 0.7:
                    blocks = [BlockWrite(key, expected(key), tenant=self.chance.choice(self.tenants)) for key in keys]
                    self.board[self.at["inside"]] = 1
                    outcomes = store.put_many(SPACE, blocks)
                    self.board[self.at["inside"]] = 0
                    self.saw_put(outcomes)
                else:
                    reads = [BlockRead(key, np.empty(SPACE.block_bytes(key.group), np.uint8)) for key in keys]
                    self.saw_get(reads, store.get_many_into(SPACE, reads))
                if self.leaks and time.monotonic() > due:
                    leak(self.leaks, self.url.partition("://")[2], kept)
                    due = time.monotonic() + 0.05

    def saw_put(self, outcomes: list[PutOutcome]) -> None:
        self.count("puts")
        for outcome in outcomes:
            self.count(outcome.value)

    def saw_get(self, reads: list[BlockRead], outcomes: list[GetOutcome]) -> None:
        self.count("gets")
        for read, outcome in zip(reads, outcomes, strict=True):
            self.count(outcome.value)
            if outcome is GetOutcome.HIT and not np.array_equal(read.into, expected(read.key)):
                self.count("wrong")


def work(
    url: str,
    options: Mapping[str, Any],
    seat: int,
    seed: int,
    board: Array[c_int64],
    complaints: Path,
    leaks: str = "",
) -> None:
    """A worker process; an exception is written into the folder `complaints`, for the harness to find."""
    try:
        worker = Worker(url, options, seat, seed, board)
        worker.leaks = leaks
        worker.run()
    except BaseException:
        (complaints / f"seat{seat}-{os.getpid()}.txt").write_text(traceback.format_exc())
        os._exit(1)
