"""Opening a tier of objects: what stands there, whether it is ours, how it is sealed, what it can do here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.abc import Capabilities
from kvstore.errors import InvalidOptionError, NotAStoreError
from kvstore.graveyard import Graveyard
from kvstore.objects.opening import opened
from kvstore.objects.settings import LOOKUP_TTL, Place
from kvstore.retention import Retention
from kvstore.sealing import PLAIN, check_options, open_sealer
from kvstore.url import READONLY
from kvstore_zarr.objects.ages import Ages
from kvstore_zarr.objects.block import OneBlock
from kvstore_zarr.objects.documents import Documents
from kvstore_zarr.objects.lookup import Lookup
from kvstore_zarr.objects.purge import FOLDER, TombObjects, seen_s
from kvstore_zarr.objects.remains import retention_notes, wanted_capacity
from kvstore_zarr.objects.tier import ObjectTier
from kvstore_zarr.objects.trees import Trees
from kvstore_zarr.objects.use import AtWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL

__all__ = ["capabilities_of", "open_tier"]

BATCH_BYTES = 1 << 20
"""A block of usual size is a request, and the tier's threads make the requests side by side."""
ARCHIVE, ARCHIVED = "kvstore-archive.json", "g0"
"""An archive's manifest, and the folder of its first blocks."""


def open_tier(url: TierURL) -> ObjectTier:
    """The tier at `url`; nothing is written before the first block. Raises a `StoreOpenError` where it is none of ours
    or cannot be reached, and a `ConfigurationError` for options that do not go together.
    """
    place = Place.of(url)
    if place.is_readonly and url.raw_options.get(READONLY.name) is not None and not url.option(READONLY):
        raise InvalidOptionError(f"{url}: over {place.scheme}:// nothing can be written: leave out readonly")
    readonly = url.option(READONLY) or place.is_readonly
    capacity = wanted_capacity(url)
    check_options(url)
    client, folders = opened(url, place)
    documents, ages, at_work = Documents(url, client), Ages(Retention.of(url)), AtWork(url)
    lookup, trees = Lookup(client, url.option(LOOKUP_TTL), ages, at_work), Trees(url, client, documents)
    try:
        _check_no_archive(url, client, folders)
        found = trees.found(folders, must_be_some=readonly and not place.is_readonly)
        sealer = open_sealer(url, found, readonly=readonly)
    except BaseException:
        client.close()
        raise
    trees.seal = PLAIN if sealer is None else sealer.id
    return ObjectTier(
        client=client,
        at_work=at_work,
        documents=documents,
        trees=trees,
        ages=ages,
        lookup=lookup,
        one=OneBlock(client, documents, lookup, ages, url, readonly=readonly),
        # What is listed at the opening tells that there are none yet; what is read by HTTP has none at all.
        graves=Graveyard(TombObjects(client), seen_s(url.option(LOOKUP_TTL)), looked=FOLDER not in folders),
        sealer=sealer,
        capacity=capacity,
        readonly=readonly,
        may_be_purged=not place.is_readonly,
    )


def capabilities_of(tier: ObjectTier, url: TierURL) -> Capabilities:
    """What the tier that was opened at `url` can do."""
    in_memory = Place.of(url).scheme == "memory"
    return Capabilities(
        persistent=not in_memory,
        shared=not in_memory,
        can_hang=True,
        io="network",
        batch_bytes=BATCH_BYTES,
        notes=(
            *(f"client: {tier.client.name}", *tier.client.notes, *tier.trees.aside.values()),
            *retention_notes(url, tier.readonly),
        ),
        capacity_is_exact=False,
        sealed=tier.sealer is not None,
        tombstones=not tier.readonly and not tier.client.keeps_copies,
        tombstones_seen_s=tier.graves.seen_s,
    )


def _check_no_archive(url: TierURL, client: ObjectClient, folders: Sequence[str]) -> None:
    """Raise where an archive stands, of which a tier would be a part. Asked only where its folders are."""
    if ARCHIVED in folders and client.exists(ARCHIVE):
        raise NotAStoreError(
            f"{url}: an archive stands there: choose a place beside it (kvstore archive restore --to …)"
        )
