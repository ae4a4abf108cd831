"""Documents and catalogue of a `file://` tier put right, while it is in use: how `kvstore verify --repair` begins.

Of two that should say the same one is enough: a namespace's manifest stands in its `zarr.json` and in the catalogue,
where a block is and how large in its file and in its entry. Where a manifest is lost on both sides, its blocks stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import NewerFormatError, OlderFormatError, StoreOpenError
from kvstore.repairing import Repaired
from kvstore_zarr.metadata import read_document, read_namespace
from kvstore_zarr.reindex import reindex

if TYPE_CHECKING:
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["repair", "write_documents"]

UNREADABLE_FOR_S = 600.0
"""A file that is no whole block, and was not written to for so long, is no copy under way."""


def repair(tier: LocalTier) -> list[Repaired]:
    """Put right what can be; what that was."""
    documents = write_documents(tier)
    found = reindex(tier, unreadable_for_s=UNREADABLE_FOR_S)
    done = (
        Repaired("documents (zarr.json) that were missing or damaged written anew", documents),
        Repaired("blocks whose file was gone taken out of the catalogue", found.removed),
        Repaired("blocks that the catalogue did not know added to it", found.added),
        Repaired("files removed that had the name of a block and were none", found.erased),
    )
    return [one for one in done if one.count]


def write_documents(tier: LocalTier) -> int:
    """Write every document that is not what it must be; how many. What is of another format is left."""
    with tier.catalog.read() as snapshot:
        namespaces = snapshot.namespaces()
    written = 0
    for namespace in namespaces:
        if not (tier.root / namespace.name).is_dir() or _is_of_another_format(tier, namespace.name):
            continue
        wrong = _wrong(tier, tier.tree(namespace))
        tier.folders.rewrite(wrong, unique=f"{tier.presence.lease.hex()}-repair")
        tier.serve_again(namespace.name)
        written += len(wrong)
    return written


def _wrong(tier: LocalTier, tree: NamespaceTree) -> dict[str, bytes]:
    """The documents that are not what they must be: path to text."""
    documents = tree.all_documents(tier.root)
    return {path: text for path, text in documents.items() if _text(tier, path) != text}


def _is_of_another_format(tier: LocalTier, name: str) -> bool:
    try:
        read_namespace(tier.root / name)
    except (NewerFormatError, OlderFormatError):
        return True
    except StoreOpenError:
        pass
    return False


def _text(tier: LocalTier, path: str) -> bytes | None:
    try:
        return read_document(tier.root / path)
    except OSError:
        return None
