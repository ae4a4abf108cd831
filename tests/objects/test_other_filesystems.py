"""What fsspec reaches beyond object stores: a web server, which is only read, and a chain of file systems."""

from __future__ import annotations

import functools
import http.server
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvstore import open_store
from kvstore.doctor import Grade, examine
from kvstore.errors import StoreOpenError, UnknownSchemeError
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.sftp_client import SftpClient
from kvstore.testing.servers import free_port
from kvstore.testing.supply import SPACE, get, held, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Without a line on stderr for each request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """`http://` of a local tier's folder, as any web server shows it."""
    with open_store(f"file://{tmp_path}/tier") as store:
        store.put_many(SPACE, writes(range(5)))
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/tier"
        server.shutdown()
        thread.join()


def test_a_tier_on_a_web_server_is_read_and_checked(web: str, tmp_path: Path) -> None:
    damaged = sorted((tmp_path / "tier" / SPACE.name).rglob("*.0"))[0]
    with open_store(web) as store:
        assert store.contains_many(SPACE, keys(range(7))) == [True] * 5 + [False] * 2
        assert get(store, range(7)) == [HIT] * 5 + [MISS] * 2
        assert store.namespaces() == [SPACE]
        assert held(store) == set(keys(range(5)))
        damaged.write_bytes(b"\0" * damaged.stat().st_size)
        assert sorted(str(outcome) for outcome in get(store, range(5))) == [str(CORRUPT)] + [str(HIT)] * 4
    assert damaged.exists()


def connecting(attempt_timeout: float) -> SftpClient:
    """A client without a server, and without a connection that is idle: somebody is making one."""
    client = SftpClient.__new__(SftpClient)
    client.attempt_timeout = attempt_timeout
    client._idle, client._connecting, client._changed, client._over = [], True, threading.Condition(), False
    return client


def test_a_connection_over_ssh_that_others_wait_for_has_a_time_out() -> None:
    with pytest.raises(RequestFailed, match="another connection is being made") as caught:
        connecting(0.1)._taken()
    assert caught.value.kind is Kind.TIMEOUT


def test_who_waits_for_a_connection_over_ssh_takes_one_that_others_give_back() -> None:
    transport = SimpleNamespace(is_active=lambda: True)
    client, alive = connecting(60), SimpleNamespace(client=SimpleNamespace(get_transport=lambda: transport))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client._taken)
        time.sleep(0.05)
        client._give_back(alive)
        assert waiting.result(60) is alive
    assert client._connecting  # still: nobody took its place


def test_nothing_is_written_to_a_web_server(web: str) -> None:
    with open_store(web) as store:
        assert store.put_many(SPACE, [write(9)]) == [PutOutcome.FAILED]
        assert store.delete_many(SPACE, keys([1])) == [False]
        assert get(store, [1]) == [HIT]


def test_a_web_server_that_is_down_is_said() -> None:
    with pytest.raises(StoreOpenError, match="cannot be reached"):
        open_store(f"http://127.0.0.1:{free_port()}/tier")


def test_a_chain_keeps_copies_of_what_was_read(place: str, tmp_path: Path) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(3)))
    copies = tmp_path / "copies"
    cached = {"simplecache": {"cache_storage": str(copies)}}
    with open_store(f"simplecache::{place}", storage_options=cached) as store:
        assert store.namespaces() == [SPACE]
        assert get(store, range(4)) == [HIT, HIT, HIT, MISS]
        assert len(list(copies.iterdir())) >= 3
        assert store.put_many(SPACE, [write(3), write(0)]) == [PutOutcome.STORED, PutOutcome.EXISTS]
    with open_store(place) as store:
        assert get(store, range(4)) == [HIT] * 4


@pytest.mark.parametrize("url", ["nosuch::s3://bucket", "zarr+nosuch://bucket", "lmdb+s3://bucket"])
def test_a_protocol_that_fsspec_does_not_know_is_no_backend(url: str) -> None:
    with pytest.raises(UnknownSchemeError):
        open_store(url)


def test_what_a_chain_removes_is_gone_and_what_others_remove_it_says_it_does_not_see(place: str) -> None:
    with open_store(f"simplecache::{place}", lookup_ttl=0) as chain, open_store(place) as plain:
        chain.put_many(SPACE, writes(range(2)))
        assert get(chain, range(2)) == [HIT, HIT]
        assert chain.delete_many(SPACE, keys([0])) == [True]
        assert plain.delete_many(SPACE, keys([1])) == [True]
        assert get(chain, range(2)) == [MISS, HIT]
        assert not chain.capabilities.tombstones
        assert plain.capabilities.tombstones
        assert any("simplecache" in note for note in chain.capabilities.notes)


def test_a_tier_in_a_bucket_that_nothing_bounds_is_a_warning(place: str) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(2)))

    def of(options: str) -> list[tuple[str, Grade]]:
        return [(finding.check, finding.grade) for finding in examine(place + options)]

    fine = [("opening", Grade.OK)] * 2
    assert of("") == [("space", Grade.WARNING), *fine]
    assert of("?capacity=1GB") == [("space", Grade.WARNING), *fine]
    assert of("?capacity=1GB&sweep=1h") == [("space", Grade.OK), *fine]
    said = [finding.found for finding in examine(f"{place}?capacity=1GB")]
    assert not [found for found in said if "no capacity" in found], "what is approximate is there all the same"
    assert of("?ttl=7d&ttl_from=stored&sweep=1h") == [("space", Grade.OK), *fine]
    assert of("?readonly=true") == fine
    assert of("?capacity=10%25")[0] == ("place", Grade.PROBLEM)
