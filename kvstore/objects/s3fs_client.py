"""S3 through s3fs, where obstore is not installed or cannot be used (a forked child): the same requests, one by one.

s3fs by itself looks twice for what is not there, cuts reads into pieces, keeps listings and has two layers of retries;
here each verb is one request, tried once, under kvstore's own retries.
"""

from __future__ import annotations

import importlib
import io
import itertools
import mmap
from typing import TYPE_CHECKING, Any, cast

from kvstore.errors import InvalidOptionError, MissingDependencyError
from kvstore.objects.client import Listed
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.fsspec_client import FsspecClient, joined
from kvstore.objects.settings import S3Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.objects.settings import Place
    from kvstore.url import TierURL

__all__ = ["S3FsClient"]

CONNECTIONS = 64
LOADING_S = 60.0
_CHUNK = 2 << 30
"""s3fs cuts what is twice as large."""
STREAMED = 8 << 20
"""From here on an object is sent and received in pieces: as one value it is in memory two or three times meanwhile."""
PIECE = 1 << 20
"""Of what is received."""


class _Parts(io.RawIOBase):
    """Some arrays as one file for reading, without a copy of all of it."""

    def __init__(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        super().__init__()
        self._parts = [part.reshape(-1) for part in parts]
        self._ends = list(itertools.accumulate(part.nbytes for part in self._parts))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ends[-1]}[whence]
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        into = memoryview(buffer)
        for part, end in zip(self._parts, self._ends, strict=True):
            if self._at < end:
                start = self._at - (end - part.nbytes)
                count = min(len(into), part.nbytes - start)
                into[:count] = part[start : start + count].data
                self._at += count
                return count
        return 0


def _config(settings: S3Settings, timeout: float) -> dict[str, Any]:
    """What botocore is told: one attempt of `timeout` seconds, and nothing that only some stores know."""
    return {
        "connect_timeout": timeout / 2,
        "read_timeout": timeout,
        "max_pool_connections": CONNECTIONS,
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path" if settings.path_style else "virtual", "payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",  # some stores do not know the trailers that it sends
        "response_checksum_validation": "when_required",
    }


class S3FsClient(FsspecClient):
    """One bucket through s3fs."""

    lists_in_pages = True
    deletes_many = True

    def _open(self, url: TierURL, place: Place) -> tuple[Any, str]:
        try:
            s3fs: Any = importlib.import_module("s3fs")
        except ImportError as error:
            raise MissingDependencyError(f"{url}: {error}: pip install s3fs (or obstore)") from None
        settings = S3Settings.of(url, place)
        rest: dict[str, Any] = dict(settings.rest)
        client = {"region_name": settings.region, **rest.pop("client_kwargs", {})}
        config = {**_config(settings, self.attempt_timeout), **rest.pop("config_kwargs", {})}
        try:
            filesystem: Any = s3fs.S3FileSystem(
                anon=settings.anonymous,
                key=settings.key,
                secret=settings.secret,
                token=settings.token,
                endpoint_url=settings.endpoint,
                client_kwargs=client,
                config_kwargs=config,
                profile=settings.profile,
                use_listings_cache=False,
                skip_instance_cache=True,
                loop=self._own_loop.loop,
                **rest,
            )
        except TypeError as error:
            raise InvalidOptionError(f"{url}: storage_options: {error}") from None
        filesystem.retries = 1
        # Half a second of loading and no request: not within the time of the first one.
        self._asyn: Any = importlib.import_module("fsspec.asyn")
        self._asyn.sync(self._own_loop.loop, filesystem.set_session, timeout=LOADING_S)
        self._bucket = place.bucket
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        return filesystem, place.root

    def _disconnect(self) -> None:
        client = getattr(self._fs, "_s3creator", None)
        if client is not None:
            self._fs.close_session(self._own_loop.loop, client)

    def _ask_s3(self, method: str, **words: Any) -> Any:
        return self.call("call_s3", method, Bucket=self._bucket, **words)

    def _get(self, path: str, start: int) -> Buffer:
        if start:
            return cast("bytes", self.call("cat_file", self._at(path), start=start, end=None))
        received: Buffer = self._asyn.sync(self._own_loop.loop, self._receive, path, timeout=self.attempt_timeout)
        return received

    async def _receive(self, path: str) -> Buffer:
        answer = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + path)
        body, size = answer["Body"], int(answer["ContentLength"])
        try:
            if size < STREAMED:
                return cast("bytes", await body.read())
            memory, done = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
            while done < size:
                piece = await body.read(PIECE)
                if not piece:
                    raise EOFError(f"the body ends after {done} of {size} bytes")
                memory[done : done + len(piece)] = piece
                done += len(piece)
            return memory
        finally:
            body.close()

    def _put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> None:
        if sum(part.nbytes for part in parts) >= STREAMED:
            condition = {"IfNoneMatch": "*"} if new else {}
            self._ask_s3("put_object", Key=self._prefix + path, Body=_Parts(parts), **condition)
            return
        mode = "create" if new else "overwrite"
        self.call("pipe_file", self._at(path), joined(parts), chunksize=_CHUNK, mode=mode)

    def _exists(self, path: str) -> bool:
        self._ask_s3("head_object", Key=self._prefix + path)
        return True

    def _look(self, path: str) -> Listed:
        answer = self._ask_s3("head_object", Key=self._prefix + path)
        return Listed(path, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def _keeps_versions(self, path: str) -> bool | None:
        return (self._ask_s3("head_object", Key=self._prefix + path).get("VersionId") or "null") != "null"

    def _delete(self, path: str) -> None:
        self._ask_s3("delete_object", Key=self._prefix + path)

    def _delete_batch(self, paths: Sequence[str]) -> None:
        names = [{"Key": self._prefix + path} for path in paths]
        answer = self._ask_s3("delete_objects", Delete={"Objects": names, "Quiet": True})
        if answer.get("Errors"):
            raise RequestFailed(Kind.REFUSED, f"{answer['Errors'][0].get('Code')}: {answer['Errors'][0].get('Key')}")

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        below = f"{self._prefix}{folder}/" if folder else self._prefix
        words: dict[str, Any] = {"StartAfter": self._prefix + after} if after else {}
        more = True
        while more:
            answer = self._ask_s3("list_objects_v2", Prefix=below, **words)
            page = [
                Listed(entry["Key"].removeprefix(self._prefix), int(entry["Size"]), entry["LastModified"].timestamp())
                for entry in answer.get("Contents", ())
            ]
            more = bool(answer.get("IsTruncated"))
            words = {"ContinuationToken": answer.get("NextContinuationToken")}
            if page:
                yield page

    def _folders(self) -> Sequence[str]:
        words: dict[str, Any] = {}
        found: list[str] = []
        while True:
            answer = self._ask_s3("list_objects_v2", Prefix=self._prefix, Delimiter="/", **words)
            found += [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in answer.get("CommonPrefixes", ())]
            if not answer.get("IsTruncated"):
                return found
            words = {"ContinuationToken": answer.get("NextContinuationToken")}
