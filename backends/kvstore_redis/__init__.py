"""`redis://host:6379/0`: blocks as strings of a Redis or Valkey server, which any number of machines share.

Everything about blocks is `kvstore.keyvalue`'s and `kvstore.values`'; this is the server's part: names with a prefix of
their own, SET … NX for a put (`wire`), and what a server can say. `rediss://` is the same over TLS, `valkey://` and
`valkeys://` are other names of the two.

A server evicts by itself (`maxmemory`, `maxmemory-policy`), so there is no `capacity`; with `ttl` it also removes what
has expired. What it evicted is a miss. It keeps its blocks over a restart as far as it is configured to.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from kvstore.abc import Capabilities
from kvstore.errors import InvalidURLError, StoreAccessError, StoreOpenError
from kvstore.keyvalue import KeyValueStore
from kvstore.objects.settings import TIMEOUT
from kvstore.retention import TTL
from kvstore.types import PutOutcome
from kvstore.url import Option
from kvstore.values import FORMAT, HEAD_BYTES, MANIFEST, PURGED, SEALED
from kvstore.versions import FORMAT_VERSION
from kvstore_redis.wire import read_values, write_values

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from kvstore.doctor import Finding
    from kvstore.types import Usage
    from kvstore.url import TierURL

    Buffers = Sequence[memoryview]

__all__ = ["RedisStore"]

PORT = 6379
SCANNED_AT_ONCE = 1000


def _prefix(text: Any) -> str:
    if not isinstance(text, str) or not text.isprintable() or any(letter in text for letter in "*?[]\\ "):
        raise ValueError("expected a word without blanks and without * ? [ ] \\")
    return text


def _path(text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError("expected the path of a file")
    return text


PREFIX: Option[str] = Option(
    "prefix", _prefix, "kvstore:", "what all names of the tier begin with; two prefixes in one database are two tiers"
)
CA_CERTS: Option[str | None] = Option(
    "ca_certs", _path, None, "rediss://: file with the certificates to trust; default: those of the system"
)


class RedisStore(KeyValueStore):
    """Blocks in one database of a server. Thread-safe: each call takes a connection of its own from a pool."""

    options: ClassVar[tuple[Option[object], ...]] = (*KeyValueStore.options, TIMEOUT, PREFIX, CA_CERTS)
    capabilities = Capabilities(persistent=True, shared=True, can_hang=True, io="network")
    remote = True
    errors = (RedisError,)

    def connect(self) -> None:
        """Raises `InvalidURLError`, or a `StoreOpenError` that says whether the server or the credentials are why."""
        self._prefix = self.url.option(PREFIX)
        ttl = self.url.option(TTL)
        self._lifetime_ms = None if ttl is None else max(1, round(ttl * 1000))
        self._client: Any = _client(self.url)
        try:
            if not self.readonly:
                with suppress(OutOfMemoryError):  # what is there is read and removed all the same
                    self._client.set(self._prefix + FORMAT, str(FORMAT_VERSION).encode(), nx=True)
            elif not self._client.exists(self._prefix + FORMAT) and not any(self.names("")):
                raise FileNotFoundError(f"no tier has names that begin with {self._prefix!r}")
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise StoreAccessError(f"{self.url}: the server does not let this user in: {error}") from error
        except RedisError as error:
            raise StoreOpenError(f"{self.url}: the server cannot be asked: {error}") from error

    def disconnect(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()

    # Names

    def names(self, prefix: str) -> Iterator[str]:
        start = len(self._prefix)
        for name in self._client.scan_iter(match=f"{self._prefix}{prefix}*", count=SCANNED_AT_ONCE):
            yield name.decode(errors="replace")[start:]

    def exist_many(self, names: Iterable[str]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(self._prefix + name)
            return [bool(found) for found in pipeline.execute()]

    def remove(self, name: str) -> bool:
        return bool(self._client.unlink(self._prefix + name))

    def remove_many(self, names: Iterable[str]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.unlink(self._prefix + name)
            return [bool(removed) for removed in pipeline.execute()]

    # Values

    def write(self, name: str, parts: Buffers) -> bool:
        (outcome,) = self.write_many([(name, parts)])
        if outcome is PutOutcome.FULL:
            raise OSError(errno.ENOSPC, "the server's maxmemory is reached, and its policy evicts nothing")
        if outcome is PutOutcome.FAILED:
            raise OSError(errno.EROFS, "the server refuses to write")
        return outcome is PutOutcome.STORED

    def replace(self, name: str, parts: Buffers) -> bool:
        """A purge wins against it: SET with XX stores nothing where nothing is."""
        try:
            return bool(self._client.set(self._prefix + name, b"".join(parts), xx=True, keepttl=True))
        except OutOfMemoryError as error:
            raise OSError(errno.ENOSPC, "the server's maxmemory is reached, and its policy evicts nothing") from error

    def write_many(self, values: Iterable[tuple[str, Buffers]]) -> list[PutOutcome]:
        named = ((self._prefix + name, parts, self._lifetime(name)) for name, parts in values)
        with self._connection() as connection:
            return list(write_values(connection, named))

    def _lifetime(self, name: str) -> int | None:
        """Of blocks alone: what is kept about them must not go before they do."""
        return None if name.startswith((MANIFEST, PURGED)) or name in (FORMAT, SEALED) else self._lifetime_ms

    def read_into(self, name: str, buffers: Buffers) -> int | None:
        (count,) = self.read_many_into([(name, buffers)])
        return count

    def read_many_into(self, reads: Iterable[tuple[str, Buffers]]) -> list[int | None]:
        wanted = [(self._prefix + name, buffers) for name, buffers in reads]
        if all(sum(buffer.nbytes for buffer in buffers) <= HEAD_BYTES for _, buffers in wanted):
            return self._fronts(wanted)
        with self._connection() as connection:
            return list(read_values(connection, wanted))

    def _fronts(self, wanted: Sequence[tuple[str, Buffers]]) -> list[int | None]:
        """The first bytes of large values: no more than those goes over the network.

        No transaction: a server that is full refuses one as a whole, reads included. A block that goes between the two
        questions looks like a damaged one, once.
        """
        with self._client.pipeline(transaction=False) as pipeline:
            for name, buffers in wanted:
                pipeline.exists(name)
                pipeline.getrange(name, 0, sum(buffer.nbytes for buffer in buffers) - 1)
            answers = pipeline.execute(raise_on_error=False)
        return [
            _filled(buffers, head) if there else None
            for (_, buffers), head, there in zip(wanted, answers[1::2], answers[::2], strict=True)
        ]

    @contextmanager
    def _connection(self) -> Generator[Any]:
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        finally:
            pool.release(connection)

    @classmethod
    def diagnose(cls, url: TierURL, usage: Usage | None) -> Iterable[Finding]:
        from kvstore_redis.diagnosis import diagnose

        return diagnose(url, _place(url)[0], _client(url), usage)


def _filled(buffers: Buffers, head: bytes | Exception) -> int:
    if isinstance(head, ResponseError):  # not a string: nothing that kvstore wrote
        return 0
    if isinstance(head, Exception):
        raise head
    rest = memoryview(head)
    for buffer in buffers:
        size = min(buffer.nbytes, rest.nbytes)
        buffer[:size], rest = rest[:size], rest[size:]
    return len(head)


def _client(url: TierURL) -> Any:
    """A client of the server, which connects when it is first used."""
    host, port, database = _place(url)
    user, colon, password = (url.userinfo or "").partition(":")
    tls: dict[str, Any] = {}
    if url.scheme in ("rediss", "valkeys"):
        # Redis-py 5 takes any certificate of the right CA for any host, unless it is told otherwise.
        tls = {"ssl": True, "ssl_ca_certs": url.option(CA_CERTS), "ssl_check_hostname": True}
    timeout = url.option(TIMEOUT)
    return redis.Redis(
        host=host,
        port=port,
        db=database,
        username=unquote(user) or None,
        password=unquote(password) if colon else None,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        protocol=2,  # the one that `wire` speaks
        retry=Retry(NoBackoff(), 0),  # the tier has a circuit breaker, and one time-out for a call is enough
        **tls,
    )


def _place(url: TierURL) -> tuple[str, int, int]:
    """Host, port and number of the database that a URL names. Raises `InvalidURLError`."""
    authority, _, database = url.location.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host, port = authority, str(PORT)
    if not host or not port.isdecimal() or not (database.strip("/") or "0").isdecimal():
        raise InvalidURLError(f"{url}: write {url.scheme}://host:{PORT}/0, with the number of a database at the end")
    return host.strip("[]"), int(port), int(database.strip("/") or "0")
