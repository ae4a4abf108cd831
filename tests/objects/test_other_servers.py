"""The contract of a backend against real servers that are not S3: Azure's emulator, Google's, an sshd."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import fsspec
import pytest
from fsspec.config import conf
from other_servers import azurite, fake_gcs, mounted_juicefs, sshd

from kvstore import open_store
from kvstore.errors import StoreAccessError, StoreNotFoundError, StoreOpenError
from kvstore.testing import StoreTests
from kvstore.testing.lifetime import open_descriptors
from kvstore.testing.patience import wait_for
from kvstore.testing.servers import free_port
from kvstore.testing.supply import SPACE, get, held, keys, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore.url import TierURL
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from other_servers import Server

    from kvstore import BlockKey, Namespace

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # of aiohttp, to gcsfs
]


Start: TypeAlias = "Callable[[Path], AbstractContextManager[Server]]"


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Start], Server]]:
    """Starts each server once; a server that is not to be had skips the test."""
    running: dict[Start, Server] = {}
    with ExitStack() as stack:

        def once(start: Start) -> Server:
            if start not in running:
                running[start] = stack.enter_context(start(tmp_path_factory.mktemp("server")))
            return running[start]

        yield once


class _Elsewhere(StoreTests):
    """Blocks are damaged through a file system of fsspec's own."""

    start: Start
    options = ""

    @pytest.fixture
    def url(self, started: Callable[[Start], Server], serial: int, monkeypatch: pytest.MonkeyPatch) -> str:
        server = started(type(self).start)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
            if name.startswith("FSSPEC_"):
                monkeypatch.setitem(conf, name.removeprefix("FSSPEC_").lower(), json.loads(value))
        monkeypatch.syspath_prepend(f"/nowhere/{os.getpid()}-{type(self).__name__}")
        scheme = server.url.partition("://")[0]
        type(self).files = fsspec.filesystem(scheme, skip_instance_cache=True, **server.filesystem)
        return f"{server.url}/test-{serial}{type(self).options}"

    files: Any = None

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return bytes(self.files.cat_file(place_of(url, namespace, key)))

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        place = place_of(url, namespace, key)
        if data is None:
            self.files.rm_file(place)
        else:
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(place, data)

    def test_a_closed_store_leaves_no_descriptor_open(self, url: str) -> None:
        """As in the suite, but for a moment: clients close connections on threads of their own."""
        open_store(url).close()
        before = open_descriptors()
        for _ in range(2):
            with open_store(url) as store:
                store.put_many(SPACE, writes([1]))
                get(store, [1, 2])
        wait_for(lambda: open_descriptors() <= before)


def place_of(url: str, namespace: Namespace, key: BlockKey) -> str:
    location = TierURL.parse(url).location
    if url.startswith("sftp"):
        location = "/" + location.partition("/")[2]
    return f"{location}/{NamespaceTree(namespace).block(key)}"


class TestAzure(_Elsewhere):
    """az:// through obstore."""

    start = staticmethod(azurite)
    options = ""  # obstore: a forked child takes adlfs


class TestAzureThroughFsspec(_Elsewhere):
    """az:// through adlfs."""

    start = staticmethod(azurite)
    options = "?client=fsspec&timeout=60s"


class TestGoogle(_Elsewhere):
    """gs:// through gcsfs."""

    start = staticmethod(fake_gcs)
    options = "?client=fsspec&timeout=60s"


class TestSftp(_Elsewhere):
    """sftp:// through paramiko."""

    start = staticmethod(sshd)
    options = "?timeout=60s"


class TestDirectoryOfAMountedFileSystem(StoreTests):
    """`file://…?remote=true` where the machine's file system is a network's."""

    @pytest.fixture(scope="session")
    @staticmethod
    def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        with mounted_juicefs(tmp_path_factory.mktemp("juicefs")) as path:
            yield path

    @pytest.fixture
    def url(self, mount: Path, serial: int) -> str:
        return f"file://{mount}/tier-{serial}?remote=true"

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return Path(place_of(url, namespace, key)).read_bytes()

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        path = Path(place_of(url, namespace, key))
        if data is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


@pytest.mark.parametrize("start", [azurite, fake_gcs])
def test_a_bucket_that_is_missing_is_told_at_the_opening(start: Start, started: Callable[[Start], Server]) -> None:
    server = started(start)
    scheme = server.url.partition("://")[0]
    with pytest.raises(StoreNotFoundError, match="there is no bucket 'nobody-has-made-it'"):
        open_store(f"{scheme}://nobody-has-made-it/kv", client="fsspec", storage_options=words(server))


def test_an_sshd_that_knows_nobody_or_is_not_there_is_told_at_the_opening(started: Callable[[Start], Server]) -> None:
    server = started(sshd)
    stranger = {**words(server), "key_filename": words(server)["key_filename"].replace("user", "host")}
    with pytest.raises(StoreAccessError, match="credentials are not accepted"):
        open_store(f"{server.url}/kv", storage_options=stranger)
    gone = server.url.replace(f":{server.filesystem['port']}/", f":{free_port()}/")
    with pytest.raises(StoreOpenError, match="cannot be reached"):
        open_store(f"{gone}/kv", storage_options=words(server))


def test_many_threads_share_an_sshd_and_find_it_again(started: Callable[[Start], Server]) -> None:
    server = started(sshd)
    with open_store(f"{server.url}/threads", storage_options=words(server)) as store:
        with ThreadPoolExecutor(12) as pool:
            stored = list(pool.map(lambda number: store.put_many(SPACE, writes([number])), range(48)))
            assert stored == [[PutOutcome.STORED]] * 48
            assert list(pool.map(lambda number: get(store, [number]), range(48))) == [[GetOutcome.HIT]] * 48
        for filesystem in store._tier.client._idle:  # type: ignore[attr-defined]
            filesystem.client.close()
        assert get(store, range(48)) == [GetOutcome.HIT] * 48
        assert held(store) == set(keys(range(48)))


def words(server: Server) -> dict[str, Any]:
    """What a file system takes beside what a URL says."""
    return {name: value for name, value in server.filesystem.items() if name not in ("host", "port", "username")}
