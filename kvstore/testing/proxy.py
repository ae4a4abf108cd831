"""A bad network on order: an HTTP proxy in front of a real server, for tests of whatever talks to one.

::

    with seaweedfs() as server, FaultProxy(server.port) as proxy:
        …                                             # a client of proxy.endpoint, which is as good as the server's
        proxy.plan["GET"] = truncating(1000)          # from the next request on
        proxy.plan["PUT"] = times(2, slow_down)       # the next two
        proxy.plan[ANY] = silent                      # every verb without a fault of its own
        proxy.plan.clear()                            # behaves again
        with proxy.unreachable(): …                   # nothing answers, as behind a cut cable
        assert proxy.counts["LIST"] <= 2              # requests that arrived, by verb

A fault is a function of the exchange of one request and its answer, so that whatever is missing here is a function
that a test writes: `exchange.forward()` is the exchange without a fault.

HTTP/1.1 without TLS. Heads are passed on unchanged, so that signatures hold. The verbs are those of HTTP, and LIST for
a GET with `list-type` or `prefix` in its query: what object stores call a list.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from kvstore.testing.exchange import Body, Exchange, HungUpError, Request, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Self

__all__ = [
    "ANY",
    "Exchange",
    "Fault",
    "FaultProxy",
    "Request",
    "answering",
    "cutting",
    "deaf",
    "flipping",
    "honest",
    "resetting",
    "silent",
    "slow",
    "slow_down",
    "stalling",
    "times",
    "truncating",
    "unanswered",
]

ANY = "*"
"""In a plan: every verb that has no fault of its own."""

Fault: TypeAlias = "Callable[[Exchange], None]"


# Faults


def honest(exchange: Exchange) -> None:
    """No fault: where faults are put together, the one that ends the chain."""
    exchange.forward()


def slow(seconds: float, then: Fault = honest) -> Fault:
    """Every request waits so long before it goes on."""

    def fault(exchange: Exchange) -> None:
        exchange.pause(seconds)
        then(exchange)

    return fault


def times(number: int, fault: Fault, then: Fault = honest) -> Fault:
    """The first `number` requests meet `fault`, all others `then`."""
    requests, lock = count(), threading.Lock()

    def chosen(exchange: Exchange) -> None:
        with lock:
            first = next(requests) < number
        (fault if first else then)(exchange)

    return chosen


def answering(status: int, code: str) -> Fault:
    """An S3 error in place of the server's answer, which never hears of the request."""

    def fault(exchange: Exchange) -> None:
        body = b"" if exchange.request.verb == "HEAD" else _error_body(code)
        head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        exchange.read_upload()
        exchange.answer(head.encode() + body)

    return fault


slow_down = answering(503, "SlowDown")
"""What S3 says to who asks too much."""


def silent(exchange: Exchange) -> None:
    """The request is read and nothing ever comes back, however long the client waits: a black hole."""
    exchange.read_upload()
    exchange.hang()


def deaf(exchange: Exchange) -> None:
    """Not even the request's body is read: an upload stops when the buffers of the network are full."""
    exchange.hang()


def resetting(after: int | None = None) -> Fault:
    """The connection is reset: at once, or once `after` bytes of the answer's body have come (0: its head)."""
    return Exchange.reset if after is None else _ending(Exchange.reset, after)


def stalling(after: int) -> Fault:
    """Nothing more comes after `after` bytes of the answer's body, and the connection stays open."""
    return _ending(Exchange.hang, after)


def unanswered(exchange: Exchange) -> None:
    """The server does what it was asked to do, and the connection is reset before the client hears of it."""
    exchange.ask()
    exchange.reset()


def truncating(after: int) -> Fault:
    """The connection is closed in good order after `after` bytes of the answer's body."""
    return _ending(Exchange.hang_up, after)


def cutting(after: int) -> Fault:
    """The server gets only `after` bytes of what is uploaded; then both connections are reset."""

    def fault(exchange: Exchange) -> None:
        def cut(body: Body) -> Body:
            yield from _first(body, after)
            exchange.reset()

        exchange.forward(upload=cut)

    return fault


def flipping(at: int, *, upload: bool = False) -> Fault:
    """A bit of byte `at` of the answer's body, or of what is uploaded, arrives wrong."""

    def flip(body: Body) -> Body:
        position = 0
        for piece in body:
            if position <= at < position + len(piece):
                changed = bytearray(piece)
                changed[at - position] ^= 1
                yield bytes(changed)
            else:
                yield piece
            position += len(piece)

    def fault(exchange: Exchange) -> None:
        if upload:
            exchange.forward(upload=flip)
        else:
            exchange.forward(download=flip)

    return fault


def _ending(end: Fault, after: int) -> Fault:
    def fault(exchange: Exchange) -> None:
        def cut(body: Body) -> Body:
            yield from _first(body, after)
            end(exchange)

        exchange.forward(download=cut)

    return fault


def _first(body: Body, nbytes: int) -> Body:
    """Up to so many bytes of it."""
    for piece in body:
        if nbytes <= 0:
            return
        yield piece[:nbytes]
        nbytes -= len(piece)


def _error_body(code: str) -> bytes:
    text = f"<Error><Code>{code}</Code><Message>By order of a test.</Message></Error>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()


# The proxy


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and passes on to `port` of it; a context manager.

    `plan` maps verbs to faults; `requests` are all that arrived, in their order. Both may be looked at and changed on
    any thread, at any time: an exchange under way keeps its fault.
    """

    def __init__(self, port: int) -> None:
        self.plan: dict[str, Fault] = {}
        self.requests: list[Request] = []
        self._server = ("127.0.0.1", port)
        self._over = threading.Event()
        self._wires: set[Wire] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._listener)

    @property
    def endpoint(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def counts(self) -> Counter[str]:
        """Requests so far, by verb."""
        return Counter(request.verb for request in list(self.requests))

    def hang_up(self) -> None:
        """End every connection that is open at this moment, in the middle of whatever is under way."""
        with self._lock:
            for wire in self._wires:
                wire.end_with_a_reset()
                wire.hang_up()

    @contextmanager
    def down(self) -> Generator[None]:
        """Nobody listens: connections are refused, open ones reset."""
        self._listen_no_more()
        self.hang_up()
        try:
            yield
        finally:
            self._listen_again()

    @contextmanager
    def unreachable(self) -> Generator[None]:
        """Whoever connects gets no answer at all, not even a refusal; open connections fall silent."""
        plan, self.plan = self.plan, {ANY: deaf}
        self._listen_no_more()
        # A queue for nobody that is full: the kernel drops what wants to connect beyond it.
        with socket.create_server(("127.0.0.1", self.port), backlog=0), contextlib.ExitStack() as queue:
            for _ in range(4):
                waiting = queue.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", self.port))
            try:
                yield
            finally:
                self.plan = plan
        self.hang_up()
        self._listen_again()

    def close(self) -> None:
        """Reset every connection and listen no more."""
        self._over.set()
        self._listen_no_more()
        self.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen_no_more(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _listen_again(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self._start(self._listener)

    def _start(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(listener,), name="kvstore-proxy", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), name="kvstore-proxy-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection, from its first request to its last."""
        with (
            contextlib.suppress(OSError, HungUpError),
            self._wire(client) as asking,
            self._wire(socket.create_connection(self._server)) as asked,
        ):
            while not self._over.is_set() and (head := asking.head()) is not None:
                exchange = Exchange(asking, asked, head, self._over)
                self.requests.append(exchange.request)
                self._fault(exchange.request.verb)(exchange)

    def _fault(self, verb: str) -> Fault:
        plan = self.plan
        return plan.get(verb) or plan.get(ANY) or honest

    @contextmanager
    def _wire(self, connection: socket.socket) -> Generator[Wire]:
        wire = Wire(connection)
        with self._lock:
            self._wires.add(wire)
        try:
            yield wire
        finally:
            with self._lock:
                self._wires.discard(wire)
                wire.close()
