"""Whole objects over connections of our own, against a server that answers as it is told."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.objects import wire
from kvstore.objects.faults import Kind
from kvstore.objects.obstore_client import ObstoreClient
from kvstore.objects.settings import OPTIONS, Place
from kvstore.objects.wire import NotPlainError, Wire, WireError
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Answer = Sequence[bytes] | Callable[[socket.socket], None]

BODY = bytes(range(256)) * 20
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
STORED = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"


class Scripted:
    """A server: each connection gives the answers that are next, one for a request, and is closed after `each`."""

    def __init__(self, answers: Sequence[Answer], each: int) -> None:
        self._answers, self._each = list(answers), each
        self.requests: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/bucket/object?signed"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._answers:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with stream, suppress(OSError):  # the client may hang up
                self._answer(stream)

    def _answer(self, stream: socket.socket) -> None:
        for _ in range(self._each):
            if not self._answers or not self._read(stream):
                return
            answer = self._answers.pop(0)
            if callable(answer):
                answer(stream)
                return
            for piece in answer:
                stream.sendall(piece)
                time.sleep(0.001)

    def _read(self, stream: socket.socket) -> bytes:
        request = b""
        while b"\r\n\r\n" not in request:
            if not (came := stream.recv(65536)):
                return b""
            request += came
        head, _, body = request.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
        while len(body) < length and length < HUGE:
            body += stream.recv(1 << 20)
        self.requests.append(head + b"\r\n\r\n" + body)
        return request

    def close(self) -> None:
        self._answers.clear()
        self._listener.close()


HUGE = 64 << 20
"""So long a body is not waited for."""


@contextmanager
def serving(*answers: Answer, each: int = 100) -> Iterator[tuple[Scripted, Wire]]:
    server, asking = Scripted(answers, each), Wire()
    try:
        yield server, asking
    finally:
        asking.close()
        server.close()


def room(*lengths: int) -> list[NDArray[np.uint8]]:
    return [np.zeros(length, np.uint8) for length in lengths]


def in_bytes(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


@pytest.mark.parametrize(
    "answer",
    [
        [GOOD],
        [*in_bytes(GOOD[:60]), GOOD[60:]],
        [b"HTTP/1.1 102 Processing\r\n\r\n", GOOD],
        [GOOD.replace(b"Content-Length", b"content-length")],
    ],
    ids=["at once", "byte for byte", "after another head", "in small letters"],
)
def test_a_body_goes_into_the_parts_however_it_comes(answer: Sequence[bytes]) -> None:
    with serving(answer, [GOOD]) as (server, asking):
        for _ in range(2):
            parts = room(0, 1, 700, 0, len(BODY) - 701, 0)
            assert asking.get_into(server.url, parts, 5) == len(BODY)
            assert np.concatenate(parts).tobytes() == BODY
        assert server.connections == 1
        assert server.requests[0].startswith(b"GET /bucket/object?signed HTTP/1.1\r\nHost: 127.0.0.1:")


def test_of_an_object_of_another_size_nothing_is_copied_and_the_next_answer_is_not_taken_for_its_rest() -> None:
    with serving([GOOD], [GOOD]) as (server, asking):
        (other,) = room(len(BODY) + 1)
        assert asking.get_into(server.url, [other], 5) == len(BODY)
        assert not other.any()
        (whole,) = room(len(BODY))
        assert asking.get_into(server.url, [whole], 5) == len(BODY)
        assert whole.tobytes() == BODY
        assert server.connections == 2


def test_an_object_may_be_empty() -> None:
    with serving([STORED], [STORED]) as (server, asking):
        asking.put(server.url, room(0), 5, new=True)
        assert asking.get_into(server.url, room(0, 0), 5) == 0
        assert server.connections == 1


def test_thousands_of_parts_are_sent_and_read() -> None:
    data = [np.frombuffer(BODY[place : place + 1], np.uint8) for place in range(len(BODY))]
    assert len(data) > 2 * wire.AT_ONCE
    with serving([STORED], [GOOD]) as (server, asking):
        asking.put(server.url, data, 5, new=True)
        assert server.requests[0].endswith(b"\r\n\r\n" + BODY)
        assert b"\r\nIf-None-Match: *\r\n" in server.requests[0]
        parts = room(*[1] * len(BODY))
        asking.get_into(server.url, parts, 5)
        assert np.concatenate(parts).tobytes() == BODY


@pytest.mark.parametrize("answer", [CHUNKED, b"HTTP/1.1 307 x\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n"])
def test_what_wants_a_whole_client_is_said_to_be_so(answer: bytes) -> None:
    with serving([answer]) as (server, asking), pytest.raises(NotPlainError):
        asking.get_into(server.url, room(len(BODY)), 5)


def test_a_put_was_accepted_even_if_the_answer_says_no_length() -> None:
    with serving([b"HTTP/1.1 200 OK\r\n\r\n"], [STORED], each=1) as (server, asking):
        asking.put(server.url, room(10), 5, new=False)
        assert b"If-None-Match" not in server.requests[0]
        asking.put(server.url, room(10), 5, new=False)
        assert server.connections == 2


def refusing_early(stream: socket.socket) -> None:
    body = b"<Error><Code>SlowDown</Code></Error>"
    stream.sendall(b"HTTP/1.1 503 x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    stream.shutdown(socket.SHUT_WR)
    stream.recv(1 << 20)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"], Kind.MISSING),
        ([b"HTTP/1.1 412 x\r\nContent-Length: 4\r\n\r\nxxxx"], Kind.EXISTS),
        ([b"HTTP/1.1 403 x\r\n\r\n<Error><Code>QuotaExceeded</Code></Error>"], Kind.FULL),
        (refusing_early, Kind.BUSY),
        ([b"HTTP/1.1 200 OK\r\nContent-"], Kind.UNREACHABLE),
        ([b"no answer of HTTP at all\r\n\r\n"], Kind.UNREACHABLE),
    ],
    ids=["missing", "exists", "full", "early", "cut off", "something else"],
)
def test_a_refusal_has_its_kind_and_the_next_request_is_answered(answer: Answer, kind: Kind) -> None:
    each = 1 if kind is Kind.UNREACHABLE else 100
    with serving(answer, [STORED], each=each) as (server, asking):
        with pytest.raises(WireError) as failed:
            asking.put(server.url, room(HUGE if callable(answer) else 100), 5, new=True)
        assert failed.value.kind is kind
        asking.put(server.url, room(100), 5, new=True)


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRESH_S", -1.0)
    with serving([GOOD], [GOOD], each=1) as (server, asking):
        for _ in range(2):
            asking.get_into(server.url, room(len(BODY)), 5)
            time.sleep(0.05)  # for the end to arrive
        assert server.connections == 2


def trickling(stream: socket.socket) -> None:
    stream.sendall(GOOD[:100])
    for place in range(100, len(GOOD)):
        stream.sendall(GOOD[place : place + 1])
        time.sleep(0.01)


def never_reading(_: socket.socket) -> None:
    time.sleep(2)


def getting(asking: Wire, url: str) -> None:
    asking.get_into(url, room(len(BODY)), 0.3)


def putting(asking: Wire, url: str) -> None:
    asking.put(url, room(HUGE), 0.3, new=True)


@pytest.mark.parametrize(("answer", "ask"), [(trickling, getting), (never_reading, putting)])
def test_no_request_takes_longer_than_its_time(answer: Answer, ask: Callable[[Wire, str], None]) -> None:
    with serving(answer) as (server, asking):
        began = time.monotonic()
        with pytest.raises(WireError) as failed:
            ask(asking, server.url)
        assert failed.value.kind is Kind.TIMEOUT
        assert time.monotonic() - began < 1.5


def test_nobody_listens() -> None:
    with serving() as (server, asking):
        server.close()
        with pytest.raises(WireError) as failed:
            asking.get_into(server.url, room(1), 1)
        assert failed.value.kind is Kind.UNREACHABLE


def test_an_answer_that_is_not_plain_is_left_to_obstore_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b'\r\nETag: "0"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n'
    plain = GOOD.replace(b"\r\n\r\n", said, 1)
    with serving([CHUNKED], [plain], [plain], each=1) as (server, _):
        client = client_at(monkeypatch, {}, endpoint=server.url.partition("/bucket")[0])
        for _ in range(2):
            (whole,) = room(len(BODY))
            assert client.get_into("object", [whole]) == len(BODY)
            assert whole.tobytes() == BODY
        assert [b"X-Amz-Signature=" in request for request in server.requests] == [True, False, False]
        client.close()


@pytest.mark.parametrize(
    ("options", "environment", "plain"),
    [
        ({"endpoint": "http://host:1"}, {}, True),
        ({"endpoint": "http://host:1", "addressing": "virtual"}, {}, True),
        ({"endpoint": "https://host:1"}, {}, False),
        ({}, {"AWS_ENDPOINT_URL": "http://somebody@host:1"}, False),
        ({"endpoint": "http://host:1", "anonymous": "true"}, {}, False),
        ({"endpoint": "http://host:1"}, {"HTTP_PROXY": "http://proxy"}, False),
        ({}, {}, False),
    ],
)
def test_it_is_taken_to_a_server_without_tls_to_which_nothing_stands_in_the_way(
    options: dict[str, str], environment: dict[str, str], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_at(monkeypatch, environment, **options)
    assert (client._wire is not None) is plain
    client.close()


def client_at(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **options: str) -> ObstoreClient:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    credentials = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for name, value in {**credentials, **environment}.items():
        monkeypatch.setenv(name, value)
    url = TierURL.parse("s3://bucket/kv", **options).validated(OPTIONS)
    return ObstoreClient(url, Place.of(url))
