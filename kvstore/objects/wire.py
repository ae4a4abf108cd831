"""Whole objects over HTTP connections of our own: sent from the caller's memory, received into it, without TLS.

A client library hands out what came in memory of its own, which the kernel gives page by page, and which is copied
then: more CPU than all the rest of a GET (`docs/object-stores.md`). Here an answer's body goes from the socket to where
it belongs, in one call without the GIL. With TLS Python would be given records of 16 KiB, each of them with the GIL:
nothing would be gained. URLs are signed when they come here.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.objects.faults import Kind, kind_of_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Buffers = Sequence[memoryview]

__all__ = ["NotPlainError", "Wire", "WireError"]

HEAD_BYTES = 64 << 10
"""The longest head of an answer."""
AHEAD_BYTES = 1024
"""Asked for where a head is expected: nearly always all of it, and few bytes of what belongs into a buffer."""
REFUSAL_BYTES = 64 << 10
"""Of a refusal's body so much is read: its code stands at the beginning."""
AT_ONCE = 1024
"""Buffers in one call: the most that Linux takes."""
FRESH_S, IDLE_S = 1.0, 15.0
"""A connection that rested longer is looked at before it is used; after so long it is not used any more."""

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?:\r\n|$)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_CODE = re.compile(rb"<Code>([A-Za-z]+)</Code>")
_TIME = struct.Struct("@ll")  # struct timeval


class WireError(Exception):
    """A request failed, for the reason `kind`."""

    def __init__(self, kind: Kind, said: str) -> None:
        super().__init__(said)
        self.kind = kind


class NotPlainError(Exception):
    """An answer that wants a whole HTTP client: a redirection, or an object of a length that is not said."""


class Wire:
    """Connections to one server, kept for the next request. Thread-safe.

    Raises `WireError`, and `NotPlainError` before anything was stored or copied.
    """

    def __init__(self) -> None:
        self._idle: deque[_Connection] = deque()
        self._closed = False

    def put(self, url: str, parts: Sequence[NDArray[np.uint8]], timeout: float, *, new: bool) -> None:
        """PUT the concatenation of `parts`, within `timeout` seconds; `new`: if there is no object yet."""
        size = sum(part.nbytes for part in parts)
        request = _request("PUT", url, f"Content-Length: {size}\r\n" + ("If-None-Match: *\r\n" if new else ""))
        self._exchange(url, [request, *(part.data for part in parts)], None, timeout)

    def get_into(self, url: str, parts: Sequence[NDArray[np.uint8]], timeout: float) -> int:
        """GET an object into `parts`, within `timeout` seconds, if it is as large as they are together. Its size."""
        return self._exchange(url, [_request("GET", url)], [part.data for part in parts if part.nbytes], timeout)

    def close(self) -> None:
        """Close the connections; one in use, as soon as it is not."""
        self._closed = True
        self._close_rested(float("inf"))

    def _exchange(self, url: str, request: Buffers, into: Buffers | None, timeout: float) -> int:
        """One request and its answer, whose body is as long as it says; it goes `into` what is as large, or nowhere."""
        deadline = time.monotonic() + timeout
        wire = None
        try:
            wire = self._rested(deadline) or _Connection(url, deadline)
            size = wire.exchange(request, into)
            if wire.keep:
                wire.since = time.monotonic()
                self._idle.append(wire)
                self._close_rested(float("inf") if self._closed else wire.since - IDLE_S)
                wire = None
            return size
        except (TimeoutError, BlockingIOError):  # the latter is what the kernel's own time-outs are called
            raise WireError(Kind.TIMEOUT, "no answer in time") from None
        except OSError as error:
            raise WireError(Kind.UNREACHABLE, error.strerror or str(error)) from None
        finally:
            if wire is not None:
                wire.close()

    def _close_rested(self, since: float) -> None:
        """Close connections that have not been used since then."""
        with suppress(IndexError):  # another thread takes them, too
            while self._idle[0].since < since:
                self._idle.popleft().close()

    def _rested(self, deadline: float) -> _Connection | None:
        """The connection that was used last, if it still is one."""
        with suppress(IndexError):  # there is none
            while True:
                wire = self._idle.pop()
                if wire.is_alive():
                    wire.deadline = deadline
                    return wire
                wire.close()
        return None


class _Connection:
    """One connection, for one request after the other. For one thread; raises OSError.

    `status` is the last answer's, `left` how many bytes of its body have not been read (-1: it does not say), `keep`
    whether there may be another request, `since` when the last one ended.
    """

    __slots__ = ("_ahead", "_stream", "deadline", "keep", "left", "since", "status")

    def __init__(self, url: str, deadline: float) -> None:
        place = urlsplit(url)
        self.deadline = deadline
        self._stream = socket.create_connection((place.hostname or "", place.port or 80), _left_s(deadline))
        self._stream.settimeout(None)  # the kernel's time-outs instead: a call that waits is one call
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ahead = b""
        self.status = self.left = 0
        self.keep = True
        self.since = 0.0

    def is_alive(self) -> bool:
        rested = time.monotonic() - self.since
        if rested <= FRESH_S:
            return True
        try:
            self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return rested <= IDLE_S
        except OSError:
            pass
        return False  # nobody has asked for anything: what can be read is the end

    def exchange(self, request: Buffers, into: Buffers | None) -> int:
        """Ask, and read the answer, its body into buffers of as many bytes; how many it has. Raises `WireError` where
        it is a refusal.
        """
        try:
            self._send(request)
        except OSError as lost:
            try:
                self._read_head()  # the server may have said why, before it hung up
            except OSError:
                raise lost from None
            self.keep = False
        else:
            self._read_head()
        size = self.left
        if self.status >= 300 or into is None:
            self._end()
        elif size < 0:
            raise NotPlainError
        elif size == sum(buffer.nbytes for buffer in into):
            self._fill(into)
        else:
            self.keep = False
        return size

    def _send(self, buffers: Buffers) -> None:
        while buffers:
            self._limit(socket.SO_SNDTIMEO)
            buffers = _after(buffers, self._stream.sendmsg(buffers[:AT_ONCE]))

    def _read_head(self) -> None:
        """Read the head of an answer, and what of its body came with it."""
        self._ahead = b""
        head = self._next_head()
        while self.status < 200:  # the server only says that it is at it
            head = self._next_head()
        self.keep = head.startswith(b"HTTP/1.1") and not _CLOSES.search(head)
        length = _LENGTH.search(head)
        self.left = int(length[1]) if length else -1
        if 300 <= self.status < 400:
            raise NotPlainError

    def _next_head(self) -> bytes:
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            if len(self._ahead) > HEAD_BYTES:
                raise OSError("an answer whose head does not end")
            self._ahead += self._came(AHEAD_BYTES)
        head, self._ahead = self._ahead[:end], self._ahead[end + 4 :]
        if not head.startswith(b"HTTP/1.") or not head[9:12].isdigit():
            raise OSError("no answer of HTTP")
        self.status = int(head[9:12])
        return head

    def _fill(self, buffers: Buffers) -> None:
        """Read the whole body, which is as long as they are together."""
        buffers = self._filled_ahead(buffers)
        while buffers:
            self._limit(socket.SO_RCVTIMEO)
            came = self._stream.recvmsg_into(buffers[:AT_ONCE], 0, socket.MSG_WAITALL)[0]
            if not came:
                raise _hung_up()
            self.left -= came
            buffers = _after(buffers, came)

    def _end(self) -> None:
        """Read the rest of a short answer; what a refusal begins with, that does not say how long it is."""
        said = self._ahead
        with suppress(OSError):  # the status says enough
            while len(said) < min(self.left, REFUSAL_BYTES) or (self.left < 0 and self.status >= 300 and not said):
                said += self._came(REFUSAL_BYTES)
        self.keep = self.keep and len(said) == self.left
        if self.status >= 300:
            code = _CODE.search(said)
            name = code[1].decode() if code else None
            kind = kind_of_status(self.status, name) or Kind.REFUSED
            raise WireError(kind, f"status code: {self.status}" + (f", {name}" if name else ""))

    def close(self) -> None:
        self._stream.close()

    def _filled_ahead(self, buffers: Buffers) -> Buffers:
        ahead, self._ahead = self._ahead, b""
        self.left -= len(ahead)
        while ahead and buffers:
            length = min(len(ahead), buffers[0].nbytes)
            buffers[0][:length] = ahead[:length]
            ahead, buffers = ahead[length:], _after(buffers, length)
        self.keep = self.keep and not ahead
        return buffers

    def _came(self, most: int) -> bytes:
        self._limit(socket.SO_RCVTIMEO)
        data = self._stream.recv(most)
        if not data:
            raise _hung_up()
        return data

    def _limit(self, which: int) -> None:
        """The next call takes no longer than there is time."""
        seconds = _left_s(self.deadline)
        self._stream.setsockopt(socket.SOL_SOCKET, which, _TIME.pack(int(seconds), int(seconds % 1 * 1e6) or 1))


def _request(verb: str, url: str, fields: str = "") -> memoryview:
    host, _, target = url.partition("://")[2].partition("/")
    return memoryview(f"{verb} /{target} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n".encode("latin-1"))


def _after(buffers: Buffers, nbytes: int) -> Buffers:
    """What is left of `buffers` behind the first `nbytes`."""
    for number, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[number + 1 :]]
        nbytes -= buffer.nbytes
    return []


def _left_s(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _hung_up() -> OSError:
    return ConnectionResetError(None, "the server closed the connection")
