"""Which of the processes that share an object store sweeps it: an election by objects that are put where nothing is.

    <root>/.sweep/000000000007     {"owner", "host", "interval", "renewed", "swept", "released"}

The highest number is the lease. Who finds none, a released one, or one that was not renewed for three of its intervals,
puts the next number; of several who try one succeeds. Its holder renews it by writing it again, and takes older ones
away. Nothing depends on clocks that agree, or on a store that refuses to overwrite: two who sweep do no harm, removals
can be done twice.
"""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.objects.faults import Kind, RequestFailed
from kvstore.retention import now_ns

if TYPE_CHECKING:
    from kvstore.objects.client import ObjectClient

__all__ = ["FOLDER", "Lease", "Standing", "standing"]

FOLDER = ".sweep"
MISSED = 3
"""Intervals without a renewal, after which a lease is nobody's."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A lease as it is stored. Times are seconds since the epoch, by its holder's clock."""

    number: int
    owner: str
    host: str
    interval: float
    renewed: float
    swept: float = 0.0
    released: bool = False

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{FOLDER}/{self.number:012}"

    def is_free(self, now: float) -> bool:
        """Whether somebody else may sweep. One that was renewed in the far future is nobody's, either."""
        return self.released or abs(now - self.renewed) > MISSED * self.interval

    def packed(self) -> bytes:
        """The object's bytes."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "number"}).encode()

    @classmethod
    def unpacked(cls, number: int, data: bytes) -> Standing:
        """The lease that `packed` made `data` of; of anything else one that is free."""
        try:
            facts = json.loads(data)
            return cls(
                number, str(facts["owner"]), str(facts["host"]), float(facts["interval"]), float(facts["renewed"]),
                float(facts["swept"]), facts["released"] is True,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            return cls(number, "", "", 0.0, 0.0, released=True)


def standing(client: ObjectClient) -> Standing | None:
    """The lease in force, None where nobody ever swept."""
    number = max(_numbers(client), default=0)
    if not number:
        return None
    data = client.get(f"{FOLDER}/{number:012}")
    return None if data is None else Standing.unpacked(number, bytes(data))


def _numbers(client: ObjectClient) -> list[int]:
    names = [entry.path.rpartition("/")[2] for page in client.list(FOLDER) for entry in page]
    return [int(name) for name in names if len(name) == 12 and name.isdecimal()]


class Lease:
    """One candidate. Not thread-safe. Every method raises `RequestFailed`."""

    def __init__(self, client: ObjectClient, interval: float) -> None:
        self._client = client
        self._interval = interval
        self._owner = secrets.token_hex(8)
        self.held: Standing | None = None

    def take(self) -> bool:
        """Whether the lease is ours, or is now."""
        now, current = now_ns() / 1e9, standing(self._client)
        if self.held is not None:
            if current is not None and current.owner == self._owner:
                return True
            self.held = None  # somebody took us for dead
        if current is not None and not current.is_free(now):
            return False
        number, swept = (0, 0.0) if current is None else (current.number, current.swept)
        swept = swept if swept <= now else 0.0
        wanted = Standing(number + 1, self._owner, socket.gethostname(), self._interval, now, swept)
        if not self._put_new(wanted):
            return False
        self.held = wanted
        for old in _numbers(self._client):
            if old < wanted.number:
                self._client.delete(f"{FOLDER}/{old:012}")
        return True

    def _put_new(self, wanted: Standing) -> bool:
        data = [np.frombuffer(wanted.packed(), np.uint8)]
        try:
            stored = self._client.put(wanted.path, data, new=True)
        except RequestFailed as failed:
            if failed.kind is not Kind.UNSUPPORTED:
                raise
            stored = self._client.put(wanted.path, data, new=False)
        # A store that overwrites says that it stored to all of them: the last one has it.
        back = self._client.get(wanted.path) if stored else None
        return back is not None and Standing.unpacked(wanted.number, bytes(back)).owner == self._owner

    def renew(self, *, swept: bool = False) -> bool:
        """Say that we are alive and, if so, that a sweep has ended; False if the lease was lost meanwhile."""
        if self.held is None or not self.take():
            return False
        now, held = now_ns() / 1e9, self.held
        self._write(replace(held, renewed=now, swept=now if swept else held.swept))
        return True

    def release(self) -> None:
        """Let others have it, if it is ours. Nothing is raised: it runs out by itself."""
        if self.held is not None:
            with suppress(RequestFailed):
                self._write(replace(self.held, released=True))
            self.held = None

    def _write(self, renewed: Standing) -> None:
        self._client.put(renewed.path, [np.frombuffer(renewed.packed(), np.uint8)], new=False)
        self.held = renewed
