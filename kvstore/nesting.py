"""That a local tier is made in no other tier and in no archive: who removes the one would take the other along.

Asked where a tier is made, and where an archive is (`kvstore.archive`): a look at the folders above, and no walk.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.errors import ConfigurationError
from kvstore.namespace import is_namespace_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOOKED_AT", "OF_A_TIER", "check_in_none", "what_is_above"]

OF_A_TIER = b'"digest_words"'
"""What a namespace's document has, and no other."""
_TIERS = ((".kvstore/gate",), ("data.mdb", "gate"))
"""What stands in the folder of a tier of `file://`, and of `lmdb://`."""
LOOKED_AT = 4
"""Folders beside a place that may be namespaces, of which the documents are read."""
MOST_BESIDE = 1000
"""Names beside a place that are looked at for them."""


def check_in_none(path: Path, made: str) -> None:
    """Raise `ConfigurationError` where `path`, at which `made` is to be, is in the folder of a tier or an archive."""
    if found := what_is_above(path):
        what, folder = found
        raise ConfigurationError(
            f"{made} would stand in the folder of {what}, {folder}, and who removes the one would take the other along:"
            " choose a place beside it"
        )


def what_is_above(path: Path) -> tuple[str, Path] | None:
    """A tier or an archive in one of the folders above, as far as these tell; and which folder that is."""
    folders = path.resolve().parents
    for folder in folders:
        with suppress(OSError):  # this user may not look
            if (folder / "kvstore-archive.json").exists() or (folder / "kvstore-archive.draft.json").exists():
                return "an archive", folder
            if any(all((folder / name).exists() for name in names) for names in _TIERS):
                return "a tier", folder
            if _is_namespace(folder):
                return "a tier", folder.parent
    with suppress(OSError):
        beside = (one for one in islice(folders[0].iterdir(), MOST_BESIDE) if is_namespace_name(one.name))
        if any(map(_is_namespace, islice(beside, LOOKED_AT))):
            return "a tier", folders[0]
    return None


def _is_namespace(folder: Path) -> bool:
    if not is_namespace_name(folder.name):
        return False
    try:
        return OF_A_TIER in (folder / "zarr.json").read_bytes()
    except OSError:
        return False
