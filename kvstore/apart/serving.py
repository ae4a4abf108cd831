"""What runs in the process that has a store: it opens one, makes the calls that it is sent, and ends with its owner.

Each call has a thread, of which there are as many as there are calls at once: who asks decides how many that may be.
Nothing here lasts: the process ends, whatever its threads are in, as soon as the socket has no other end or its owner
is dead. It is deaf to the signals that a terminal or a service manager sends to a whole group: while its owner ends in
good order, it is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.apart.messages import ALONG, KEYS, READS, SCANS, WRITES, Frames, frame, portable
from kvstore.background import NICENESS
from kvstore.errors import TierUnavailable
from kvstore.registry import open_store
from kvstore.types import BlockKey, BlockRead, BlockWrite, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.url import TierURL

__all__ = ["SCAN_CHUNK", "serve"]

SCAN_CHUNK = 1000
"""Blocks of a scan in one answer."""
_MOST_THREADS = 512
_RECEIVED_BYTES = 1 << 18
_DESCRIPTORS = 16


def serve(descriptor: int, owner: int) -> None:
    """Serve the socket that `descriptor` is, for the process `owner`; never returns."""
    for deaf in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(deaf, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    wire = socket.socket(fileno=descriptor)
    wire.set_inheritable(False)
    try:
        _Serving(wire).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # no thread that hangs in a device is waited for, and no exit handler is


def _end_with(owner: int) -> None:
    """The socket tells too, unless a child that the owner has forked keeps its other end open."""
    with contextlib.suppress(OSError):
        ended = select.poll()
        ended.register(os.pidfd_open(owner), select.POLLIN)
        if os.getppid() == owner:
            ended.poll()
        os._exit(0)


class _Serving:
    """One store, one socket."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._answering = threading.Lock()
        self._calls = ThreadPoolExecutor(_MOST_THREADS, "kvstore-call")
        self._store: BlockStore | None = None
        self._regions: dict[int, NDArray[np.uint8]] = {}
        self._namespaces: dict[int, Namespace] = {}
        self._scans: dict[int, Iterator[Any]] = {}
        self._numbers = count(int.from_bytes(os.urandom(6)))  # no number that another process has given out
        self._heard: dict[str, Callable[..., None]] = {
            "open": self._open,
            "name": self._namespaces.__setitem__,
            "call": self._call,
        }

    def run(self) -> None:
        """Until the other end is closed."""
        frames, descriptors = Frames(), list[int]()
        while True:
            received, came, _, _ = socket.recv_fds(self._wire, _RECEIVED_BYTES, _DESCRIPTORS)
            if not received:
                return
            descriptors += came
            for word, *rest in frames.add(received):
                if word == "lend":
                    ticket, *region = rest
                    self._answer(ticket, partial(self._map, descriptors.pop(0), *region))
                else:
                    self._heard[word](*rest)

    def _open(self, url: TierURL) -> None:
        def opened() -> tuple[TierURL, Any]:
            self._store = open_store(url)
            return self._store.url, self._store.capabilities

        self._calls.submit(self._answer, 0, opened)

    def _map(self, descriptor: int, number: int, nbytes: int, offset: int) -> None:
        try:
            area = mmap.mmap(descriptor, nbytes + offset % mmap.ALLOCATIONGRANULARITY, offset=_aligned(offset))
        finally:
            os.close(descriptor)
        self._regions[number] = np.frombuffer(area, np.uint8)[offset % mmap.ALLOCATIONGRANULARITY :]

    def _call(self, ticket: int, verb: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self._calls.submit(self._answer, ticket, lambda: self._made(verb, *arguments, **options))

    def _answer(self, ticket: int, call: Callable[[], Any]) -> None:
        try:
            answer = frame((ticket, call(), None))
        except BaseException as error:  # whatever a backend throws goes to who asked
            answer = frame((ticket, None, portable(error)))
        with self._answering, contextlib.suppress(OSError):  # the owner is gone: so are we in a moment
            self._wire.sendall(answer)

    def _made(self, verb: str, *arguments: Any, **options: Any) -> Any:
        store = self._store
        if store is None:
            raise TierUnavailable("nothing is open here")
        if verb == "copy_many":
            return self._copy(*arguments)
        if verb in SCANS:
            return self._went_on(verb, *arguments)
        if not arguments or not isinstance(arguments[0], int):
            return getattr(store, verb)(*arguments, **options)
        namespace = self._namespaces[arguments[0]]
        blocks: Any = arguments[1] if len(arguments) > 1 else None
        if verb in READS:
            return self._read(getattr(store, verb), namespace, blocks)
        if verb in WRITES:
            return getattr(store, verb)(namespace, [self._write(*block) for block in blocks])
        if verb in KEYS:
            return getattr(store, verb)(namespace, [BlockKey(*key) for key in blocks])
        answer = getattr(store, verb)(namespace, *arguments[1:], **options)
        return self._begun(answer) if verb.startswith("scan") else answer

    def _read(self, verb: Callable[..., list[GetOutcome]], namespace: Namespace, blocks: Sequence[Any]) -> Any:
        """Outcomes, and the bytes of what has no place in memory that both have."""
        memory = [self._memory(region, offset, nbytes) for _, _, region, offset, nbytes in blocks]
        wanted = [
            BlockRead(BlockKey(digest, group), into.data)
            for (digest, group, *_), into in zip(blocks, memory, strict=True)
        ]
        outcomes = verb(namespace, wanted)
        along = {
            number: memory[number].tobytes()
            for number, (block, outcome) in enumerate(zip(blocks, outcomes, strict=False))
            if block[2] == ALONG and outcome is GetOutcome.HIT
        }
        return outcomes, along

    def _write(
        self, digest: bytes, group: int, region: int, offset: int, data: Any, position: int, parent: bytes, tenant: str
    ) -> BlockWrite:
        source = data if region == ALONG else self._memory(region, offset, data).data
        return BlockWrite(BlockKey(digest, group), source, position, parent, tenant)

    def _memory(self, region: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        if region == ALONG:
            return np.empty(nbytes, np.uint8)
        if region not in self._regions:
            raise TierUnavailable("memory that was lent could not be mapped again after a restart: lend it anew")
        return self._regions[region][offset : offset + nbytes]

    def _copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        for into, source in pairs:
            np.copyto(self._memory(*into), self._memory(*source))

    def _begun(self, scan: Iterator[Any]) -> int:
        number = next(self._numbers)
        self._scans[number] = scan
        return number

    def _went_on(self, verb: str, number: int) -> list[Any]:
        if verb == "drop":
            self._scans.pop(number, None)
            return []
        scan = self._scans.get(number)
        if scan is None:
            raise TierUnavailable("the I/O process that had this scan has ended: begin another one")
        return list(islice(scan, SCAN_CHUNK))


def _aligned(offset: int) -> int:
    return offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
