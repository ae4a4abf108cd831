"""What can be wrong with an archive, in the tree of `kvstore.errors`."""

from __future__ import annotations

from kvstore.errors import (
    ConfigurationError,
    StoreAccessError,
    StoreDamagedError,
    StoreNotFoundError,
    StoreOpenError,
    TierUnavailable,
)

__all__ = [
    "ArchiveDamagedError",
    "ArchiveExistsError",
    "ArchiveFullError",
    "ArchiveHeldError",
    "NamespaceMismatchError",
    "NoArchiveError",
    "SelectionError",
]


class NoArchiveError(StoreNotFoundError):
    """There is no archive at the URL; one whose creation has not ended is none."""


class ArchiveExistsError(StoreOpenError):
    """An archive of other blocks, or something that is no archive, stands where one is to be made."""


class ArchiveFullError(TierUnavailable):
    """No room is left where an archive is made. What is written stays, and the same call goes on with it."""


class ArchiveHeldError(StoreAccessError):
    """The archive is to be kept until a moment that has not come."""


class ArchiveDamagedError(StoreDamagedError):
    """What describes an archive was changed: which blocks it holds cannot be told any more."""


class NamespaceMismatchError(ConfigurationError):
    """The blocks of the archive are of no use in the namespace; the message names each field that differs."""


class SelectionError(ConfigurationError):
    """The blocks that were asked for are not one whole chain of blocks in the tier."""
