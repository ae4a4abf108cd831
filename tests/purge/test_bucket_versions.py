"""What a purge says of a bucket that keeps versions, on a real server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore.purging import Request, TierReceipt, purge
from kvstore.testing.servers import seaweedfs
from kvstore.testing.supply import SPACE, held, writes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.testing.servers import S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with seaweedfs() as running:
        yield running


@pytest.fixture
def tier(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of a tier with four blocks."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{server.url(str(abs(hash(request.node.name))))}?lookup_ttl=1s&client={request.param}"


def _filled_and_purged(url: str) -> TierReceipt:
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(4)))
    (receipt,) = purge([url], Request(all=True), dry_run=False).tiers
    assert (receipt.blocks, receipt.complete) == (4, True)
    with kvstore.open_store(url) as store:
        assert held(store) == set()
    return receipt


@pytest.mark.parametrize("tier", ["obstore", "fsspec"], indirect=True)
def test_a_bucket_that_keeps_versions_is_named_and_one_that_does_not_is_not(tier: str, server: S3Server) -> None:
    plain = _filled_and_purged(tier)
    assert not any("earlier version" in residue.what for residue in plain.remains)
    _keep_versions(server, "Enabled")
    try:
        versioned = _filled_and_purged(tier.replace("?", "-v?"))
    finally:
        _keep_versions(server, "Suspended")
    assert any("this bucket keeps them" in residue.what for residue in versioned.remains)


def _keep_versions(server: S3Server, status: str) -> None:
    import s3fs

    # Untyped in s3fs.
    filesystem: Any = s3fs.S3FileSystem(key=server.access_key, secret=server.secret_key, endpoint_url=server.endpoint)
    filesystem.call_s3("put_bucket_versioning", Bucket=server.bucket, VersioningConfiguration={"Status": status})
