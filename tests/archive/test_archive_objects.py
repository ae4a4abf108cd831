"""Archives in a real object store, through either client, and on another file system of fsspec."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from archive_helpers import BLOCKS, IDS, KEYS, LABEL, SPACE, fill, held

from kvstore import open_store
from kvstore.archive import NoArchiveError, catalogue, create, open_archive, remove, restore
from kvstore.archive.document import MANIFEST_NAME
from kvstore.errors import StoreAccessError, StoreNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.servers import S3Server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return s3_server


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_in_a_bucket_there_and_back_interrupted_damaged_and_removed(
    bucket: S3Server, tmp_path: Path, client: str
) -> None:
    root = bucket.url(f"archives-{client}")
    url = f"{root}/one?client={client}"
    with open_store(f"file://{tmp_path}/source") as store:
        fill(store)
        info = create(url, store, SPACE, KEYS, label=LABEL, tokens=IDS)
        assert (info.name, info.blocks) == ("one", BLOCKS)
        assert catalogue(f"{root}?client={client}") == [info]
        prefix = f"archives-{client}/one"
        bucket.objects.delete(f"{prefix}/{MANIFEST_NAME}")
        bucket.objects.put(f"{prefix}/kvstore-archive.draft.json", b"{}")
        with pytest.raises(NoArchiveError):
            open_archive(url)
        told: list[int] = []
        create(url, store, SPACE, KEYS, label=LABEL, tokens=IDS, progress=told.append)
        assert told == [BLOCKS]
    with open_archive(url) as archive:
        assert archive.verify().ok
        assert archive.xarray().g0.shape == (2, 2, len(IDS), 2, 16)
    with open_store(f"lmdb://{tmp_path}/target") as target:
        assert restore(url, target).complete
        assert all(held(target, SPACE, KEYS))
    shard = f"{prefix}/g0/c/0/0/1/0/0"
    data = bytearray(bucket.objects.get(shard).bytes())
    data[0] ^= 1
    bucket.objects.put(shard, bytes(data))
    with open_archive(url) as archive:
        assert archive.verify().corrupt == (KEYS[3],)
    remove(url)
    assert list(bucket.objects.list(prefix)) == []


def test_a_bucket_that_is_not_there_and_credentials_that_are_wrong_are_told(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreNotFoundError, match="no bucket 'nowhere'"):
        open_archive("s3://nowhere/archives/one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreAccessError, match="AWS_SECRET_ACCESS_KEY"):
        catalogue(bucket.url("archives"))


@pytest.mark.usefixtures("small_shards")
def test_on_another_file_system_of_fsspec(tmp_path: Path) -> None:
    url = f"zarr+memory://{tmp_path.name}/archives/one"
    with open_store("memory://fsspec-archive") as store:
        fill(store)
        info = create(url, store, SPACE, KEYS)
        assert catalogue(f"zarr+memory://{tmp_path.name}/archives") == [info]
    with open_store("memory://fsspec-archive-target") as target:
        assert restore(url, target).complete
        assert all(held(target, SPACE, KEYS))
    remove(url)


def test_a_web_servers_copy_is_listed_read_and_restored_and_not_written(tmp_path: Path) -> None:
    with open_store("memory://web-archive") as store:
        fill(store)
        create(f"file://{tmp_path}/archives/one", store, SPACE, KEYS)
    serves = partial(Quiet, directory=str(tmp_path / "archives"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serves) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [info.name for info in catalogue(url)] == ["one"]
        with open_store("memory://web-archive-target") as target:
            assert restore(f"{url}/one", target).complete
            with pytest.raises(StoreAccessError, match="only read"):
                create(f"{url}/two", target, SPACE, KEYS)
        with pytest.raises(StoreAccessError, match="only read"):
            remove(f"{url}/one")
        with pytest.raises(NoArchiveError):
            open_archive(f"{url}/two")
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """It says nothing of what it is asked."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called there
        """Nothing."""
