"""What tests of `KeyValueStore` share: a backend of hooks over a dictionary, and its name for a block."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from kvstore import Capabilities, GetOutcome, PutOutcome
from kvstore.keyvalue import KeyValueStore
from kvstore.testing.supply import SPACE, key
from kvstore.url import READONLY, TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS, FULL, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, PutOutcome.FAILED

ONE = name_of(SPACE, key(1))
MANIFEST = f"manifest-{SPACE.name}"


class DictStore(KeyValueStore):
    """Values in a dictionary, for one process; `fault` is raised by the hooks that it names."""

    capabilities = Capabilities(persistent=False, shared=False, can_hang=False, io="memory")
    errors = (sqlite3.Error,)

    def __init__(self, url: TierURL, values: dict[str, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.faults: dict[str, Exception] = {}
        self.calls: list[str] = []
        super().__init__(url)

    def called(self, hook: str, name: str) -> None:
        self.calls.append(hook)
        fault = self.faults.get(hook) or self.faults.get(f"{hook} {name}")
        if fault is not None:
            raise fault

    def connect(self) -> None:
        self.called("connect", "")

    def write(self, name: str, parts: Sequence[memoryview]) -> bool:
        self.called("write", name)
        return self.values.setdefault(name, value := b"".join(parts)) is value

    def read(self, name: str, nbytes: int) -> bytes | None:
        self.called("read", name)
        value = self.values.get(name)
        return None if value is None else value[:nbytes]

    def remove(self, name: str) -> bool:
        self.called("remove", name)
        return self.values.pop(name, None) is not None

    def names(self, prefix: str) -> Iterable[str]:
        self.called("names", prefix)
        return [name for name in self.values if name.startswith(prefix)]

    def disconnect(self) -> None:
        self.called("disconnect", "")


def opened(values: dict[str, bytes] | None = None, **options: object) -> DictStore:
    return DictStore(TierURL.parse("dict://x", **options).validated([READONLY]), values)
