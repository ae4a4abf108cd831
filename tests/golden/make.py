"""Writes the golden fixtures: what kvstore of this version makes of `golden_contents`, with fixed clock, ids and keys.

    python tests/golden/make.py FOLDER

`v1` beside this file was made by the kvstore that introduced format version 1, and stays as it is. The tests run this
again, into a temporary folder, and hold what today's kvstore writes against it. Two LMDB environments are never the
same file; of those the tests compare records.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "backends")]

from golden_contents import (
    BLOCKS,
    MARK,
    MARKED,
    PURGED,
    PURGED_S,
    REFUSED_S,
    SEALED,
    SPACES,
    T0,
    TENANT,
    TOKENS,
    USED,
    USED_S,
    GoldenBlock,
    at,
    known_numbers,
)
from golden_tiers import KEYRING, ValueStore, encrypted

from kvstore import BlockRead, BlockStore, KeyExtras, Media, block_keys, open_store
from kvstore.archive import create, select

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["make"]


def make(root: Path) -> None:
    """Write all fixtures below `root`, an existing folder outside of which nothing is kept."""
    key_folder = root.parent
    for name, url in (
        ("file", f"file://{root}/file?io=buffered"),
        ("lmdb", f"lmdb://{root}/lmdb"),
        ("objects", f"file://{root}/objects?remote=true"),
    ):
        with known_numbers("tombstones"), open_store(url) as store:
            _fill(store, BLOCKS)
        _tidy(root / name)
    # The later ones seal under the data keys that the first one made.
    for name, url in (
        ("file-sealed", f"file://{root}/file-sealed?io=buffered"),
        ("lmdb-sealed", f"lmdb://{root}/lmdb-sealed"),
    ):
        with known_numbers(name), at(0), open_store(url, **encrypted(root, key_folder)) as store:
            _fill(store, SEALED)
        _tidy(root / name)
    _make_values(root, key_folder)
    _make_archives(root)
    (root / "vectors.json").write_text(json.dumps(vectors(), indent=1) + "\n")
    (root / "blocks.json").write_text(json.dumps([described(block) for block in BLOCKS], indent=1) + "\n")
    for left in root.glob(f"{KEYRING}.*"):
        left.unlink()
    (key_folder / "operator.key").unlink()


def _fill(store: BlockStore, blocks: Sequence[GoldenBlock]) -> None:
    for block in blocks:
        with at(block.number):
            (stored,) = store.put_many(block.namespace, [block.write])
        assert stored.present, (block, stored)
    for block in USED if blocks is BLOCKS else ():
        with at(USED_S):
            store.get_many_into(block.namespace, [BlockRead(block.key, bytearray(block.content.nbytes))])
    for block in MARKED if store.capabilities.marks else ():
        store.mark_many(block.namespace, [block.key], MARK)
    for block in PURGED if blocks is BLOCKS else ():
        with at(PURGED_S):
            store.purge_many(block.namespace, [block.key], refuse_s=REFUSED_S)


def _tidy(root: Path) -> None:
    """Locks, and folders with nothing in them, are not kept; they are made anew."""
    for path in root.rglob("lock.mdb"):
        path.unlink()
    for path in root.glob(".kvstore/drafts"):
        path.rmdir()


def _make_values(root: Path, key_folder: Path) -> None:
    for name, blocks, options in (
        ("values", BLOCKS, {}),
        ("values-sealed", SEALED, encrypted(root, key_folder)),
    ):
        values: dict[str, bytes] = {}
        with known_numbers(name), at(0), ValueStore(values, **options) as store:
            _fill(store, blocks)
        text = json.dumps({name: value.hex() for name, value in sorted(values.items())}, indent=1)
        (root / f"{name}.json").write_text(text + "\n")


def _make_archives(root: Path) -> None:
    space = SPACES["groups"]
    keys = [block.key for block in SEALED]
    with open_store("memory://golden") as store, mock.patch("kvstore.archive.planning._version", return_value="golden"):
        _fill(store, SEALED)
        for name, compression in (("archive", "none"), ("archive-zstd", "zstd")):
            with at(900), mock.patch("time.time", return_value=T0 / 1e9 + 900):
                create(
                    f"file://{root}/{name}",
                    store,
                    space,
                    select(store, space, keys=keys),
                    label=MARK.label,
                    compression=compression,
                    tokens=TOKENS,
                    keep_until=T0 / 1e9 + 1e6,
                )
    for path in root.glob("archive*/.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def described(block: GoldenBlock) -> dict[str, Any]:
    """A block for readers in other languages; `golden_contents.pattern` says what its bytes are."""
    return {
        "number": block.number,
        "namespace": block.namespace.name,
        "group": block.key.group,
        "digest": block.key.digest.hex(),
        "nbytes": block.content.nbytes,
        "created": block.created,
        "position": block.position,
        "parent": block.parent.hex(),
        "tenant_when_sealed": block.tenant,
        "purged": block in PURGED,
    }


def vectors() -> dict[str, Any]:
    """Manifests with their fingerprints, tokens with their digests."""
    extras = KeyExtras(
        "modèle", "adapter", "salt", (Media(5, b"\1\2", "image"), Media(5, b"\0", "image"), Media(0, b"a", "音"))
    )
    chains = [
        (TOKENS, 4, KeyExtras(), 32),
        (TOKENS, 5, extras, 16),
        ([0, 2**32, 2**63 - 1], 1, KeyExtras(salt=TENANT), 32),
    ]
    return {
        "fingerprints": [{"manifest": space.to_manifest(), "fingerprint": space.name} for space in SPACES.values()],
        "digests": [
            {
                "tokens": tokens,
                "block_tokens": block_tokens,
                "model": extra.model,
                "adapter": extra.adapter,
                "salt": extra.salt,
                "media": [[one.offset, one.content_hash.hex(), one.kind] for one in extra.media],
                "digest_bytes": length,
                "digests": [key.digest.hex() for key in block_keys(tokens, block_tokens, extra, digest_bytes=length)],
            }
            for tokens, block_tokens, extra, length in chains
        ],
    }


if __name__ == "__main__":
    made = Path(sys.argv[1]).absolute()
    made.mkdir(parents=True)
    make(made)
