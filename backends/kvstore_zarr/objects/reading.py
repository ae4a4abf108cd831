"""What of some blocks is in a tier of objects: whether they are, their bytes, what they are sealed with.

For `store`, within one verb, with keys and buffers that were checked. All blocks of a namespace: `scanning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.layout import as_bytes
from kvstore.objects.side import side_by_side
from kvstore.types import GetOutcome
from kvstore_zarr.objects.tier import TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.tier import ObjectTier

__all__ = ["are_there", "get_blocks", "ids_of_keys", "is_later"]


def are_there(tier: ObjectTier, tree: NamespaceTree, keys: Sequence[BlockKey]) -> list[bool]:
    """Whether each block is, or was lately."""
    refused = tier.refused(tree, keys)
    answers = iter(tier.lookup.present(tree, [key for key in keys if key not in refused]))
    return [key not in refused and next(answers) for key in keys]


def get_blocks(
    tier: ObjectTier, tree: NamespaceTree, reads: Sequence[tuple[BlockKey, NDArray[np.uint8]]]
) -> list[GetOutcome]:
    """Read each block into the buffer that is given with its key."""
    purged = tier.refused(tree, [key for key, _ in reads], looking=False)
    ring = None if tier.sealer is None else tier.sealer.reading()
    return side_by_side(
        lambda read: GetOutcome.MISS if read[0] in purged else tier.one.get(tree, ring, *read), reads, TRANSFERS
    )


def is_later(tier: ObjectTier, tree: NamespaceTree, keys: Sequence[BlockKey]) -> list[bool]:
    """Whether a later kvstore wrote what stands at each block's place."""
    return side_by_side(lambda key: tier.one.is_of_later_version(tree.block(key)), keys, TRANSFERS)


def ids_of_keys(tier: ObjectTier, tree: NamespaceTree, keys: Sequence[BlockKey]) -> list[bytes | None]:
    """Of the data keys that the blocks are sealed with, as their last bytes say; see `BlockStore.sealed_with`."""

    def id_of(key: BlockKey) -> bytes | None:
        frame = tree.frames[key.group]
        data = tier.client.get(tree.block(key), frame.whole)
        closing = as_bytes(b"" if data is None else data)
        facts = frame.facts(closing) if closing.nbytes == frame.closing else None
        return None if facts is None else facts.key_id or None

    return side_by_side(id_of, keys, TRANSFERS)
