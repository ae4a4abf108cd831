"""`kvstore.testing.proxy`: each fault is what it says, as two clients see it, and without a fault it is not there."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvstore.testing.patience import PATIENCE, wait_for
from kvstore.testing.proxy import (
    ANY,
    Exchange,
    FaultProxy,
    cutting,
    deaf,
    flipping,
    resetting,
    silent,
    slow,
    slow_down,
    stalling,
    times,
    truncating,
    unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.testing.proxy import Fault
    from kvstore.testing.servers import S3Server

BODY = bytes(range(256)) * 800


@pytest.fixture
def proxy(s3_server_without_conditions: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server_without_conditions.port) as proxy:
        yield proxy


@pytest.fixture
def objects(s3_server_without_conditions: S3Server, proxy: FaultProxy) -> S3Store:
    """The bucket through the proxy: what goes through must still be signed right."""
    store = replace(s3_server_without_conditions, port=proxy.port).objects
    store.put("proxy/object", BODY)
    proxy.requests.clear()
    return store


def hurried(server: S3Server, proxy: FaultProxy) -> S3Store:
    """A client with little patience."""
    return S3Store(
        server.bucket,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region=server.region,
        endpoint=proxy.endpoint,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "connect_timeout": "300ms", "timeout": "300ms"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )


def read(objects: S3Store, path: str = "proxy/object") -> bytes:
    return bytes(objects.get(path).bytes())


def reads(objects: S3Store) -> bool:
    """Whether it does; a busy machine may keep a client with little patience from it."""
    try:
        return read(objects) == BODY
    except BaseError:
        return False


def ask(proxy: FaultProxy, timeout: float = PATIENCE, verb: str = "GET", body: bytes | None = None) -> bytes:
    """The body of an answer to a request that nobody signed: an error of the server's, of some length."""
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)) as connection:
        connection.request(verb, "/kvstore-test/proxy/object", body)
        return connection.getresponse().read()


def until_silence(client: socket.socket) -> bytes:
    """What comes until nothing does for the client's time-out; an end of the connection is none."""
    came = b""
    try:
        while piece := client.recv(1000):
            came += piece
    except TimeoutError:
        return came
    raise EOFError


def test_without_a_fault_everything_goes_through(objects: S3Store, proxy: FaultProxy) -> None:
    objects.put("proxy/large", large := BODY * 50, use_multipart=False)
    assert read(objects, "proxy/large") == large
    assert {meta["path"] for meta in objects.list("proxy").collect()} >= {"proxy/large", "proxy/object"}
    assert objects.head("proxy/large")["size"] == len(large)
    assert proxy.counts == {"PUT": 1, "GET": 1, "LIST": 1, "HEAD": 1}


def test_many_connections_at_once(objects: S3Store, proxy: FaultProxy) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: read(objects), range(100))) == {BODY}
    assert proxy.counts["GET"] == 100


def test_a_client_that_waits_for_a_word_before_it_uploads_is_told_to_go_on(objects: S3Store, proxy: FaultProxy) -> None:
    del objects
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)) as client:
        client.sendall(b"PUT /kvstore-test/x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"abc")
        assert client.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_plan_is_by_verb_and_can_be_taken_back(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["GET"] = slow_down
    with pytest.raises(BaseError, match="SlowDown"):
        read(objects)
    assert objects.head("proxy/object")["size"] == len(BODY)
    proxy.plan[ANY] = resetting()
    with pytest.raises(BaseError):
        objects.head("proxy/object")
    proxy.plan.clear()
    assert read(objects) == BODY


def test_a_fault_a_number_of_times(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["GET"] = times(2, slow_down)
    for _ in range(2):
        with pytest.raises(BaseError, match="SlowDown"):
            read(objects)
    assert read(objects) == BODY


def test_slow_is_late_and_whole(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["GET"] = slow(0.2)
    began = time.monotonic()
    assert read(objects) == BODY
    assert time.monotonic() - began >= 0.2


def test_truncated_is_a_prefix_of_the_answer(proxy: FaultProxy) -> None:
    whole = ask(proxy)
    proxy.plan["GET"] = truncating(50)
    with pytest.raises(IncompleteRead) as short:
        ask(proxy)
    assert len(whole) > 50
    assert len(short.value.partial) == 50


def test_a_stall_sends_so_many_bytes_and_then_nothing(proxy: FaultProxy) -> None:
    proxy.plan["GET"] = stalling(50)
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)) as client:
        client.sendall(b"GET /kvstore-test/x HTTP/1.1\r\nHost: h\r\n\r\n")
        came = b""
        while len(came.partition(b"\r\n\r\n")[2]) < 50:
            came += client.recv(1000)
        client.settimeout(0.2)
        came += until_silence(client)
        assert len(came.partition(b"\r\n\r\n")[2]) == 50


def test_a_flipped_bit_arrives_wrong_and_nothing_else_does(objects: S3Store, proxy: FaultProxy) -> None:
    at = 100_000  # beyond the first piece
    proxy.plan["GET"] = flipping(at)
    assert read(objects) == BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]


def test_a_flipped_bit_of_an_upload_reaches_the_server(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["PUT"] = flipping(0, upload=True)
    with pytest.raises(BaseError, match="XAmzContentSHA256Mismatch"):
        objects.put("proxy/flipped", BODY)


@pytest.mark.parametrize("fault", [silent, deaf])
def test_a_black_hole_says_nothing(proxy: FaultProxy, fault: Fault) -> None:
    proxy.plan[ANY] = fault
    with pytest.raises(TimeoutError):
        ask(proxy, timeout=0.3)


UPLOAD = b"PUT /kvstore-test/x HTTP/1.1\r\nHost: h\r\nContent-Length: 67108864\r\n\r\n"


def test_silence_takes_an_upload_and_deafness_no_more_than_the_buffers_of_the_network(proxy: FaultProxy) -> None:
    proxy.plan["PUT"] = silent
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)) as client:
        client.sendall(UPLOAD + bytes(64 << 20))
        client.settimeout(0.2)
        assert until_silence(client) == b""
    proxy.plan["PUT"] = deaf
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3)
    with closing(client), pytest.raises(TimeoutError):
        client.sendall(UPLOAD + bytes(64 << 20))


@pytest.mark.parametrize("after", [None, 0, 10])
def test_a_reset_comes_at_once_or_after_some_bytes(proxy: FaultProxy, after: int | None) -> None:
    proxy.plan["GET"] = resetting(after)
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)) as client:
        client.sendall(b"GET /kvstore-test/x HTTP/1.1\r\nHost: h\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            until_silence(client)


def test_an_answer_that_is_lost_was_an_answer(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["PUT"] = unanswered
    with pytest.raises(BaseError):
        objects.put("proxy/lost", b"stored all the same")
    assert read(objects, "proxy/lost") == b"stored all the same"


def test_an_upload_that_is_cut_stores_nothing(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.plan["PUT"] = cutting(1000)
    with pytest.raises(BaseError):
        objects.put("proxy/cut", BODY)
    with pytest.raises(FileNotFoundError):
        read(objects, "proxy/cut")


def test_down_refuses_and_comes_back_at_the_same_port(objects: S3Store, proxy: FaultProxy) -> None:
    assert read(objects) == BODY
    with proxy.down():
        with pytest.raises(BaseError):
            read(objects)
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
    assert read(objects) == BODY


def test_unreachable_answers_nobody_and_comes_back(
    objects: S3Store, proxy: FaultProxy, s3_server_without_conditions: S3Server
) -> None:
    connected = hurried(s3_server_without_conditions, proxy)
    wait_for(lambda: reads(connected))
    with proxy.unreachable():
        for store in (connected, hurried(s3_server_without_conditions, proxy)):
            with pytest.raises(BaseError, match=r"timed out|timeout|sending request"):
                read(store)
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3)
    assert read(objects) == BODY


def test_a_fault_is_a_function_of_the_exchange(objects: S3Store, proxy: FaultProxy) -> None:
    seen: list[str] = []

    def watch(exchange: Exchange) -> None:
        seen.append(exchange.request.target)
        exchange.forward()

    proxy.plan["GET"] = watch
    assert read(objects) == BODY
    assert seen == ["/kvstore-test/proxy/object"]


def test_closing_ends_whoever_waits(proxy: FaultProxy) -> None:
    proxy.plan["GET"] = silent
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, proxy, 30)
        while not proxy.requests:
            time.sleep(0.01)
        proxy.close()
        with pytest.raises((ConnectionResetError, RemoteDisconnected)):
            asked.result(5)
