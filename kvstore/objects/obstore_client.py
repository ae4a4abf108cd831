"""Objects through obstore's blocking API, on whichever thread asks: the way to S3, Google Cloud Storage and Azure.

Its requests run in Rust, outside the GIL, so that a busy Python thread and a transfer hardly notice each other, which
no asyncio client manages. Its runtime lives as long as the process and does not survive a fork: a child that was
forked afterwards would wait for ever (`usable`).
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from kvstore.errors import InvalidOptionError
from kvstore.objects.client import Arrived, Listed, ObjectClient, spread
from kvstore.objects.faults import Kind, RequestFailed, kind_of_status, readable
from kvstore.objects.settings import ANONYMOUS, S3_SCHEMES, STORAGE_OPTIONS, TIMEOUT, S3Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from obstore.store import ObjectStore
    from typing_extensions import Buffer

    from kvstore.objects.settings import Place
    from kvstore.url import TierURL

__all__ = ["SCHEMES", "ObstoreClient", "usable"]

SCHEMES = (*S3_SCHEMES, "gs", "gcs", "az")
PAGE = 1000
"""Objects per request of a listing: all the three of them give."""

WHOLE, PIECE = 16 << 20, 4 << 20
"""What is larger than `WHOLE` is read in pieces: memory of 32 MiB goes back to the kernel after each block, and comes
page by page. Pieces of 8 MiB cost half as much CPU again, those of 2 MiB hardly less than these, and each of them wants
the GIL. A block of 8 MiB costs a quarter more in pieces than as a whole.
"""

_untyped: Any = obstore
_used_by: int | None = None


def usable() -> bool:
    """Whether this process may use obstore: False in a child that was forked from a process that did."""
    return _used_by in (None, os.getpid())


class ObstoreClient(ObjectClient):
    """One bucket through obstore."""

    name: ClassVar[str] = "obstore"
    deletes_many = True

    def __init__(self, url: TierURL, place: Place) -> None:
        global _used_by
        super().__init__(url.option(TIMEOUT))
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        try:
            self._store: ObjectStore | None = _open(url, place, self.attempt_timeout)
            self._bulk: ObjectStore | None = None
            self._open_bulk = partial(_open, url, place, self.attempt_timeout, bulk=True)
        except exceptions.BaseError as error:
            raise InvalidOptionError(f"{url}: obstore does not understand storage_options: {_said(error)}") from None
        _used_by = os.getpid()

    def close(self) -> None:
        self._store = self._bulk = None  # their connections close with them

    @property
    def _open_store(self) -> ObjectStore:
        if self._store is None:
            raise RequestFailed(Kind.UNREACHABLE, "the client is closed")
        return self._store

    def _get(self, path: str, start: int) -> Buffer:
        options: Any = {"range": {"offset": start}} if start else None
        return obstore.get(self._open_store, self._prefix + path, options=options).bytes()

    def _get_into(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> Arrived:
        answer = obstore.get(self._open_store, self._prefix + path)
        size = answer.meta["size"]
        if size != sum(part.nbytes for part in parts):
            return Arrived(size)
        return spread(answer.stream(min_chunk_size=PIECE) if size > WHOLE else [answer.bytes()], parts)

    def _put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> None:
        mode: Literal["create", "overwrite"] = "create" if new else "overwrite"
        views = [part.data for part in parts]
        data: Any = views
        try:
            obstore.put(self._open_store, self._prefix + path, data, mode=mode, use_multipart=False)
        finally:
            _wait_until_let_go(views, self.attempt_timeout)

    def _exists(self, path: str) -> bool:
        obstore.head(self._open_store, self._prefix + path)
        return True

    def _look(self, path: str) -> Listed:
        meta = obstore.head(self._open_store, self._prefix + path)
        return Listed(path, meta["size"], meta["last_modified"].timestamp())

    def _keeps_versions(self, path: str) -> bool | None:
        return (obstore.head(self._open_store, self._prefix + path).get("version") or "null") != "null"

    def _delete(self, path: str) -> None:
        obstore.delete(self._open_store, self._prefix + path)

    def _delete_batch(self, paths: Sequence[str]) -> None:
        _ = self._open_store
        if self._bulk is None:
            self._bulk = self._open_bulk()
        obstore.delete(self._bulk, [self._prefix + path for path in paths])

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        offset = self._prefix + after if after else None
        below = self._prefix + folder or None
        for page in _untyped.list(self._open_store, below, offset=offset, chunk_size=PAGE):
            yield [
                Listed(meta["path"].removeprefix(self._prefix), meta["size"], meta["last_modified"].timestamp())
                for meta in page
            ]

    def _folders(self) -> Sequence[str]:
        found = _untyped.list_with_delimiter(self._open_store, self._prefix or None)
        return [path.rpartition("/")[2] for path in found["common_prefixes"]]

    def fault_of(self, error: Exception) -> RequestFailed:
        return RequestFailed(_kind(error), _said(error))


def _wait_until_let_go(views: Sequence[memoryview], timeout: float) -> None:
    """A moment after a put has returned, or was given up, its connection may still have the caller's memory in hand."""
    deadline = time.monotonic() + timeout
    for view in views:
        while True:
            try:
                view.release()
            except BufferError:
                if time.monotonic() > deadline:
                    raise RequestFailed(Kind.TIMEOUT, "the connection does not let go of the block") from None
                time.sleep(0.0001)
            else:
                break


_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")


def _kind(error: Exception) -> Kind:
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    kind = kind_of_status(int(status[1]) if status else None, code[1] if code else None)
    if kind is Kind.MISSING and "list request" in text:
        return Kind.NO_BUCKET
    if kind is not None and kind is not Kind.REFUSED:
        return kind
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, exceptions.NotSupportedError | NotImplementedError):
        return Kind.UNSUPPORTED
    if "configured region" in text:  # a redirect without an address
        return Kind.WRONG_REGION
    if kind is not None:
        return kind
    return Kind.TIMEOUT if "timed out" in text or "TimedOut" in text else Kind.UNREACHABLE


def _said(error: Exception) -> str:
    text = str(error)
    cause = re.search(r"(Connection [a-z ]+|dns error[^\"]*|operation timed out)", text.partition("Debug source")[2])
    return readable(text) + (f": {cause[1]}" if cause else "")


def _open(url: TierURL, place: Place, timeout: float, *, bulk: bool = False) -> ObjectStore:
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=timeout / 2),
            "allow_http": True,
        },
        # The one layer of retries is kvstore's: theirs would begin anew with the time of each attempt.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
    }
    if place.is_s3:
        return _open_s3(url, place, options, bulk=bulk)
    config = {**url.option(STORAGE_OPTIONS), **({"skip_signature": True} if url.option(ANONYMOUS) else {})}
    kind: Any = GCSStore if place.scheme in ("gs", "gcs") else AzureStore
    store: ObjectStore = kind(place.bucket, config=config, **options)
    return store


def _open_s3(url: TierURL, place: Place, options: dict[str, Any], *, bulk: bool) -> ObjectStore:
    settings = S3Settings.of(url, place)
    if settings.rest:
        raise InvalidOptionError(
            f"{url}: storage_options has {', '.join(sorted(settings.rest))}, which only s3fs understands: client=fsspec"
        )
    config: Any = {
        "bucket": place.bucket,
        "region": settings.region,
        "virtual_hosted_style_request": not settings.path_style,
        "unsigned_payload": True,  # kvstore has checksums of its own; hashing would take as long as sending
        "skip_signature": settings.anonymous,
        "disable_bulk_delete": not bulk,  # not for one object: on some stores it wants a Content-MD5
    }
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint if settings.path_style else _with_bucket(settings.endpoint, place.bucket)
    if not settings.anonymous:
        options["credential_provider"] = _credentials(settings)
    return S3Store(config=config, **options)  # pyright: ignore[reportCallIssue]


def _with_bucket(endpoint: str, bucket: str) -> str:
    scheme, _, host = endpoint.partition("://")
    return f"{scheme}://{bucket}.{host}"


def _credentials(settings: S3Settings) -> Callable[[], Mapping[str, Any]] | None:
    """What obstore calls for credentials; None where it has to look for them itself."""
    if settings.key and settings.secret:
        fixed = {
            "access_key_id": settings.key,
            "secret_access_key": settings.secret,
            "token": settings.token,
            "expires_at": None,
        }
        return lambda: fixed
    found = settings.session_credentials()
    if found is None:
        return None

    def current() -> Mapping[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(found, "_expiry_time", None),  # of those that renew themselves
        }

    return current
