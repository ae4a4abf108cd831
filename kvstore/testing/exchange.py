"""One HTTP request and its answer on their way through a `kvstore.testing.proxy.FaultProxy`: what its faults act on.

HTTP/1.1 as far as a proxy has to understand it: where a head ends, and where a body does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

__all__ = ["Body", "Exchange", "Filter", "HungUpError", "Request", "Wire"]

_PIECE = 1 << 16

Body: TypeAlias = "Iterator[bytes]"
Filter: TypeAlias = "Callable[[Body], Body]"
"""What becomes of a body on its way, piece by piece. A chunked body has its chunk heads in it."""


class HungUpError(Exception):
    """One side is gone, or a fault ends the exchange: both connections are closed."""


@dataclass(frozen=True, slots=True)
class Request:
    """What arrived: a verb of HTTP, or LIST for a GET that lists a bucket, and the target with its query."""

    verb: str
    target: str

    @classmethod
    def of(cls, line: bytes) -> Request:
        """From the first line of a head."""
        verb, target, _ = line.decode("latin-1").split(" ", 2)
        query = parse_qs(urlsplit(target).query, keep_blank_values=True)
        lists = verb == "GET" and not query.keys().isdisjoint(("list-type", "prefix", "delimiter"))
        return cls("LIST" if lists else verb, target)


class Head:
    """The head of a request or an answer, byte for byte, and the headers that say how long the body is."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        pairs = (line.decode("latin-1").partition(":") for line in lines[1:])
        self._headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.lines[0].split(b" ", 2)[1])

    def header(self, name: str) -> str:
        """In small letters; empty if it is not there."""
        return self._headers.get(name, "")

    def without(self, name: str) -> Head:
        """The same head, less one header."""
        return Head([line for line in self.lines if not line.lower().startswith(name.encode() + b":")])

    def __bytes__(self) -> bytes:
        return b"".join(self.lines) + b"\r\n"


class Wire:
    """One connection, read head by head and body by body. Any thread may `hang_up`; one makes all other calls."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._file = connection.makefile("rb")

    def head(self) -> Head | None:
        """The next one; None when the other side has closed the connection."""
        lines: list[bytes] = []
        while (line := self._file.readline()) not in (b"\r\n", b"\n", b""):
            lines.append(line)
        if lines and not line:
            raise HungUpError
        return Head(lines) if lines else None

    def body(self, head: Head, *, of_an_answer: bool = False) -> Body:
        """What follows `head`, in pieces."""
        if "chunked" in head.header("transfer-encoding"):
            yield from self._chunks()
        elif length := head.header("content-length"):
            yield from self._exactly(int(length))
        elif of_an_answer:
            while piece := self._file.read1(_PIECE):
                yield piece

    def send(self, data: bytes) -> None:
        """All of it."""
        self.socket.sendall(data)

    def end_with_a_reset(self) -> None:
        """When it is closed, the other side is told that something went wrong, and loses what it has not read."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def hang_up(self) -> None:
        """End whatever is under way on it."""
        with contextlib.suppress(OSError):  # the other side was first
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give it back to the system."""
        self._file.close()
        self.socket.close()

    def _chunks(self) -> Body:
        while size := self._file.readline():
            yield size
            if not int(size.partition(b";")[0], 16):
                break
            yield from self._exactly(int(size.partition(b";")[0], 16) + 2)
        while (line := self._file.readline()) not in (b"\r\n", b""):
            yield line
        yield line

    def _exactly(self, nbytes: int) -> Body:
        while nbytes > 0:
            piece = self._file.read1(min(nbytes, _PIECE))
            if not piece:
                raise HungUpError
            nbytes -= len(piece)
            yield piece


class Exchange:
    """One request from `client`, whose head was read, and what may become of it. Every method but one is a step of a
    fault; those that end the exchange raise `HungUpError`, which is for the proxy.
    """

    def __init__(self, client: Wire, server: Wire, head: Head, over: threading.Event) -> None:
        self.request = Request.of(head.lines[0])
        self._client, self._server, self._head, self._over = client, server, head, over

    def forward(self, *, upload: Filter = iter, download: Filter = iter) -> None:
        """The exchange without a fault: `ask`, then `reply`."""
        self.reply(self.ask(upload), download)

    def ask(self, upload: Filter = iter) -> Head:
        """Pass the request on, with its body through `upload`; the head of the server's answer."""
        self._server.send(bytes(self._head.without("expect")))
        try:
            for piece in upload(self._upload()):
                self._server.send(piece)
        except BrokenPipeError:
            pass  # it has said all that it has to say already
        while (head := self._server.head()) is not None and head.status // 100 == 1:
            pass
        if head is None:
            raise HungUpError
        return head

    def reply(self, head: Head, download: Filter = iter) -> None:
        """Pass the server's answer on, with its body through `download`."""
        self._client.send(bytes(head))
        bodiless = self.request.verb == "HEAD" or head.status in (204, 304)
        body = iter(()) if bodiless else self._server.body(head, of_an_answer=True)
        for piece in download(body):
            self._client.send(piece)
        if "close" in (head.header("connection"), self._head.header("connection")):
            raise HungUpError

    def read_upload(self) -> None:
        """Take the request's body, for nobody."""
        for _ in self._upload():
            pass

    def answer(self, answer: bytes) -> None:
        """Say this to the client: head and body."""
        self._client.send(answer)

    def pause(self, seconds: float) -> None:
        """Nothing happens for a while."""
        if self._over.wait(seconds):
            raise HungUpError

    def hang(self) -> None:
        """Nothing happens until the client hangs up, or the proxy is closed."""
        gone = select.poll()
        gone.register(self._client.socket, select.POLLRDHUP)
        gone.poll()
        raise HungUpError

    def reset(self) -> None:
        """Reset both connections."""
        self._client.end_with_a_reset()
        self._server.end_with_a_reset()
        raise HungUpError

    def hang_up(self) -> None:
        """Close both connections in good order."""
        raise HungUpError

    def _upload(self) -> Body:
        if self._head.header("expect") == "100-continue":
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._client.body(self._head)
