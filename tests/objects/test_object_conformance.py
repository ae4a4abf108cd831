"""The contract of a backend, on object stores: every client, every kind of store that can be had here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from kvstore import open_store
from kvstore.testing import StoreTests, run_against_a_dictionary
from kvstore.testing.lifetime import open_descriptors
from kvstore.testing.patience import wait_for
from kvstore.testing.supply import SPACE, get, write
from kvstore.url import TierURL
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from kvstore import BlockKey, Namespace
    from kvstore.testing.servers import S3Server


class _OnS3(StoreTests):
    """Blocks are damaged through the server itself."""

    objects: S3Server

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return bytes(self.objects.objects.get(path_of(url, namespace, key)).bytes())

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        if data is None:
            self.objects.objects.delete(path_of(url, namespace, key))
        else:
            self.objects.objects.put(path_of(url, namespace, key), data)

    def test_a_closed_store_leaves_no_descriptor_open(self, url: str) -> None:
        """As in the suite, but for a moment: obstore closes connections on threads of its own (4 ms at most, idle)."""
        before = open_descriptors()
        for _ in range(2):
            with open_store(url) as store:
                store.put_many(SPACE, [write(1)])
                get(store, [1, 2])
        wait_for(lambda: open_descriptors() == before)


class TestSeaweedFS(_OnS3):
    """s3:// with both clients. In every run the second one has its own tests, and fsspec's the contract in memory."""

    @pytest.fixture(params=["obstore", pytest.param("fsspec", marks=pytest.mark.soak)])
    def client(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    def test_a_store_answers_as_a_dictionary_would(self, url: str) -> None:
        run_against_a_dictionary(url, runs=4)  # each step some ten requests; the soak has more of them

    @pytest.mark.soak
    @pytest.mark.timeout(1800)
    def test_a_store_answers_as_a_dictionary_would_for_long(self, url: str) -> None:
        run_against_a_dictionary(url, runs=100, steps=40)

    @pytest.fixture
    def url(self, place: str, client: str, server: S3Server) -> str:
        type(self).objects = server
        warm_up(f"{place}-elsewhere", server)
        # Forked children, of which the suite has some, must not use obstore: `auto` knows.
        # An asyncio client on a busy machine is late now and then, which is no matter of the contract.
        return place if client == "obstore" else f"{place}?client=fsspec"


@pytest.mark.soak
class TestWithoutConditionalWrites(_OnS3):
    """A store that ignores If-None-Match; what that changes is tested every time, in `test_company`."""

    @pytest.fixture
    def url(self, overwriting_server: S3Server, second_profile: str, serial: int) -> str:
        type(self).objects = overwriting_server
        place = f"{overwriting_server.url(f'test-{serial}')}?profile={second_profile}"
        warm_up(f"{overwriting_server.url('elsewhere')}?profile={second_profile}", overwriting_server)
        return place


class TestMemoryOfFsspec(StoreTests):
    """The plain way through fsspec, on its file system in this process's memory."""

    @pytest.fixture
    def url(self, request: pytest.FixtureRequest) -> str:
        return f"zarr+memory://{abs(hash(request.node.nodeid))}-{os.getpid()}"

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return bytes(fsspec.filesystem("memory").cat_file(f"/{in_memory(url)}/{NamespaceTree(namespace).block(key)}"))

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        path = f"/{in_memory(url)}/{NamespaceTree(namespace).block(key)}"
        if data is None:
            fsspec.filesystem("memory").rm_file(path)
        else:
            fsspec.filesystem("memory").pipe_file(path, data)


class TestFolderThroughFsspec(StoreTests):
    """A file system without atomic writes: a draft and a rename."""

    @pytest.fixture
    def url(self, tmp_path: object) -> str:
        return f"zarr+local://{tmp_path}/tier"

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return bytes(fsspec.filesystem("local").cat_file(f"{in_memory(url)}/{NamespaceTree(namespace).block(key)}"))

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        filesystem, path = fsspec.filesystem("local"), f"{in_memory(url)}/{NamespaceTree(namespace).block(key)}"
        if data is None:
            filesystem.rm_file(path)
        else:
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(path, data)


class TestDirectoryThatMachinesShare(StoreTests):
    """`file://…?remote=true`: files, by way of a link."""

    @pytest.fixture
    def url(self, tmp_path: object) -> str:
        return f"file://{tmp_path}/tier?remote=true"

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return file_of(url, namespace, key).read_bytes()

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        path = file_of(url, namespace, key)
        if data is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def file_of(url: str, namespace: Namespace, key: BlockKey) -> Path:
    return Path(TierURL.parse(url).location, NamespaceTree(namespace).block(key))


def in_memory(url: str) -> str:
    return TierURL.parse(url).location


def path_of(url: str, namespace: Namespace, key: BlockKey) -> str:
    prefix = TierURL.parse(url).location.partition("/")[2]
    return f"{prefix}/{NamespaceTree(namespace).block(key)}"


def warm_up(place: str, server: S3Server) -> None:
    """Obstore's runtime opens descriptors once per process, and keeps them; so does what the test looks with."""
    open_store(place).close()
    server.objects.list_with_delimiter()
