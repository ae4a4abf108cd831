"""`sqlite:///path`: one row per block. What a stranger writes for a database; it passes the whole suite."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from kvstore import Capabilities
from kvstore.keyvalue import KeyValueStore
from kvstore.url import local_path

if TYPE_CHECKING:
    from collections.abc import Sequence


class SQLiteStore(KeyValueStore):
    capabilities = Capabilities(persistent=True, shared=True, can_hang=False, io="buffered")
    errors = (sqlite3.Error,)

    def connect(self) -> None:
        path = local_path(self.url)
        if self.readonly:
            path.stat()
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        uri = path.as_uri() + ("?mode=ro" if self.readonly else "")
        self.db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
        if not self.readonly:
            self.db.execute("PRAGMA journal_mode = WAL").fetchall()
            self.db.execute("CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def write(self, name: str, parts: Sequence[memoryview]) -> bool:
        return self.db.execute("INSERT OR IGNORE INTO kv VALUES (?, ?)", (name, b"".join(parts))).rowcount == 1

    def replace(self, name: str, parts: Sequence[memoryview]) -> bool:
        return self.db.execute("UPDATE kv SET value = ? WHERE name = ?", (b"".join(parts), name)).rowcount == 1

    def read(self, name: str, nbytes: int) -> bytes | None:
        # Of an empty value `substr` makes NULL.
        row = self.db.execute("SELECT ifnull(substr(value, 1, ?), x'') FROM kv WHERE name = ?", (nbytes, name))
        return next((value for (value,) in row), None)

    def remove(self, name: str) -> bool:
        return self.db.execute("DELETE FROM kv WHERE name = ?", (name,)).rowcount == 1

    def names(self, prefix: str) -> list[str]:
        return [name for (name,) in self.db.execute("SELECT name FROM kv WHERE name GLOB ?", (prefix + "*",))]

    def disconnect(self) -> None:
        self.db.close()
