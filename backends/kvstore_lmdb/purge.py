"""The end of a purge: what deleted blocks left on free pages is overwritten, and what cannot be is said."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.environment import filesystem_of
from kvstore.errors import StoreDamagedError
from kvstore.lmdb_free import Wiped, overwrite_free_pages, ripen
from kvstore.residues import beneath
from kvstore.types import Residue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_lmdb.opening import Tier

__all__ = ["finish_purge"]

PATIENCE_S = 5.0
"""How long to wait for readers to end that still see what was removed."""


def finish_purge(tier: Tier, *, overwrite: bool, small: bool, advance: Callable[[int], object]) -> list[Residue]:
    """Overwrite every free page of the data file; what is left. `small`: blocks were purged that fit one page."""
    tier.environment.sync()
    path = tier.directory / "data.mdb"
    if not overwrite:
        return [Residue("removed blocks on free pages of data.mdb", remedy="purge again, with overwriting"), _records()]
    residues = beneath(filesystem_of(tier.directory), path.stat().st_size)
    if small:
        residues.insert(0, _beside_others())
    deadline = time.monotonic() + PATIENCE_S
    freed_until = tier.environment.last_transaction()
    wiped = Wiped()
    try:
        while True:
            ripen(tier.environment)
            overwrite_free_pages(tier.environment, advance, freed_until=freed_until, wiped=wiped)
            if not wiped.held or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    except StoreDamagedError as error:
        return [Residue(f"removed blocks on free pages of data.mdb, which were left alone: {error}"), *residues]
    if wiped.held:
        what = "removed blocks on pages of data.mdb that a reader still sees: a process that was stopped in a read"
        residues.insert(0, Residue(what, wiped.held, "end that process, and purge again"))
    return [*residues, _records()]


def _beside_others() -> Residue:
    # LMDB keeps what is smaller than half a page among other entries; and the memory in which it made a page, up to one
    # that a value filled, it takes for the next without clearing what that leaves unused.
    return Residue(
        "bytes of removed blocks of less than 4 KB beside others: in unused parts of pages in use",
        None,
        "purge it with --all, close it everywhere and remove its directory; or have the tier encrypted",
    )


def _records() -> Residue:
    return Residue(
        "digests, labels and tenants of removed blocks in the catalogue, and digests in its tombstones: no bytes of"
        " blocks; tombstones are removed after they have ended"
    )
