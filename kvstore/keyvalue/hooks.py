"""What a store of names and values has to do, one value at a time: the hooks of `KeyValueStore`.

Above them, what that class asks in the same words whoever answers: how an error of a device is an outcome of one value,
values that are of no block, and the tombstones of a purge.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvstore.types import PutOutcome
from kvstore.values import PURGED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from kvstore.url import TierURL

    Buffers: TypeAlias = Sequence[memoryview]

__all__ = ["KeyValueHooks", "Tombstones", "if_there"]

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR)
"""What the device says of one value that cannot be had: damage, and no reason to give up the others."""


class KeyValueHooks(ABC):
    """Override `connect`, `write`, `remove`, `names`, and `read` or `read_into`; the rest where that is cheaper.

    See `KeyValueStore` for what each may rely on, and must allow.
    """

    url: TierURL

    errors: ClassVar[tuple[type[Exception], ...]] = ()
    """What the client library raises when it cannot tell, beside `OSError`: such as `(sqlite3.Error,)`."""

    readonly: bool
    """The option `readonly`: `connect` creates nothing then, and neither `write` nor `remove` is called."""

    # The hooks, for one value each

    @abstractmethod
    def connect(self) -> None:
        """Open what `self.url` names; create it where there is none, unless `readonly`: `FileNotFoundError` then."""

    @abstractmethod
    def write(self, name: str, parts: Buffers) -> bool:
        """Store the concatenation of `parts` under `name`; False, and no change, where there is a value already.

        Atomic: the value is there whole or not at all, for every thread and process, whatever dies in between.
        `OSError` with ENOSPC or EDQUOT: there is no room.
        """

    def replace(self, name: str, parts: Buffers) -> bool:
        """Store the concatenation of `parts` in place of the value that is there; False, and no change, where there is
        none. Atomic as a `write` is; `OSError` where there is no room.

        Optional: without it, blocks get new data keys by a removal and a write each.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `replace`")

    def read(self, name: str, nbytes: int) -> bytes | memoryview | None:
        """The first `nbytes` bytes of the value; all of it where it is shorter; None where there is none.

        More than `nbytes` is no error; a scan, which asks for the first 128 of each block, is slower for it. A value
        that is empty is `b""`, not None: somebody damaged it, and it has to go before another can be written.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `read` nor `read_into`: override one of them")

    def read_into(self, name: str, buffers: Buffers) -> int | None:
        """Fill `buffers`, one after another, from the start of the value; how many bytes came, None for no value.

        For devices that write into the caller's memory (`os.readv`): saves the copy that `read` makes. A value that is
        shorter leaves the rest of the buffers as it is.
        """
        value = self.read(name, sum(map(len, buffers)))
        if value is None:
            return None
        rest = memoryview(value)
        for buffer in buffers:
            size = min(len(buffer), len(rest))
            buffer[:size], rest = rest[:size], rest[size:]
        return len(value)

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove the value; whether there was one. Nobody reads it any more when this returns."""

    @abstractmethod
    def names(self, prefix: str) -> Iterable[str]:
        """Every name that starts with `prefix`, in any order; others, and some of them twice, do no harm."""

    def exists(self, name: str) -> bool:
        """Whether there is a value. Override it where that is cheaper than to read one byte."""
        return self.read_checked(name, [memoryview(bytearray(1))]) is not None

    def disconnect(self) -> None:  # noqa: B027 - nothing to let go of is usual
        """Let go of what `connect` opened. Called once, when no hook is at work."""

    # The hooks for a batch: override those that the client can do in one round trip

    def write_many(self, values: Iterable[tuple[str, Buffers]]) -> Iterable[PutOutcome]:
        """`write` of each name and its parts: one outcome for each, in order."""
        return [self.write_checked(name, parts) for name, parts in values]

    def read_many_into(self, reads: Iterable[tuple[str, Buffers]]) -> Iterable[int | None]:
        """`read_into` of each name and its buffers: one answer for each, in order."""
        for name, buffers in reads:
            yield self.read_checked(name, buffers)

    def remove_many(self, names: Iterable[str]) -> Iterable[bool]:
        """`remove` of each name: one answer for each, in order; a name that comes twice is there once."""
        return [bool(if_there(self.remove, name)) for name in names]

    def exist_many(self, names: Iterable[str]) -> Iterable[bool]:
        """`exists` of each name: one answer for each, in order."""
        return [bool(if_there(self.exists, name)) for name in names]

    # Asked through the hooks

    def read_checked(self, name: str, buffers: Buffers) -> int | None:
        try:
            return if_there(self.read_into, name, buffers)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            return 0

    def write_checked(self, name: str, parts: Buffers) -> PutOutcome:
        try:
            return PutOutcome.STORED if self.write(name, parts) else PutOutcome.EXISTS
        except FileExistsError:
            return PutOutcome.EXISTS
        except (ConnectionError, TimeoutError):  # nor will it take the next one: let the caller know at once
            raise
        except OSError as error:
            return PutOutcome.FULL if error.errno in FULL else PutOutcome.FAILED

    def discard(self, name: str) -> None:
        """Remove what is damaged; where that fails it is found damaged again."""
        if not self.readonly:
            with suppress(OSError, *self.errors):
                self.remove(name)

    def all_names(self, prefix: str) -> list[str]:
        found = if_there(lambda: list(self.names(prefix)))
        return [name for name in dict.fromkeys(found or ()) if name.startswith(prefix)]

    def read_value(self, name: str) -> bytes | None:
        """All of a value that is none of a block; None where there is none."""
        size = 1 << 14
        while (count := self.read_checked(name, [memoryview(text := bytearray(size))])) is not None and count >= size:
            size *= 4
        return None if count is None else bytes(text[:count])

    def write_value(self, name: str, value: bytes) -> None:
        """Store a value that is none of a block, unless one is there. Raises OSError where there is no room for it."""
        outcome = self.write_checked(name, [memoryview(value)])
        if not outcome.present:
            raise OSError(errno.ENOSPC, f"the store refuses it: {outcome.value}", name)


class Tombstones:
    """The documents of the graveyard, as values; and one value that says that there may be some."""

    def __init__(self, store: KeyValueHooks) -> None:
        self._store = store

    def names(self) -> list[str]:
        if not if_there(self._store.exists, PURGED):
            return []
        found = if_there(lambda: list(self._store.names(PURGED)))
        return [name.removeprefix(PURGED) for name in dict.fromkeys(found or ()) if name.startswith(PURGED)]

    def read(self, name: str) -> bytes | None:
        return self._store.read_value(PURGED + name)

    def write(self, name: str, text: bytes) -> None:
        for one, value in ((PURGED + name, text), (PURGED, b"0")):
            self._store.write_value(one, value)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            if_there(self._store.remove, PURGED + name)


def if_there(hook: Callable[..., T], *args: object) -> T | None:
    """What the hook answers; None where it finds that there is nothing."""
    try:
        return hook(*args)
    except FileNotFoundError:
        return None
