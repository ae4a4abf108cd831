"""What opening a tier for a benchmark made, and taking away exactly that: the end of `kvstore.bench.tier`.

The location may be a mount point with `lost+found` in it, and another process may have opened the tier meanwhile. So
only names that appeared with the opening are removed, and only while nobody else has the tier open: a local backend's
presence locks tell, and while they are held nobody can open it.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import DATABASES, Catalog
from kvstore.environment import Environment
from kvstore.errors import StoreNotFoundError
from kvstore.presence import Presence, is_presence_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["Footprint"]

_RECORDS = ("lost+found", ".kvstore", "data.mdb", "lock.mdb")
"""What may lie in a place where no block is: a file system's own, and what a tier keeps beside its blocks."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What stood at `path` before a tier was opened there: `before`, and which `folders`, outermost first, did not."""

    path: Path
    before: frozenset[str]
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, path: Path) -> Footprint:
        """Before the opening."""
        folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        return cls(path, frozenset(_names(path)), tuple(reversed(folders)))

    @property
    def strangers(self) -> list[str]:
        """Names that are neither a file system's own nor a tier's records: blocks without a catalogue, for one."""
        return sorted(name for name in self.before if name not in _RECORDS and not is_presence_file(name))

    def made(self) -> frozenset[str]:
        """What the opening made in `path`. Directly after it."""
        return frozenset(_names(self.path)) - self.before

    def bearing(self, name: str) -> frozenset[str]:
        """What came to be in `path` since then and has `name` in its own name."""
        return frozenset(found for found in _names(self.path) if name in found) - self.before

    def remove(self, names: Iterable[str], mode: int) -> str | None:
        """Remove `names` from `path`, and the folders that were made; why not, if others use what is there.

        The tier must be closed here. `mode`: its option, for lock files.
        """
        where = next((place for place in (self.path / ".kvstore", self.path) if (place / "users").exists()), None)
        if where is None:  # no lock tells who else is here; folders that hold anything of theirs stay
            self._take_away(names)
        elif reason := _while_alone(where, mode, lambda: self._take_away(names)):
            return reason
        with suppress(OSError):  # not empty: somebody else's
            for folder in reversed(self.folders):
                folder.rmdir()
        return None

    def _take_away(self, names: Iterable[str]) -> None:
        for path in (self.path / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class _Removed(Exception):  # noqa: N818 - ends an opening whose files are gone
    pass


def _while_alone(where: Path, mode: int, remove: Callable[[], None]) -> str | None:
    """Call `remove` with nobody in the tier whose lock files are in `where`, and no block in it; else say why not."""
    with suppress(_Removed):
        with Presence.opening(where, mode=mode) as presence:
            reason = _in_use(where) if presence.alone else "another process has it open"
            if reason is None:
                remove()
                raise _Removed
        with presence.closing():
            pass
        return reason
    return None


def _in_use(where: Path) -> str | None:
    catalogue = where / "catalogue" if where.name == ".kvstore" else where
    try:
        environment = Environment.open(catalogue, DATABASES, readonly=True)
    except StoreNotFoundError:
        return "its catalogue was removed meanwhile"
    try:
        with Catalog(environment).read() as snapshot:
            blocks = snapshot.totals().blocks
    finally:
        environment.close()
    return f"another process stored {blocks} blocks there" if blocks else None


def _names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()] if path.is_dir() else []
