"""What can still be trusted of an `lmdb://` tier whose pages are damaged, brought into a new one in its place.

A block is taken over if sound pages lead to it and it passes its checks; after a power loss, when a page may be an old
one, only if the catalogue has it too: two trees that agree. What lies in the file and nothing leads to may have been
deleted, and is not looked for. Tombstones come along, and the blocks under them do not; no block gets younger. The new
tier is made beside the old one, by what puts are made with, and takes its place.
Of a sealed tier nothing is saved: the next opening starts it anew. How many blocks
it costs is said, where that is known.
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstore.errors import InvalidBlockError, StoreAccessError, StoreFullError
from kvstore.lmdb_files import damage, readable
from kvstore.lmdb_pages import PageError
from kvstore.namespace import FINGERPRINT_BYTES, Namespace
from kvstore.presence import Presence, State, explained, mode_of
from kvstore.records import Entry, Totals
from kvstore.registry import backend_class
from kvstore.repairing import Repaired
from kvstore.sealing import ENCRYPTION
from kvstore.tombs import tombs_in
from kvstore.types import BlockWrite, PutOutcome
from kvstore.url import CAPACITY, MODE, TierURL, local_path
from kvstore.versions import check_version
from kvstore_lmdb.entry import HEADER_BYTES, identified, is_intact, place_of, stored_bytes
from kvstore_lmdb.opening import BLOCKS, open_tier
from kvstore_lmdb.put import Puts, chunks
from kvstore_lmdb.seat import STORES, Seat
from kvstore_lmdb.space import SMALLEST_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from kvstore.lmdb_files import Entries

__all__ = ["salvage"]

_Block: TypeAlias = "tuple[Namespace, Entry, bytes]"

_SUFFIX = ".salvaged"


def salvage(url: TierURL) -> list[Repaired]:
    """Put a new tier with what can be trusted in place of a damaged one, which nobody else may have open meanwhile.

    Wants room for a second copy of what is saved. Raises a `StoreOpenError`; then everything is as it was.
    """
    directory = local_path(url)
    mode = url.option(MODE) if MODE.name in url.raw_options else mode_of(directory / "gate")
    repaired: list[Repaired] = []
    with explained(directory), Presence.opening(directory, mode=mode) as presence:
        if not presence.alone:
            raise StoreAccessError(f"{directory} is in use: close it everywhere before it is repaired")
        _remove_what_was_left(directory.resolve())
        if url.option(ENCRYPTION) is not None:
            if damage(directory, thorough=False, trees=True) is not None:
                repaired.append(_made_anew(0, _known(directory)))
        elif damage(directory, thorough=False, values=True) is not None:
            known = _known(directory)
            with _folder_beside(directory.resolve()) as beside:
                booked = presence.found not in (State.CLEAN, State.DIRTY)
                repaired.append(_made_anew(_save(directory, beside / "tier", mode, booked=booked), known))
                presence.mark(State.REBUILDING)
                (beside / "tier" / "data.mdb").replace(directory / "data.mdb")
                (directory / "lock.mdb").unlink(missing_ok=True)
    with presence.closing():
        return repaired


def _made_anew(saved: int, known: int | None) -> Repaired:
    lost = None if known is None else max(0, known - saved)
    return Repaired("blocks saved out of a damaged environment, which was made anew", saved, lost)


def _known(directory: Path) -> int | None:
    """How many blocks the tier had, as far as its damaged records say; None where they do not."""
    with suppress(struct.error, PageError, OSError), (directory / "data.mdb").open("rb") as file:
        table = readable(file.fileno())
        totals = table("info").get(b"totals")
        return None if totals is None else max(Totals.unpacked(totals()).blocks, len(table("meta")))
    return None


def _remove_what_was_left(directory: Path) -> None:
    """The copies that killed calls left beside the tier; under its gate. What is not certainly one of ours stays."""
    for left in directory.parent.glob(f".{glob.escape(directory.name)}.????????{_SUFFIX}"):
        with suppress(OSError):
            found = left.lstat()
            is_own_folder = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_own_folder and {path.name for path in left.iterdir()} <= {"tier"}:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _folder_beside(directory: Path) -> Generator[Path]:
    """A new folder that is nobody else's, on the same disk; it goes with whatever is in it."""
    with TemporaryDirectory(_SUFFIX, f".{directory.name}.", directory.parent, ignore_cleanup_errors=True) as path:
        if Path(path).stat().st_dev != directory.stat().st_dev:
            raise StoreAccessError(
                f"{directory} is where a disk is mounted, and what is saved is written beside it: move the tier into a"
                " folder of that disk, and repair it there"
            )
        yield Path(path)


def _save(directory: Path, beside: Path, mode: int, *, booked: bool) -> int:
    """Make the new tier at `beside`, synced; how many blocks it has."""
    with (directory / "data.mdb").open("rb") as file:
        table = readable(file.fileno())
        _check_format(directory, table("info").get(b"format"))
        found = _Found.read(table)
        options = {} if found.capacity is None else {CAPACITY.name: found.capacity}
        url = TierURL.parse(TierURL("lmdb", str(beside)), mode=f"{mode:04o}", **options)
        tier = open_tier(url.validated(backend_class(url).options))
        try:
            puts, alone = Puts(tier), Seat(STORES, needed=False)
            with tier.catalog.write() as change:
                change.tombs.bury_again(found.tombs)
            for space, batch in groupby(found.blocks(booked=booked), lambda block: block[0]):
                for some in chunks(batch, tier.space.chunk, lambda block: block[1].size):
                    entries, values = [entry for _, entry, _ in some], [value for _, _, value in some]
                    need = sum(entry.size for entry in entries)
                    outcomes = puts.publish(space, need, partial(_numbered, entries), values, alone)
                    _check_saved(directory, outcomes)
            tier.environment.sync()
            with tier.catalog.read() as snapshot:
                return snapshot.totals().blocks
        finally:
            with tier.presence.closing():
                tier.environment.close()


@dataclass(frozen=True, slots=True)
class _Found:
    """What the damaged tier still says: namespaces by fingerprint, entries of its catalogue by address, bytes by place,
    which addresses have a tombstone, and until when (ns since the epoch).
    """

    spaces: dict[bytes, Namespace]
    entries: dict[bytes, Entry]
    values: Entries
    tombs: dict[bytes, int]
    capacity: int | None
    is_sealed: bool

    @classmethod
    def read(cls, table: Callable[[str], Entries]) -> _Found:
        spaces = ((key, _namespace(key, load)) for key, load in table("namespaces").items())
        entries = ((key, _entry(key, load)) for key, load in table("meta").items())
        return cls(
            {key: space for key, space in spaces if space is not None},
            {key: entry for key, entry in entries if entry is not None},
            table(BLOCKS),
            tombs_in(table("tombs")),
            _capacity(table("info").get(b"totals")),
            b"seal" in table("info"),
        )

    def blocks(self, *, booked: bool) -> Iterator[_Block]:
        """Each block that passes its checks, as its entry and its value, those used longest ago first. `booked`: only
        those that the catalogue knows; of others it is known when they were stored.
        """
        unknown = Entry(b"", 0, 0, 0)
        leading = {place_of(entry.generation): entry for entry in self.entries.values()}
        for place in sorted(self.values, key=lambda place: leading.get(place, unknown).last_used):
            entry = leading.get(place)
            if self.is_sealed or (entry is None and booked):
                continue
            with suppress(PageError, OSError, InvalidBlockError, struct.error):
                value = self.values[place]()
                payload = np.frombuffer(value, np.uint8)[HEADER_BYTES:]
                address, created = identified(value) or (b"", 0)
                space = self.spaces.get(address[:FINGERPRINT_BYTES])
                if space is None or address in self.tombs or not is_intact(value[:HEADER_BYTES], payload, address):
                    continue
                if entry is None and address in self.entries:  # which leads elsewhere
                    continue
                if entry is not None and entry.address != address:
                    continue
                entry = replace(entry or Entry(address, 0, created, created), size=stored_bytes(payload.nbytes))
                space.check_write(BlockWrite(entry.key, payload.data))
                yield space, entry, value


def _check_saved(directory: Path, outcomes: Sequence[PutOutcome]) -> None:
    lost = [outcome for outcome in outcomes if not outcome.present]
    if lost:
        raise StoreFullError(
            f"{directory}: no room for a second copy of the blocks that can be saved ({lost[0].value}), on the disk or"
            " under the tier's capacity; nothing was changed: make room on the disk and repair it again, or remove this"
            " directory: it is a cache"
        )


def _numbered(entries: Sequence[Entry], first: int) -> list[Entry]:
    return [replace(entry, generation=number) for number, entry in enumerate(entries, first)]


def _namespace(fingerprint: bytes, load: Callable[[], bytes]) -> Namespace | None:
    with suppress(ValueError, PageError, OSError):
        space = Namespace.from_json(load())
        return space if space.fingerprint == fingerprint else None
    return None


def _entry(address: bytes, load: Callable[[], bytes]) -> Entry | None:
    with suppress(struct.error, ValueError, PageError, OSError):
        return Entry.unpacked(address, load())
    return None


def _check_format(directory: Path, load: Callable[[], bytes] | None) -> None:
    """What is of another version is not for us to save. Where it cannot be read, the blocks' headers say theirs."""
    said = b""
    with suppress(PageError, OSError):
        said = b"" if load is None else load()
    if said:
        check_version(int.from_bytes(said, "little"), str(directory), "remove this directory: it is a cache")


def _capacity(load: Callable[[], bytes] | None) -> int | None:
    with suppress(struct.error, PageError, OSError):
        capacity = None if load is None else Totals.unpacked(load()).capacity
        return capacity if capacity is None or capacity >= SMALLEST_CAPACITY else None
    return None
