"""The archives that a manager begins with, on their way into its first tier; nothing is loaded where there are none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.errors import ConfigurationError
from kvstore.tiering.secondary import SecondaryTier
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from kvstore.abc import BlockStore
    from kvstore.archive.warming import Warming
    from kvstore.namespace import Namespace

__all__ = ["warming_of"]


def warming_of(
    tiers: Sequence[str | Mapping[str, Any] | TierURL | BlockStore | SecondaryTier],
    namespace: Namespace,
    archives: Sequence[str | Mapping[str, Any] | TierURL],
) -> Callable[[], Warming | None]:
    """What begins to restore `archives` into the first of `tiers` when it is called; None comes of it without archives.

    Raises a `ConfigurationError` for a text that is no URL, and where the first tier is a `SecondaryTier`, which keeps
    its store to itself.
    """
    if not archives:
        return lambda: None
    if not tiers or isinstance(tiers[0], SecondaryTier):
        raise ConfigurationError("archives are restored into the first tier: give it as a URL or as an open store")
    from kvstore.archive.warming import Warming

    return partial(Warming, tiers[0], namespace, [TierURL.parse(url) for url in archives])
