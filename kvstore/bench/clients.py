"""Bare clients of S3, as whoever has no kvstore would use them: whole objects, no checks, in threads.

What they are given is what measurements say suits them: unsigned payloads, one request per object, no listings kept.
"""

from __future__ import annotations

import importlib
import os
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.bench.contestant import Contestant
from kvstore.errors import ConfigurationError, MissingDependencyError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["BareObstore", "BareS3fs"]

_TIMEOUT_S = 60.0


class _BareClient(Contestant):
    """Objects under a prefix of its own in the bucket of `url`; credentials come from the environment."""

    def __init__(self, url: TierURL) -> None:
        if url.scheme != "s3":
            raise ConfigurationError(f"{url}: the bare clients are for s3://; compare this tier with --against raw")
        self._bucket = url.location.partition("/")[0]
        self._prefix = f".kvstore-bench-{secrets.token_hex(4)}"
        self._endpoint = url.raw_options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")
        self._region = url.raw_options.get("region") or os.environ.get("AWS_REGION") or "us-east-1"
        self._anonymous = str(url.raw_options.get("anonymous", "")).lower() == "true"
        self._stored: set[BlockKey] = set()
        self.notes = [f"{self.name}: the bare client, one object per block, no checks"]

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        self._stored.update(keys)
        for key, source in zip(keys, sources, strict=True):
            self._put(self._path(key), source)

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        for key, target in zip(keys, targets, strict=True):
            data = memoryview(self._get(self._path(key))).cast("B")
            if data.nbytes != target.nbytes:
                raise TierUnavailable(f"{self.name}: {data.nbytes} of {target.nbytes} bytes came")
            target[:] = data

    def clear(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._delete(self._path(key))
        self._stored.difference_update(keys)

    def close(self) -> None:
        self.clear(list(self._stored))

    def _path(self, key: BlockKey) -> str:
        return f"{self._prefix}/{key.digest.hex()}"

    def _put(self, path: str, source: memoryview) -> None:
        raise NotImplementedError

    def _get(self, path: str) -> Any:
        raise NotImplementedError

    def _delete(self, path: str) -> None:
        raise NotImplementedError


class BareObstore(_BareClient):
    """obstore's blocking API."""

    name: ClassVar[str] = "obstore"

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        config: dict[str, Any] = {"region": self._region, "unsigned_payload": True, "disable_bulk_delete": True}
        if self._endpoint:
            config |= {"endpoint": self._endpoint, "virtual_hosted_style_request": False}
        if self._anonymous:
            config["skip_signature"] = True
        timeout = timedelta(seconds=_TIMEOUT_S)
        self._store: Any = _module("obstore.store").S3Store(
            self._bucket, config=config, client_options={"allow_http": True, "timeout": timeout}
        )

    def _put(self, path: str, source: memoryview) -> None:
        self._store.put(path, source, use_multipart=False)

    def _get(self, path: str) -> Any:
        return self._store.get(path).bytes()

    def _delete(self, path: str) -> None:
        self._store.delete(path)


class BareS3fs(_BareClient):
    """s3fs' blocking API, all threads on its one event loop."""

    name: ClassVar[str] = "s3fs"

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self._files: Any = _module("s3fs").S3FileSystem(
            anon=self._anonymous,
            endpoint_url=self._endpoint,
            client_kwargs={"region_name": self._region},
            config_kwargs={
                "max_pool_connections": 64,
                "read_timeout": _TIMEOUT_S,
                "s3": {"payload_signing_enabled": False},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def _put(self, path: str, source: memoryview) -> None:
        self._files.pipe_file(f"{self._bucket}/{path}", bytes(source), chunksize=2 << 30)

    def _get(self, path: str) -> Any:
        return self._files.cat_file(f"{self._bucket}/{path}", max_concurrency=1)

    def _delete(self, path: str) -> None:
        self._files.rm_file(f"{self._bucket}/{path}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise MissingDependencyError(f'the bare client needs {package}: pip install "kvstore-tiers[s3]"') from error
