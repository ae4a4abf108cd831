"""Values over a connection of redis-py, without its copies: sent from the caller's memory, received into it.

redis-py packs and parses each value in Python's memory: 2.4 s of CPU for a gigabyte stored and 0.6 for one loaded,
against 0.25 and 0.16 here (`docs/performance.md`). So it opens, authenticates and keeps the connections, and does all
that is small; SET and GET of blocks are written here, in the protocol's own words (RESP2), a batch in one round trip.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import AskError, ClusterDownError, InvalidResponse, OutOfMemoryError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.types import PutOutcome

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator, Sequence

    Buffers = Sequence[memoryview]

__all__ = ["read_values", "write_values"]

_Came = TypeVar("_Came", bytes, int)

_LINE_BYTES = 64 << 10
"""The longest line of a reply: an error's text."""
_AHEAD_BYTES = 32
"""Asked for where a line is expected: nearly always all of it, and few bytes of what belongs into a buffer."""
_SKIPPED_AT_ONCE = 64 << 10
_NOT_A_VALUE = "WRONGTYPE"
_DOWN = ("CLUSTERDOWN", "MASTERDOWN", "ASK", "MOVED", "TRYAGAIN", "BUSY")
"""What holds for the whole server, and not for the one value. LOADING and NOAUTH end the connection anyway."""
_DOWN_CLASSES = (ClusterDownError, AskError, TryAgainError)
"""The same, where redis-py knows the word (which ones, depends on its version) and has taken it away."""


def write_values(connection: Any, values: Iterable[tuple[str, Buffers, int | None]]) -> Iterator[PutOutcome]:
    """SET each value under its name, unless there is one; one outcome each, in order.

    A value is its name, its parts, and after how many milliseconds the server removes it. `connection` is redis-py's,
    from its pool, RESP2. Each value is sent before the next is asked for. Raises redis-py's errors when the server
    cannot be reached; then, and whenever not all outcomes are taken, the connection is closed.
    """
    sent = 0
    try:
        for name, parts, lifetime_ms in values:
            connection.send_packed_command(_set(name, parts, lifetime_ms), check_health=False)
            sent += 1
        for _ in range(sent):
            try:
                stored = connection.read_response()
            except ResponseError as error:
                yield _refusal(error)
            else:
                yield PutOutcome.EXISTS if stored is None else PutOutcome.STORED
    except BaseException:  # the replies that nobody has read would be taken for other ones
        connection.disconnect()
        raise


def _set(name: str, parts: Buffers, lifetime_ms: int | None) -> list[bytes | memoryview]:
    ends = [b"NX"] if lifetime_ms is None else [b"NX", b"PX", b"%d" % lifetime_ms]
    head = b"*%d\r\n" % (3 + len(ends)) + _word(b"SET") + _word(name.encode())
    size = sum(part.nbytes for part in parts)
    return [head + b"$%d\r\n" % size, *parts, b"\r\n" + b"".join(map(_word, ends))]


def _refusal(error: ResponseError) -> PutOutcome:
    if isinstance(error, _DOWN_CLASSES) or str(error).startswith(_DOWN):
        raise RedisConnectionError(str(error)) from error
    return PutOutcome.FULL if isinstance(error, OutOfMemoryError) else PutOutcome.FAILED


def read_values(connection: Any, reads: Sequence[tuple[str, Buffers]]) -> Iterator[int | None]:
    """GET each value straight into its buffers, one after another; how many bytes it has, None where there is none.

    A value that is longer than its buffers fills them, and the rest is thrown away; what is no string counts 0 bytes.
    Errors as above. All answers have to be taken, or the connection be closed.
    """
    request = b"".join(b"*2\r\n" + _word(b"GET") + _word(name.encode()) for name, _ in reads)
    connection.send_packed_command([request], check_health=False)
    replies = _Replies(connection._sock)
    try:
        for _, buffers in reads:
            yield replies.value_into(buffers)
    except TimeoutError as error:
        connection.disconnect()
        raise RedisTimeoutError("no answer in time") from error
    except (OSError, RedisConnectionError, InvalidResponse) as error:
        connection.disconnect()
        raise RedisConnectionError(f"a reply was cut short: {error}") from error
    except BaseException:  # whoever took the answers has stopped: the rest of them would be taken for other replies
        connection.disconnect()
        raise


class _Replies:
    """Replies in order, from a socket; `_ahead` is what came with a line and belongs behind it."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._ahead = b""

    def value_into(self, buffers: Buffers) -> int | None:
        """The next reply, a value: into the buffers, and what is too much nowhere."""
        line = self._line()
        if line.startswith(b"-"):
            text = line[1:].decode(errors="replace")
            if text.startswith(_NOT_A_VALUE):
                return 0
            raise RedisConnectionError(text)
        if not line.startswith(b"$"):
            raise InvalidResponse(f"not a value: {line[:40]!r}")
        size = int(line[1:])
        if size < 0:
            return None
        rest = size
        for buffer in buffers:
            wanted = min(rest, buffer.nbytes)
            self._fill(buffer[:wanted])
            rest -= wanted
        self._skip(rest)
        if self._line():
            raise InvalidResponse("a value without an end")
        return size

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _LINE_BYTES:
                raise InvalidResponse("a reply without an end")
            self._ahead += self._came(self._stream.recv(_AHEAD_BYTES))
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return line

    def _fill(self, buffer: memoryview) -> None:
        have = min(len(self._ahead), buffer.nbytes)
        buffer[:have], self._ahead = self._ahead[:have], self._ahead[have:]
        buffer = buffer[have:]
        while buffer:
            buffer = buffer[self._came(self._stream.recv_into(buffer)) :]

    def _skip(self, nbytes: int) -> None:
        nowhere = memoryview(bytearray(min(nbytes, _SKIPPED_AT_ONCE)))
        while nbytes:
            wanted = min(nbytes, nowhere.nbytes)
            self._fill(nowhere[:wanted])
            nbytes -= wanted

    @staticmethod
    def _came(what: _Came) -> _Came:
        if not what:
            raise OSError(errno.ECONNRESET, "the server closed the connection")
        return what


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)
