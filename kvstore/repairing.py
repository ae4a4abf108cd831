"""What a tier's own records look like before anything relies on them, and what was put right in them.

For `kvstore verify`: `BlockStore.examine` looks at records without opening the tier, `BlockStore.salvage` and
`BlockStore.repair` put right what they can.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Examination", "Repaired", "examine_environment"]


@dataclass(frozen=True, slots=True)
class Examination:
    """What is wrong with a tier's records, each in a sentence. Not `looked`: it is in use, so it cannot be said."""

    problems: tuple[str, ...] = ()
    looked: bool = True


@dataclass(frozen=True, slots=True)
class Repaired:
    """One kind of thing that was put right, as it follows its number: `3 blocks whose file was gone taken out`."""

    what: str
    count: int
    lost: int | None = 0
    """Blocks that the tier had before and has no more; None: it cannot be said how many, it may be all."""


def examine_environment(users: Path, environment: Path) -> Examination:
    """Look at every page that LMDB goes by in `environment`, with plain reads, while nobody has the tier open.

    `users` is the directory of the tier's `Presence`. Others who want to open it wait meanwhile. Raises a
    `StoreOpenError` where this user may not look.
    """
    from kvstore.lmdb_files import damage  # not for who has no local tier
    from kvstore.presence import Presence, explained

    with explained(users):
        try:
            is_folder = stat.S_ISDIR(users.stat().st_mode)  # no `is_dir`: what may not be entered is no error to some
        except (FileNotFoundError, NotADirectoryError):
            is_folder = False
        if not is_folder:
            return Examination()
        with Presence.opening(users, readonly=True) as presence:
            looked = presence.alone
            problem = damage(environment, thorough=False, values=True) if looked else None
    with presence.closing():
        return Examination((problem,) if problem else (), looked)
