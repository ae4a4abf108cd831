"""The scrub: a thread that reads a local tier's blocks through their checks at a bounded rate and removes corrupt ones.

A block that nobody asks for may have gone bad long ago; found early, it is computed anew when it is next asked for, and
a drive that begins to fail is noticed. It walks the tier in the order of addresses and remembers where it was, in the
file `scrub` beside the tier's locks, over restarts; the lock on that file is held by the one who scrubs, of all who
have the tier open. A scrubbed block is not a used one: no age changes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import lmdb

from kvstore.errors import KVStoreError, StoreClosedError
from kvstore.files import open_or_make, write_all
from kvstore.namespace import FINGERPRINT_BYTES
from kvstore.reading import ThreadMemory
from kvstore.types import BlockRead, GetOutcome
from kvstore.url import READONLY, Option, parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.abc import BlockStore
    from kvstore.catalog import Catalog
    from kvstore.namespace import Namespace
    from kvstore.records import Entry

__all__ = ["SCRUB", "SCRUB_FILE", "Scrubbed", "Scrubber", "scrubbed", "start_scrub"]

_log = logging.getLogger("kvstore.scrub")

SCRUB_FILE = "scrub"
"""Its name in the directory of the tier's `Presence`."""

PASS_EVERY_S = 86400.0
"""A pass through the whole tier begins so long after the one before, at the earliest."""

LOOK_AGAIN_S = 5.0
"""How often one who does not scrub looks whether he may; how long one waits whose tier cannot tell at the moment."""

STOP_S = 10.0
"""How long `stop` waits for the batch that is being read. The thread is a daemon, and its memory its own."""

_SAVE_S = 5.0
_BATCH_BYTES = 4 << 20
_BATCHES_PER_S = 4
_BATCH_BLOCKS = 256


def _rate(text: Any) -> int:
    """Bytes a second, from `50MB/s`, `50MB` or 0."""
    if text in (0, "0", "off", "none"):
        return 0
    try:
        return parse_size(text.removesuffix("/s") if isinstance(text, str) else text)
    except ValueError:
        raise ValueError("expected bytes a second such as 50MB/s, or 0 for none") from None


SCRUB: Option[int] = Option("scrub", _rate, 0, "a thread reads all blocks through their checks at this rate: 50MB/s")


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a tier's scrub has done so far. Times are seconds since the epoch, 0 where there is none."""

    passes: int = 0
    """Whole ones."""
    blocks: int = 0
    bytes: int = 0
    corrupt: int = 0
    began: float = 0.0
    """When the pass that is under way began, or the last one did."""
    ended: float = 0.0
    """When the last whole pass ended."""
    after: str = ""
    """The address up to which the pass under way has come, in hex; empty where none is under way."""

    @classmethod
    def parsed(cls, text: str) -> Scrubbed:
        """From the file's text; what cannot be read is a scrub that has not begun."""
        try:
            found = cls(**json.loads(text))
            bytearray.fromhex(found.after)
        except (TypeError, ValueError):
            return cls()
        return found


def scrubbed(directory: Path) -> Scrubbed | None:
    """What the scrub of the tier whose `Presence` is in `directory` has done; None where none ever ran."""
    try:
        return Scrubbed.parsed((directory / SCRUB_FILE).read_text("ascii", "replace"))
    except OSError:
        return None


def start_scrub(store: BlockStore, catalog: Catalog, directory: Path, mode: int) -> Scrubber | None:
    """The scrub that the store's URL asks for, begun. `directory` is that of the tier's `Presence`."""
    rate = store.url.option(SCRUB)
    if not rate or store.url.option(READONLY):
        return None
    scrubber = Scrubber(store, catalog, directory, rate, mode)
    scrubber.start()
    return scrubber


class Scrubber:
    """The scrub of one open store. `start` it once the store is open, `stop` it before the store closes."""

    def __init__(self, store: BlockStore, catalog: Catalog, directory: Path, rate: int, mode: int) -> None:
        """`directory` is that of the tier's `Presence`, `rate` in bytes of payload a second."""
        self._store = ref(store)  # who forgets to close a store is not to keep it alive by that
        self._name = str(store.url)
        self._catalog, self._path, self._rate, self._mode = catalog, directory / SCRUB_FILE, rate, mode
        self._descriptor: int | None = None
        self._done: Scrubbed = Scrubbed()
        self._saved = 0.0
        self._memory = ThreadMemory()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-scrub", daemon=True)
        _all.add(self)

    def start(self) -> None:
        """Begin, or wait for the one who scrubs to end."""
        self._thread.start()

    def stop(self) -> None:
        """End, within `STOP_S`, and let go of the lock. What was done is remembered."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.wait(pause):
                try:
                    pause = self._step() if self._is_mine() else LOOK_AGAIN_S
                except StoreClosedError:
                    return
                except (KVStoreError, OSError, lmdb.Error) as error:
                    _log.warning("%s: the scrub goes on in %.0f s: %s", self._name, LOOK_AGAIN_S, error)
                    pause = LOOK_AGAIN_S
        finally:
            self.let_go(save=True)

    def _is_mine(self) -> bool:
        """Whether this is the one who scrubs; then what was done before is known."""
        if self._descriptor is not None:
            return True
        descriptor = open_or_make(self._path, os.O_RDWR, self._mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        self._done = Scrubbed.parsed(os.pread(descriptor, 4096, 0).decode("ascii", "replace"))
        return True

    def _step(self) -> float:
        """Read one batch, or see that a pass begins or ends; how long to wait after that."""
        store, done, now = self._store(), self._done, time.time()
        if store is None:
            raise StoreClosedError(f"{self._name} is gone")
        if not done.after:
            due = done.began + PASS_EVERY_S
            if done.began <= now < due:  # a clock that was set back is no reason to wait for years
                return min(LOOK_AGAIN_S, due - now)
            self._done = done = replace(done, began=now, after="00")
        began = time.monotonic()
        batch, nbytes, last = self._next(bytes.fromhex(done.after))
        if not last and done.after == "00":  # an empty tier: the pass begins when there is something
            self._done = replace(done, began=0.0, after="")
            return LOOK_AGAIN_S
        if not last:
            self._save(replace(done, passes=done.passes + 1, ended=now, after=""))
            return 0.0
        corrupt = self._check(store, batch)
        counts = (done.blocks + len(batch), done.bytes + nbytes, done.corrupt + corrupt)
        self._done = replace(done, blocks=counts[0], bytes=counts[1], corrupt=counts[2], after=last.hex())
        if corrupt or time.monotonic() - self._saved > _SAVE_S:
            self._save(self._done)
        return max(0.0, nbytes / self._rate - (time.monotonic() - began))

    def _next(self, after: bytes) -> tuple[list[tuple[Namespace, Entry]], int, bytes]:
        """The blocks behind an address that come next, their payload in bytes, and the last address looked at; empty
        where there is none.
        """
        most = min(_BATCH_BYTES, self._rate // _BATCHES_PER_S)
        batch: list[tuple[Namespace, Entry]] = []
        total, last = 0, b""
        with self._catalog.read() as snapshot:
            spaces = {space.fingerprint: space for space in snapshot.namespaces()}
            for entry in islice(snapshot.scan(b"", after), _BATCH_BLOCKS):
                space = spaces.get(entry.address[:FINGERPRINT_BYTES])
                known = space is not None and entry.key.group < len(space.layouts)
                nbytes = space.block_bytes(entry.key.group) if space is not None and known else 0
                if batch and total + nbytes > most:
                    break
                last, total = entry.address, total + nbytes
                if space is not None and known:
                    batch.append((space, entry))
        return batch, total, last

    def _check(self, store: BlockStore, batch: list[tuple[Namespace, Entry]]) -> int:
        """Read them; how many were corrupt."""
        corrupt = 0
        for space in {space.fingerprint: space for space, _ in batch}.values():
            keys = [entry.key for one, entry in batch if one.fingerprint == space.fingerprint]
            buffers = self._memory.lend([space.block_bytes(key.group) for key in keys])
            outcomes = store.check_many(space, [BlockRead(*read) for read in zip(keys, buffers, strict=True)])
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome is GetOutcome.CORRUPT:
                    corrupt += 1
                    digest = key.digest.hex()
                    _log.warning("%s: a corrupt block was removed: %s %d %s", self._name, space.name, key.group, digest)
        return corrupt

    def _save(self, done: Scrubbed) -> None:
        self._done, self._saved = done, time.monotonic()
        if self._descriptor is not None:
            text = json.dumps(asdict(done)).encode("ascii")
            write_all(self._descriptor, text)
            os.ftruncate(self._descriptor, len(text))

    def let_go(self, *, save: bool) -> None:
        """Let somebody else scrub. `save`: who was forked has nothing to say."""
        if self._descriptor is not None:
            with suppress(OSError):
                if save:
                    self._save(self._done)
            os.close(self._descriptor)
            self._descriptor = None


_all: WeakSet[Scrubber] = WeakSet()


def _let_go_in_child() -> None:
    for scrubber in list(_all):
        scrubber.let_go(save=False)


os.register_at_fork(after_in_child=_let_go_in_child)
