"""LMDB with nothing around it, given the records of a tier: what `benchmarks/scale.py` holds kvstore against.

The same trees as a tier's, with keys and values of the same lengths in the same order (`kvstore.records`,
`kvstore_lmdb.entry`), written through py-lmdb's own calls for many records, in one transaction for as many blocks. No
checksum, no look at what is there, no room, no notes of use: what is left grows with the number of blocks because LMDB
does.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import lmdb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAP_BYTES = 1 << 40
META_BYTES, AGE_BYTES = 52, 16
"""Values of the catalogue's two records of a block."""
FINGERPRINT = b"\0" * 18
"""What all addresses of a namespace begin with."""


class BareLMDB:
    """An environment of its own in `folder`; blocks, whose values have `value_bytes`, by number."""

    def __init__(self, folder: Path, value_bytes: int) -> None:
        self._env = lmdb.open(
            str(folder),
            map_size=MAP_BYTES,
            max_dbs=3,
            sync=False,
            metasync=False,
            readahead=value_bytes > 0,
            max_spare_txns=16,
        )
        self._meta, self._age, self._blocks = (self._env.open_db(name) for name in (b"meta", b"age", b"blocks"))
        self._value = bytes(value_bytes)
        self._put = 0

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def put(self, addresses: Sequence[bytes]) -> None:
        """New blocks, in one transaction."""
        with self._env.begin(write=True, buffers=True) as txn:
            self._add(txn, addresses)

    def evict_and_put(self, addresses: Sequence[bytes]) -> None:
        """The oldest blocks go, then as many new ones come, in a transaction each."""
        with self._env.begin(write=True, buffers=True) as txn:
            oldest = txn.cursor(self._age)
            oldest.first()
            victims = [bytes(key) for key, _ in zip(oldest.iternext(values=False), addresses, strict=False)]
            for name in victims:
                number, address = name[:8], name[8:]
                txn.delete(name, db=self._age)
                txn.get(address, db=self._meta)
                txn.delete(address, db=self._meta)
                txn.delete(number, db=self._blocks)
        self.put(addresses)

    def get(self, addresses: Sequence[bytes]) -> None:
        """Find blocks, and read their values if they have some, in one transaction."""
        with self._env.begin(buffers=True) as txn:
            for _, record in txn.cursor(self._meta).getmulti(addresses):
                if self._value:
                    bytes(txn.get(record[:8], db=self._blocks, default=b""))

    def _add(self, txn: lmdb.Transaction[memoryview], addresses: Sequence[bytes]) -> None:
        numbers = [number.to_bytes(8, "big") for number in range(self._put, self._put + len(addresses))]
        self._put += len(addresses)
        named = list(zip(numbers, addresses, strict=True))
        txn.cursor(self._meta).putmulti([(address, number + bytes(META_BYTES - 8)) for number, address in named])
        txn.cursor(self._age).putmulti([(number + address, bytes(AGE_BYTES)) for number, address in named])
        if self._value:
            txn.cursor(self._blocks).putmulti([(number, self._value) for number in numbers], append=True)


def address(number: int) -> bytes:
    """A block's, as random as a digest is."""
    return FINGERPRINT + hashlib.sha256(b"%d" % number).digest()
