"""What kvstore asks of an object store: seven verbs on whole objects, each of them bounded in time and counted.

The classes below do the asking (`obstore_client`, `fsspec_client`); what is here is the same for all: the one layer of
retries, and what an outcome means. Paths are relative to the tier's root and written with `/`.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from kvstore.integrity import copied
from kvstore.layout import as_bytes
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.side import side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["Arrived", "Listed", "ObjectClient", "Requests", "spread"]

T = TypeVar("T")

BATCH = 1000
"""Objects in one request of a `delete_many`: the most that S3 takes."""
DELETES_AT_ONCE = 16
"""Where they go one by one."""
RETRIES = 2
"""Attempts after the first one, for faults that pass and that came quickly."""
FIRST_WAIT_S = 0.05
"""Before the first retry; twice as long before the next. Half of it is left to chance."""
SHARE_OF_AN_ATTEMPT = 0.75
"""Of an operation's time. What is left is when further attempts may begin, so that no operation exceeds its time."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing: its path relative to the tier's root, its bytes, when it was written (epoch seconds)."""

    path: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a `get_into` found: how large the object is, and the CRC-32C of what came into the first part, where that
    was taken on the way.
    """

    nbytes: int
    crc: int | None = None


class Requests:
    """How many requests of each kind were sent, failed attempts included. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str) -> None:
        """One more."""
        with self._lock:
            self._counts[kind] += 1

    def snapshot(self) -> dict[str, int]:
        """The counts so far: GET, PUT, HEAD, DELETE, LIST."""
        with self._lock:
            return dict(self._counts)


class ObjectClient(ABC):
    """Objects below one root, for the process that made it. Thread-safe; every verb blocks, at most `timeout` seconds.

    Verbs raise `RequestFailed`, nothing else. A subclass overrides what begins with an underscore, raises whatever its
    library does, says in `fault_of` what that means, and gives up an attempt after `attempt_timeout` seconds.
    """

    name: ClassVar[str]
    """As the option `client` calls it."""
    lists_in_pages: bool = True
    """A listing costs one request per thousand objects, and may be left early."""
    takes_new: bool = True
    """`put` can be told not to overwrite. Whether the store listens, `documents` finds out."""

    deletes_many: bool = False
    """`_delete_batch` removes up to `BATCH` objects in one request. Where a store refuses it, they go one by one."""
    keeps_copies: bool = False
    """What was read once may be served again without asking the store: a removal by others is not seen."""
    notes: tuple[str, ...] = ()
    """What an operator should know of this one."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.attempt_timeout = timeout * SHARE_OF_AN_ATTEMPT
        self.requests = Requests()
        self.quickest = 0.0
        """Seconds that the quickest request has taken; 0 where none was answered yet."""

    def get(self, path: str, start: int = 0) -> Buffer | None:
        """The object's bytes from offset `start` on, None where there is none. The buffer is the caller's to keep."""
        return self._unless_missing("GET", lambda: self._get(path, start))

    def get_into(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> Arrived | None:
        """Fill `parts`, the caller's, one after the other with the object's bytes; None where there is none.

        Of an object that is not as large as they are together nothing is copied, or not all.
        """
        return self._unless_missing("GET", lambda: self._get_into(path, parts))

    def put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> bool:
        """Write the concatenation of `parts` in one step; nobody holds them afterwards.

        `new`: only where nothing is, and False where something was. There are stores that overwrite all the same, and
        stores that refuse (UNSUPPORTED): `documents` finds out which.
        """
        try:
            self._ask("PUT", lambda: self._put(path, parts, new=new))
        except RequestFailed as failed:
            if failed.kind is Kind.EXISTS:
                return False
            raise
        return True

    def exists(self, path: str) -> bool:
        """Whether there is an object."""
        return self._unless_missing("HEAD", lambda: self._exists(path)) or False

    def look(self, path: str) -> Listed | None:
        """What a listing says of one object, None where there is none. A `modified` of 0 is not known."""
        return self._unless_missing("HEAD", lambda: self._look(path))

    def delete(self, path: str) -> None:
        """Remove the object, if there is one."""
        self._unless_missing("DELETE", lambda: self._delete(path))

    def keeps_versions(self, path: str) -> bool | None:
        """Whether what is deleted stays as an earlier version, as the object at `path` has it; None: not known."""
        return self._unless_missing("HEAD", lambda: self._keeps_versions(path))

    def overwrite(self, path: str) -> None:  # noqa: B027 - an object is whole or not
        """Write over the bytes of what is about to be deleted, where a store has them on a disk of ours."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Remove objects, those that there are: in as few requests as the store takes."""
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            if not (self.deletes_many and self._deleted_at_once(batch)):
                side_by_side(self.delete, batch, DELETES_AT_ONCE)

    def _deleted_at_once(self, batch: Sequence[str]) -> bool:
        try:
            self._ask("DELETE", lambda: self._delete_batch(batch))
        except RequestFailed as failed:
            if failed.kind not in (Kind.BUSY, Kind.TIMEOUT):
                self.deletes_many = False  # there are stores that want a checksum, or answer in a way of their own
            return False
        return True

    def leftovers(self) -> Sequence[Listed]:
        """Drafts of writes that were never finished, of any age."""
        return self._unless_missing("LIST", self._leftovers) or ()

    def remove_folder(self, folder: str) -> None:  # noqa: B027 - most stores have no folders
        """Remove the folders at and below `folder` that are empty, where a store has folders."""

    def empty_since(self, folder: str) -> float | None:  # noqa: ARG002 - most stores have no folders
        """Since when (seconds since the epoch) there is no file at or below `folder`; None where there is one, or where
        a store has no folders.
        """
        return None

    def list(self, folder: str = "") -> Iterator[Sequence[Listed]]:
        """Every object below `folder` (all of them without one), page by page, each page one request.

        In the order of their paths as UTF-8, where `lists_in_pages`.
        """
        listing = _Listing(self._pages, folder, self.requests)
        while page := self._unless_missing(None, listing.next_page):
            yield page

    def folders(self) -> Sequence[str]:
        """The names of the folders directly below the root. The first request to a store, to see that there is one."""
        return self._unless_missing("LIST", self._folders) or ()

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads. Nobody calls a verb any more."""

    @abstractmethod
    def fault_of(self, error: Exception) -> RequestFailed:
        """What an exception of the library means."""

    @abstractmethod
    def _get(self, path: str, start: int) -> Buffer: ...

    def _get_into(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> Arrived:
        data = self._get(path, 0)
        size = as_bytes(data).nbytes
        return spread([data], parts) if size == sum(part.nbytes for part in parts) else Arrived(size)

    @abstractmethod
    def _put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> None: ...

    @abstractmethod
    def _exists(self, path: str) -> bool: ...

    @abstractmethod
    def _delete(self, path: str) -> None: ...

    def _look(self, path: str) -> Listed:
        raise NotImplementedError

    def _keeps_versions(self, path: str) -> bool | None:
        del path
        return None

    def _delete_batch(self, paths: Sequence[str]) -> None:
        raise NotImplementedError

    def _leftovers(self) -> Sequence[Listed]:
        return ()

    @abstractmethod
    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]: ...

    @abstractmethod
    def _folders(self) -> Sequence[str]: ...

    def _unless_missing(self, verb: str | None, call: Callable[[], T]) -> T | None:
        try:
            return self._ask(verb, call)
        except RequestFailed as failed:
            if failed.kind is Kind.MISSING:
                return None
            raise

    def _ask(self, verb: str | None, call: Callable[[], T]) -> T:
        """Make one request, and again where that may help: in all at most `timeout` seconds. `verb` is counted."""
        began = time.monotonic()
        attempts = 0
        while True:
            attempts += 1
            if verb is not None:
                self.requests.add(verb)
            try:
                sent = time.monotonic()
                answer = call()
                took = time.monotonic() - sent
                if verb is not None and not 0 < self.quickest <= took:
                    self.quickest = took
                return answer
            except RequestFailed as failed:
                fault = failed
            except Exception as error:  # clients raise what they like
                fault = self.fault_of(error)
                traceback.clear_frames(error.__traceback__)  # of libraries that hold on to what they raise
            pause = FIRST_WAIT_S * 2 ** (attempts - 1) * random.uniform(0.5, 1.0)
            late = time.monotonic() - began + pause > self.timeout - self.attempt_timeout
            if not fault.kind.passing or attempts > RETRIES or late:
                try:
                    raise fault
                finally:
                    del fault  # or error, traceback and frame would hold each other, and the caller's buffers
            time.sleep(pause)


def spread(pieces: Iterable[Buffer], parts: Sequence[NDArray[np.uint8]]) -> Arrived:
    """Copy `pieces` into `parts`, which have room for them, the first one summed up on the way."""
    targets, done, crc = deque(parts), 0, 0
    for piece in pieces:
        rest = as_bytes(piece)
        while rest.nbytes:
            target = targets.popleft()
            length = min(rest.nbytes, target.nbytes)
            if done < parts[0].nbytes:
                crc = copied(target[:length], rest[:length], crc)
            else:
                np.copyto(target[:length], rest[:length])
            rest, done = rest[length:], done + length
            targets.appendleft(target[length:])
            while targets and not targets[0].nbytes:
                targets.popleft()
    return Arrived(done, crc)


class _Listing:
    """One listing under way: a page that failed is asked for anew, after the last object that was seen."""

    def __init__(
        self, pages: Callable[[str, str], Iterator[Sequence[Listed]]], folder: str, requests: Requests
    ) -> None:
        self._open = pages
        self._folder = folder
        self._requests = requests
        self._pages: Iterator[Sequence[Listed]] | None = None
        self._last = ""

    def next_page(self) -> Sequence[Listed] | None:
        """None at the end, for which nothing more is asked: the page before said that it was the last."""
        begins = self._pages is None
        if self._pages is None:
            self._pages = self._open(self._folder, self._last)
        page: Sequence[Listed] | None = ()
        try:
            page = next(self._pages, None)
        except BaseException:
            self._pages = None
            raise
        finally:
            if begins or page is not None:
                self._requests.add("LIST")
        if page:
            self._last = page[-1].path
        return page
