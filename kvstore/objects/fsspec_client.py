"""Objects through whatever fsspec reaches: gs, az, sftp, http, chains of them, memory; S3 where obstore is not used.

A file system is made in the process that uses it, for one tier alone: no instance, event loop or listing is shared with
others. File systems on asyncio get a loop of their own on a thread of its own, which ends with the client; their calls
are given up when their time is over. Blocking ones have the time-outs of their library (`sftp_client`).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import re
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from kvstore.errors import InvalidOptionError, KVStoreError, MissingDependencyError
from kvstore.objects.client import Listed, ObjectClient
from kvstore.objects.faults import Kind, RequestFailed, kind_of_status, readable
from kvstore.objects.settings import STORAGE_OPTIONS, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.objects.settings import Place
    from kvstore.url import TierURL

__all__ = ["FsspecClient", "OwnLoop", "is_paramiko", "joined"]

_fsspec: Any = importlib.import_module("fsspec")  # which has no types
_dircache: Any = importlib.import_module("fsspec.dircache").DirCache
_asyn: Any = importlib.import_module("fsspec.asyn")

_DRAFTS = ".drafts"
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "oss")
"""Protocols of object stores."""
_ATOMIC = (*_WITHOUT_FOLDERS, "memory")
"""Protocols of which a write is one step."""
_TAKE_MODE = ("s3", "s3a")
"""Protocols that refuse to overwrite when they are told not to."""


_TAKE_A_LOOP = ("gs", "gcs", "http", "https")
"""The others use fsspec's: adlfs wants its loop once more when the process ends, sshfs stumbles over one of our own."""


class OwnLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvstore-objects", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Cancel what runs, and end; a thread that does not within `timeout` seconds stays behind, as a daemon."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(timeout)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def joined(parts: Sequence[NDArray[np.uint8]]) -> bytes:
    """One value of the parts: what fsspec takes."""
    return np.concatenate(parts).tobytes() if len(parts) > 1 else parts[0].tobytes()


def is_paramiko(place: Place) -> bool:
    """Whether this is the file system that fsspec brings for SSH, and not another one that was installed for it."""
    if place.scheme not in ("sftp", "ssh"):
        return False
    with suppress(ImportError):
        kind: Any = _fsspec.get_filesystem_class(place.scheme)
        return str(kind.__module__) == "fsspec.implementations.sftp"
    return False


class FsspecClient(ObjectClient):
    """One root on an fsspec file system."""

    name: ClassVar[str] = "fsspec"
    lists_in_pages = False

    def __init__(self, url: TierURL, place: Place) -> None:
        super().__init__(url.option(TIMEOUT))
        self._own_loop = OwnLoop()
        try:
            self._fs, self._root = self._open(url, place)
        except BaseException as error:
            self._own_loop.close(self.timeout)
            if isinstance(error, KVStoreError) or not isinstance(error, Exception):
                raise
            raise self.fault_of(error) from None
        self._protocol = place.scheme.rpartition("::")[2]
        self.takes_new = self._protocol in _TAKE_MODE and "::" not in place.scheme
        if place.scheme.partition("::")[0] == "simplecache":
            self.keeps_copies = True
            self.notes = ("simplecache serves its copies of what it has read, whoever removes it meanwhile",)
        self._made: set[str] = set()

    def close(self) -> None:
        with suppress(Exception):
            self._disconnect()
        self._own_loop.close(self.timeout)

    def _open(self, url: TierURL, place: Place) -> tuple[Any, str]:
        user = f"{url.userinfo}@" if url.userinfo is not None else ""
        text = f"{place.scheme}://{user}{url.location}"
        options = dict(url.option(STORAGE_OPTIONS))
        try:
            if "::" in place.scheme:
                filesystem, root = _fsspec.core.url_to_fs(text, **options)
            else:
                kind: Any = _fsspec.get_filesystem_class(place.scheme)
                if getattr(kind, "async_impl", False) and place.scheme in _TAKE_A_LOOP:
                    options["loop"] = self._own_loop.loop
                made = {**self._words(), **kind._get_kwargs_from_urls(text), **options}
                filesystem = kind(skip_instance_cache=True, **made)
                filesystem.dircache = _dircache(use_listings_cache=False)  # as an argument, sftp would not know it
                root = kind._strip_protocol(text)
        except ImportError as error:
            raise MissingDependencyError(f"{url}: {error}") from None
        except (TypeError, ValueError) as error:
            raise InvalidOptionError(f"{url}: fsspec cannot open it: {readable(str(error))}") from None
        return filesystem, str(root).rstrip("/")

    def _words(self) -> dict[str, Any]:
        """What the file system is told where nobody says otherwise."""
        return {}

    def _disconnect(self) -> None:
        """Close connections, as far as the file system has a way to."""
        if self._protocol in _TAKE_A_LOOP and (session := getattr(self._fs, "_session", None)) is not None:
            asyncio.run_coroutine_threadsafe(session.close(), self._own_loop.loop).result(self.timeout)
        if (service := getattr(self._fs, "service_client", None)) is not None:  # of adlfs
            asyncio.run_coroutine_threadsafe(service.close(), self._fs.loop).result(self.timeout)
        for name in ("client", "ftp"):  # of paramiko, smbclient and the like
            close = getattr(getattr(self._fs, name, None), "close", None)
            if callable(close):
                close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the file system, given up in time where that can be done."""
        if getattr(self._fs, "async_impl", False):
            coroutine = getattr(self._fs, f"_{method}")
            return _asyn.sync(self._fs.loop, coroutine, *args, timeout=self.attempt_timeout, **kwargs)
        return getattr(self._fs, method)(*args, **kwargs)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _get(self, path: str, start: int) -> Buffer:
        if start:
            return cast("bytes", self.call("cat_file", self._at(path), start=start, end=None))
        return cast("bytes", self.call("cat_file", self._at(path)))

    def _put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> None:
        del new  # `takes_new` is False
        target = self._at(path)
        self._make_folder(target.rpartition("/")[0])
        if self._protocol in _ATOMIC:
            self.call("pipe_file", target, joined(parts))
            return
        self._make_folder(self._at(_DRAFTS))
        draft = self._at(f"{_DRAFTS}/{uuid.uuid4().hex}")
        try:
            self.call("pipe_file", draft, joined(parts))
            self.call("mv", draft, target)
        except BaseException:
            with suppress(Exception):
                self.call("rm_file", draft)
            raise

    def _make_folder(self, folder: str) -> None:
        if folder not in self._made and self._protocol not in _WITHOUT_FOLDERS:
            self.call("makedirs", folder, exist_ok=True)
            self._made.add(folder)

    def _exists(self, path: str) -> bool:
        return bool(self.call("exists", self._at(path)))

    def _look(self, path: str) -> Listed:
        info = cast("Mapping[str, Any]", self.call("info", self._at(path)))
        return Listed(path, int(info.get("size") or 0), _modified(info))

    def _delete(self, path: str) -> None:
        self.call("rm_file", self._at(path))
        if self.keeps_copies and (copy := self._fs._check_file(self._at(path))):
            Path(copy).unlink(missing_ok=True)

    def _leftovers(self) -> Sequence[Listed]:
        if self._protocol in _ATOMIC:
            return []
        return list(itertools.chain.from_iterable(self._pages(_DRAFTS, "")))

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        found = cast("Mapping[str, Mapping[str, Any]]", self.call("find", self._at(folder).rstrip("/"), detail=True))
        page = [
            Listed(path.removeprefix(f"{self._root}/"), int(info.get("size") or 0), _modified(info))
            for path, info in sorted(found.items())
        ]
        yield [entry for entry in page if entry.path > after]

    def _folders(self) -> Sequence[str]:
        try:
            entries = cast("Sequence[Mapping[str, Any]]", self.call("ls", self._root, detail=True))
        except FileNotFoundError:  # nothing below the root; of a bucket that is not there some say no more than that
            self._look_for_bucket()
            raise
        return [
            str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries if entry.get("type") == "directory"
        ]

    def _look_for_bucket(self) -> None:
        if self._protocol in _WITHOUT_FOLDERS:
            bucket = self._root.partition("/")[0]
            try:
                self.call("info", bucket)
            except FileNotFoundError as error:
                raise RequestFailed(Kind.NO_BUCKET, readable(str(error))) from None
            except Exception:  # whoever may list may not have the right to ask for it
                return

    def fault_of(self, error: Exception) -> RequestFailed:
        return RequestFailed(_kind(error), readable(f"{type(error).__name__}: {error}"))


def _modified(info: Mapping[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return 0.0


_NAMES: tuple[tuple[str, Kind], ...] = (
    ("NoCredential|Credentials|TokenRetrieval|Authentication|BadHostKey", Kind.DENIED),
    ("Timeout", Kind.TIMEOUT),
    ("Connect|Endpoint|Socket|ServerDisc|ClientPayload|IncompleteRead|ResponseStream|EOF|SSH", Kind.UNREACHABLE),
)  # fmt: skip
"""What the libraries behind fsspec call their errors, which have no base in common."""

_CUT_SHORT = "Payload|ContentLength|TransferEncoding"


def _kind(error: BaseException) -> Kind:
    """From the status and code of a server's answer, else from the type, of the error or of what caused it."""
    causes = list(_chain(error))
    for cause in causes:
        # aiohttp gives a body that was cut short the status 400, which no server has said.
        status, code = (None, None) if re.search(_CUT_SHORT, type(cause).__name__) else _answer(cause)
        kind = kind_of_status(status, code)
        if kind is not None:
            return kind
    for cause in causes:
        match cause:
            case FileNotFoundError():
                return Kind.MISSING
            case FileExistsError():
                return Kind.EXISTS
            case PermissionError():
                return Kind.DENIED
            case TimeoutError() | asyncio.CancelledError():
                return Kind.TIMEOUT
            case NotImplementedError():
                return Kind.UNSUPPORTED
            case OSError(errno=28 | 122):
                return Kind.FULL
            case _:
                for pattern, kind in _NAMES:
                    if re.search(pattern, type(cause).__name__):
                        return kind
    return Kind.UNREACHABLE if any(isinstance(cause, OSError | EOFError) for cause in causes) else Kind.REFUSED


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def _answer(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's code, from botocore's, aiohttp's, gcsfs' or Azure's error."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        answer = cast("Mapping[str, Mapping[str, Any]]", response)
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = answer.get("Error", {}).get("Code")
        if isinstance(code, str) and code.isdigit():  # of a HEAD, whose answer has no body
            status, code = int(code), None
        return status, code
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            return value, None
    return None, None
