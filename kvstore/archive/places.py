"""From an archive's URL to a client that reads and writes whole objects there: those of tiers.

The schemes, options, credentials, retries and errors are those of tiers on object stores (`kvstore.objects`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.archive.errors import ArchiveFullError
from kvstore.archive.local import LocalClient
from kvstore.errors import InvalidURLError, StoreAccessError, TierUnavailable, UnknownSchemeError
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.opening import connect
from kvstore.objects.settings import LOOKUP_TTL, OPTIONS, TIMEOUT
from kvstore.sealing import SEALING
from kvstore.url import DURABILITY, MODE, READONLY, TierURL

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import Any

    from kvstore.objects.client import ObjectClient
    from kvstore.url import Option

__all__ = ["ArchivePlace"]

OBJECT_TIMEOUT_S = 120.0
"""For one object of an archive, where the URL says nothing: it is many times a block."""
_LOCAL_OPTIONS: tuple[Option[object], ...] = (MODE, DURABILITY, TIMEOUT)
_REMOTE_OPTIONS = tuple(option for option in OPTIONS if option not in (LOOKUP_TTL, READONLY, *SEALING))


@dataclass(frozen=True, slots=True)
class ArchivePlace:
    """The folder that a URL names, in a file system or an object store. `str` of it shows no credentials."""

    url: TierURL

    @classmethod
    def of(cls, url: str | Mapping[str, Any] | TierURL, name: str | None = None) -> ArchivePlace:
        """The place at `url`, or the folder `name` in it. Raises a `ConfigurationError`."""
        parsed = TierURL.parse(url)
        if parsed.format not in (None, "zarr") or (parsed.scheme in ("lmdb", "memory") and not parsed.format):
            raise UnknownSchemeError(
                f"{parsed}: an archive is a folder of files or objects: file://, s3://, gs://, az://, sftp://, …"
            )
        if name is not None and (not name or "/" in name or name.startswith(".")):
            raise InvalidURLError(
                f"{parsed}: {name!r} is no name for an archive: one part of a path, without a dot first"
            )
        location = parsed.location.rstrip("/") + (f"/{name}" if name else "")
        known = _LOCAL_OPTIONS if parsed.scheme == "file" else _REMOTE_OPTIONS
        checked = replace(parsed, location=location).validated(known)
        ours = {TIMEOUT.name: OBJECT_TIMEOUT_S, DURABILITY.name: "fsync"}  # it is there to be kept
        values = {**checked.values, **{name: value for name, value in ours.items() if name not in checked.raw_options}}
        return cls(replace(checked, values=values))

    def __str__(self) -> str:
        return str(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.location.rpartition("/")[2]

    def child(self, name: str) -> ArchivePlace:
        """The folder `name` in it."""
        return replace(self, url=replace(self.url, location=f"{self.url.location}/{name}"))

    @contextmanager
    def client(self, *, writes: bool = False) -> Generator[ObjectClient]:
        """A client of this place, closed in the end; what its requests fail with is `TierUnavailable`, with the URL.

        Raises a `StoreOpenError` where the place cannot be reached.
        """
        client = self.connected(writes=writes)
        try:
            with self.explained():
                yield client
        finally:
            client.close()

    def connected(self, *, writes: bool = False) -> ObjectClient:
        """A client that the caller closes. Without `writes` no folder is made where there is none."""
        if writes and self.url.scheme.rpartition("::")[2] in ("http", "https"):
            raise StoreAccessError(f"{self.url}: a web server's files are only read: make archives elsewhere")
        url = replace(self.url, values={**self.url.values, READONLY.name: not writes})
        return LocalClient(url) if url.scheme == "file" else connect(url)

    @contextmanager
    def explained(self) -> Generator[None]:
        """What requests fail with in the body, with the URL."""
        try:
            yield
        except RequestFailed as failed:
            if failed.kind is Kind.FULL:
                raise ArchiveFullError(
                    f"{self.url}: {failed}: make room and do the same again, which goes on where it was; until then a"
                    " part stays there (kvstore archive rm removes it)"
                ) from failed
            raise TierUnavailable(f"{self.url}: {failed}") from failed
