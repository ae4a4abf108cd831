"""Blocks into a tier of objects: a batch's documents and blocks, put side by side; blocks sealed anew in their places.

For `store`, within one verb, with blocks that were checked. What becomes of one block is `block`'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.errors import StoreOpenError
from kvstore.objects.faults import RequestFailed
from kvstore.objects.side import side_by_side
from kvstore.types import PutOutcome, ResealOutcome
from kvstore_zarr.objects.tier import TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing import Sealer
    from kvstore.types import BlockKey, BlockWrite
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.tier import ObjectTier

__all__ = ["put_blocks", "reseal_blocks"]


def put_blocks(
    tier: ObjectTier, tree: NamespaceTree, blocks: Sequence[tuple[BlockWrite, NDArray[np.uint8]]]
) -> list[PutOutcome]:
    """Put each block, whose bytes are given with it, unless it is there or was purged a short while ago."""
    first: dict[BlockKey, tuple[BlockWrite, NDArray[np.uint8]]] = {}
    for block, data in blocks:
        first.setdefault(block.key, (block, data))
    outcomes = dict.fromkeys(tier.refused(tree, first), PutOutcome.REFUSED)
    wanted = {key: one for key, one in first.items() if key not in outcomes}
    documents, refused = _prepare(tier, tree, wanted)
    if refused is not None:
        return [refused] * len(blocks)
    data_keys = None if tier.sealer is None else tier.sealer.writing({block.tenant for block, _ in wanted.values()})
    # Beside the blocks, not before them: kvstore finds a block without the documents of its folder.
    work = [
        *(partial(tier.one.write_document, path, text) for path, text in documents.items()),
        *(partial(tier.one.put, tree, data_keys, *one) for one in wanted.values()),
    ]
    results = side_by_side(lambda put: put(), work, TRANSFERS)
    outcomes.update(zip(wanted, results[len(documents) :], strict=True))
    return [
        PutOutcome.EXISTS if first[block.key][0] is not block and outcomes[block.key].present else outcomes[block.key]
        for block, _ in blocks
    ]


def _prepare(
    tier: ObjectTier, tree: NamespaceTree, keys: Iterable[BlockKey]
) -> tuple[dict[str, bytes], PutOutcome | None]:
    """The documents that want to be written beside the blocks; or what becomes of the blocks without a manifest."""
    try:
        return tier.documents.prepare(tree, keys), None
    except RequestFailed as failed:
        refused = tier.one.refused(failed)
        if refused is None:
            raise
        return {}, refused
    except StoreOpenError as error:
        tier.trees.set_aside(tree.namespace.name, error)
        return {}, PutOutcome.FAILED


def reseal_blocks(
    tier: ObjectTier, sealer: Sealer, tree: NamespaceTree, blocks: Sequence[tuple[BlockWrite, NDArray[np.uint8]]]
) -> list[ResealOutcome]:
    """Write each block, whose bytes are given with it, over the one that is there.

    Tombstones are looked at after that: whoever purged one meanwhile had buried it before, so what was written behind
    a removal is found, and goes again.
    """
    data_keys = sealer.writing(block.tenant for block, _ in blocks)
    outcomes = side_by_side(lambda one: tier.one.reseal(tree, data_keys, *one), blocks, TRANSFERS)
    buried = tier.graves.refused([tree.block(block.key) for block, _ in blocks], anew=True)
    tier.remove(sorted(buried))
    return [
        ResealOutcome.GONE if tree.block(block.key) in buried else outcome
        for (block, _), outcome in zip(blocks, outcomes, strict=True)
    ]
