"""One purge over any number of tiers: each is opened, its keys are destroyed, its blocks removed, and told of."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvstore.abc import REFUSE_S
from kvstore.errors import KVStoreError
from kvstore.purging.datakeys import Keys, beside_keys, data_keys_of, destroy_keys
from kvstore.purging.receipt import Receipt, TierReceipt
from kvstore.purging.removing import TierPurge
from kvstore.registry import open_store
from kvstore.retention import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.abc import BlockStore
    from kvstore.purging.request import Request
    from kvstore.url import TierURL

__all__ = ["purge"]


def purge(
    urls: Iterable[TierURL | str],
    asked: Request,
    *,
    dry_run: bool,
    refuse_s: float = REFUSE_S,
    overwrite: bool = True,
    keys: Keys = Keys.AUTO,
    advance: Callable[[int], object] = lambda _: None,
) -> Receipt:
    """Remove blocks from tiers for good, or with `dry_run` say what would go.

    Each tier is opened for itself and closed again. For `refuse_s` seconds the removed blocks are not stored again.
    `overwrite`: what removed blocks leave on the device is written over where that can be done. `keys`: whether the
    data keys that they were encrypted with are destroyed. `advance` is called with each number of blocks that were
    dealt with. Raises nothing for a tier that fails: see `TierReceipt.failed`; `ValueError` where keys would be
    destroyed of more than what goes.
    """
    if keys is Keys.DESTROY and not asked.is_whole:
        raise ValueError("data keys are destroyed with everything, or with everything of a tenant: more is kept here")
    receipt = Receipt(asked, dry_run, now_ns() / 1e9)
    for url in urls:
        tier = TierReceipt(str(url), now_ns() / 1e9)
        receipt.tiers.append(tier)
        began = time.monotonic()
        try:
            with open_store(url, readonly=True):  # nothing is made where no tier is
                pass
            with open_store(url, readonly=True) if dry_run else open_store(url) as store:
                of_tenant = _keys_of_tenant(url, store, asked)
                one = TierPurge(store, asked, tier, refuse_s, overwrite, advance, of_tenant)
                if dry_run:
                    one.survey()
                else:
                    _run(one, url, keys)
        except (KVStoreError, ValueError) as error:
            tier.failed.append(str(error))
        finally:
            tier.seconds = time.monotonic() - began
    receipt.ended = now_ns() / 1e9
    return receipt


def _keys_of_tenant(url: TierURL | str, store: BlockStore, asked: Request) -> Callable[[], frozenset[bytes]]:
    if store.capabilities.sealed and asked.tenant:
        return partial(data_keys_of, url, asked.tenant)
    return frozenset[bytes]


def _run(one: TierPurge, url: TierURL | str, keys: Keys) -> None:
    """The keys first: what is interrupted then has removed nothing, and nobody can read it all the same."""
    can, tier = one.store.capabilities, one.receipt
    if can.sealed:
        tier.erasable = destroy_keys(url, one.asked, keys)
    one.run()
    if can.sealed:
        tier.remains += beside_keys(tier, one.asked, marks=can.marks)
