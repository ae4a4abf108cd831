"""Archives: a named, self-describing copy of one shared prefix on any URL, which stock zarr and xarray read, too.

    tier ──create──► archive (few large objects, a manifest last) ──restore, warm──► any tier of the same namespace

A prefix that many prompts share is computed once; archived, it outlives the tier, and every new machine begins with
it. An archive is a zarr group of its own, complete or not there at all, and every byte of it is checked.
"""

from __future__ import annotations

from kvstore.archive.creating import create
from kvstore.archive.document import ArchiveInfo
from kvstore.archive.errors import (
    ArchiveDamagedError,
    ArchiveExistsError,
    ArchiveFullError,
    ArchiveHeldError,
    NamespaceMismatchError,
    NoArchiveError,
    SelectionError,
)
from kvstore.archive.matching import Difference, check_namespace, differences
from kvstore.archive.reading import Archive, Verification, catalogue, open_archive
from kvstore.archive.removing import remove
from kvstore.archive.restoring import RestoreReport, restore, warm
from kvstore.archive.selecting import Selection, select
from kvstore.archive.warming import Warming

__all__ = [
    "Archive",
    "ArchiveDamagedError",
    "ArchiveExistsError",
    "ArchiveFullError",
    "ArchiveHeldError",
    "ArchiveInfo",
    "Difference",
    "NamespaceMismatchError",
    "NoArchiveError",
    "RestoreReport",
    "Selection",
    "SelectionError",
    "Verification",
    "Warming",
    "catalogue",
    "check_namespace",
    "create",
    "differences",
    "open_archive",
    "remove",
    "restore",
    "select",
    "warm",
]
