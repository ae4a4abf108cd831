"""Pages read without LMDB, held against py-lmdb's own verifier: what keeps LMDB from finding its way is seen."""

from __future__ import annotations

import os
import random
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import pytest
from lmdb.verify import VerifyError, verify

from kvstore.environment import Environment
from kvstore.lmdb_files import damage, readable
from kvstore.lmdb_pages import PAGE

if TYPE_CHECKING:
    from pathlib import Path

BRANCH, LEAF, VALUE = 1, 2, 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An environment with trees of two levels, large values, and free pages."""
    environment = Environment.open(tmp_path, ["a", "b", "empty"])
    chance = random.Random(1)
    for start in range(0, 600, 100):
        with environment.write() as txn:
            for number in range(start, start + 100):
                txn.put(b"%06d" % number, chance.randbytes(chance.randrange(300)), db=environment.databases["a"])
            for number in range(start, start + 5):
                txn.put(b"%06d" % number, chance.randbytes(9000), db=environment.databases["b"])
    with environment.write() as txn:
        for number in range(0, 600, 7):
            txn.delete(b"%06d" % number, db=environment.databases["a"])
        txn.delete(b"000001", db=environment.databases["b"])
    environment.close()
    return tmp_path / "data.mdb"


def pages(raw: bytes, kind: int) -> list[int]:
    heads = [struct.unpack_from("=QHH", raw, number * PAGE) for number in range(len(raw) // PAGE)]
    return [number for number, head in enumerate(heads) if (head[0], head[2]) == (number, kind)]


def verifier_objects(folder: Path) -> bool:
    try:
        return bool(verify(str(folder)))
    except VerifyError:
        return True


def changed(path: Path, raw: bytes, place: int, data: bytes) -> None:
    path.write_bytes(raw)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, place)


def test_a_sound_file_is_sound(data: Path) -> None:
    assert damage(data.parent, thorough=False, values=True) is None
    assert not verifier_objects(data.parent)


@pytest.mark.parametrize("with_what", [b"\0", b"\xff"])
def test_every_inner_page_that_is_in_use_is_missed_when_it_is_lost(data: Path, with_what: bytes) -> None:
    raw = data.read_bytes()
    seen: list[bool] = []
    for number in pages(raw, BRANCH) + pages(raw, LEAF):
        changed(data, raw, number * PAGE, with_what * PAGE)
        seen.append(damage(data.parent, thorough=False, trees=True) is not None)
        assert seen[-1] == verifier_objects(data.parent), number
    assert seen.count(True) > 10
    assert seen.count(False) > 3


def test_the_header_of_every_large_value_is_looked_at_when_values_are(data: Path) -> None:
    raw = data.read_bytes()
    seen = 0
    for number in pages(raw, VALUE):
        changed(data, raw, number * PAGE + 12, struct.pack("=I", 77))
        assert damage(data.parent, thorough=False, trees=True) is None
        found = damage(data.parent, thorough=False, values=True)
        assert (found is not None) == verifier_objects(data.parent)
        seen += found is not None
    assert seen == 29


def test_no_bit_makes_it_fail_itself_and_none_that_leads_astray_is_overlooked(data: Path) -> None:
    """Counts, places, sizes, flags and numbers of pages; a bit of a key or a value is not for it to see."""
    raw, chance = data.read_bytes(), random.Random(3)
    overlooked = seen = 0
    for number in pages(raw, BRANCH) + pages(raw, LEAF):
        for _ in range(8):
            place = number * PAGE + chance.choice([*range(8), 10, *range(12, 40)])
            changed(data, raw, place, bytes([raw[place] ^ 1 << chance.randrange(8)]))
            found = damage(data.parent, thorough=False, trees=True) is not None
            objected = verifier_objects(data.parent)
            seen, overlooked = seen + found, overlooked + (objected and not found)
            with data.open("rb") as file:  # whatever it is, what is readable can be read without an end
                for name in ("a", "b"):
                    assert len(readable(file.fileno())(name)) <= 1200
    assert seen > 50
    assert overlooked <= seen // 10  # keys out of order


def test_the_size_of_every_node_is_looked_at(data: Path) -> None:
    """LMDB's own verifier lets one pass that ends within the page; who writes such a value back writes beyond it."""
    raw, looked_at = data.read_bytes(), 0
    for number in pages(raw, LEAF):
        changed(data, raw, number * PAGE, bytes(PAGE))
        if damage(data.parent, thorough=False, trees=True) is None:
            continue  # a free page
        (lower,) = struct.unpack_from("=H", raw, number * PAGE + 12)
        for (place,) in struct.iter_unpack("=H", raw[number * PAGE + 16 : number * PAGE + lower]):
            node = number * PAGE + place
            size, _, flags = struct.unpack_from("=HHH", raw, node)
            if not flags:
                changed(data, raw, node, struct.pack("=H", size ^ 16))
                assert damage(data.parent, thorough=False, trees=True), (number, place)
                looked_at += 1
    assert looked_at > 500


def test_what_is_readable_of_a_sound_file_is_all_of_it(data: Path) -> None:
    environment = Environment.open(data.parent, ["a", "b", "empty"], readonly=True)
    with environment.read() as txn:
        expected = {
            name: {bytes(key): bytes(value) for key, value in txn.cursor(environment.databases[name])}
            for name in ("a", "b", "empty")
        }
    environment.close()
    with data.open("rb") as file:
        read = readable(file.fileno())
        assert {name: {key: load() for key, load in read(name).items()} for name in expected} == expected
    assert [len(entries) for entries in expected.values()] == [514, 29, 0]


def test_of_a_file_that_nobody_touched_pages_are_looked_at_where_that_is_soon_done(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytearray(data.read_bytes())
    for at in range(2 * PAGE, len(raw), PAGE):
        if raw[at + 10] == BRANCH:
            raw[at + 16 : at + PAGE] = bytes(PAGE - 16)
    data.write_bytes(raw)
    assert damage(data.parent, thorough=False, trees=True, untouched=True)
    monkeypatch.setattr("kvstore.lmdb_files.SOON_DONE", 0)
    assert damage(data.parent, thorough=False, trees=True, untouched=True) is None
    assert damage(data.parent, thorough=False, trees=True)
    assert damage(data.parent, thorough=True, untouched=True)


def test_pages_at_the_end_that_were_taken_and_given_back_need_not_be_in_the_file(data: Path) -> None:
    environment = Environment.open(data.parent, ["a", "b", "empty"])
    with environment.write() as txn:
        txn.put(b"large", bytes(400_000), db=environment.databases["b"])
        txn.delete(b"large", db=environment.databases["b"])
        txn.put(b"small", b"x", db=environment.databases["a"])
    environment.close()
    last = struct.unpack_from("=Q", data.read_bytes(), max((0, PAGE), key=lambda at: at_transaction(data, at)) + 136)[0]
    assert data.stat().st_size < (last + 1) * PAGE, "nothing of them was written"
    assert damage(data.parent, thorough=True, trees=True, values=True) is None
    os.truncate(data, data.stat().st_size // 2)
    assert "cut to" in (damage(data.parent, thorough=False) or "")


def at_transaction(data: Path, page: int) -> int:
    number: int = struct.unpack_from("=Q", data.read_bytes(), page + 144)[0]
    return number


def test_a_record_of_the_free_list_with_room_for_more_is_no_damage(data: Path) -> None:
    """LMDB reserves records for the list before it knows how long it is."""
    raw = bytearray(data.read_bytes())
    free = max((0, PAGE), key=lambda at: at_transaction(data, at)) + 40
    (root,) = struct.unpack_from("=Q", raw, free + 40)
    (at,) = struct.unpack_from("=H", raw, root * PAGE + 16)
    count = root * PAGE + at + 8 + 8
    (listed,) = struct.unpack_from("=Q", raw, count)
    assert listed, "a list of free pages"
    struct.pack_into("=Q", raw, count, 0)
    data.write_bytes(raw)
    assert damage(data.parent, thorough=False, trees=True) is None
    struct.pack_into("=Q", raw, count, listed + 1)
    data.write_bytes(raw)
    assert "cannot be" in (damage(data.parent, thorough=False, trees=True) or "")


@dataclass
class Anything:
    """What may be done to a database in a transaction, by chance.

    No key is written twice in one transaction with values of two sizes: of a value on pages of its own LMDB then keeps
    more pages than its size says, which no check from outside can tell from damage.
    """

    chance: random.Random
    txn: lmdb.Transaction[bytes]
    written: set[bytes]

    def key(self) -> bytes:
        return self.chance.randbytes(self.chance.choice([self.chance.randrange(5, 20), self.chance.randrange(1, 511)]))

    def value(self) -> bytes:
        most = self.chance.choice([1, 50, 2050, 9000])
        just = self.chance.randrange(1, 3) * PAGE - 16 + self.chance.randrange(-1, 2)  # about as much as pages take
        return self.chance.randbytes(self.chance.choice([self.chance.randrange(most), just]))

    def fresh(self) -> bytes:
        while (key := self.key()) in self.written:
            pass
        self.written.add(key)
        return key

    def put(self, db: lmdb._Database) -> None:
        self.txn.put(self.fresh(), self.value(), db=db)

    def put_many(self, db: lmdb._Database) -> None:
        self.txn.cursor(db).putmulti([(self.fresh(), self.value()) for _ in range(20)])

    def delete_some(self, db: lmdb._Database) -> None:
        cursor = self.txn.cursor(db)
        there = cursor.set_range(self.chance.randbytes(1))
        for _ in range(self.chance.randrange(30)):
            there = there and cursor.delete() and bool(cursor.key())

    def replace_one(self, db: lmdb._Database) -> None:
        cursor = self.txn.cursor(db)
        if cursor.set_range(self.chance.randbytes(1)) and cursor.key() not in self.written:
            self.written.add(cursor.key())
            self.txn.put(cursor.key(), self.value(), db=db)

    def drop(self, db: lmdb._Database) -> None:
        if not self.chance.randrange(20):
            self.txn.drop(db, delete=False)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_lmdb_writes_is_called_damaged(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    acts = (Anything.put, Anything.put, Anything.put_many, Anything.delete_some, Anything.replace_one, Anything.drop)
    with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=4, sync=False, writemap=bool(seed % 2)) as environment:
        databases = [environment.open_db(name) for name in (b"a", b"b", b"c")]
        for commit in range(60):
            txn = environment.begin(write=True)
            anything = Anything(chance, txn, set())
            for _ in range(chance.choice([1, 10, 60])):
                chance.choice(acts)(anything, chance.choice(databases))
            with environment.begin() if chance.random() < 0.3 else nullcontext():  # a reader keeps pages from use
                txn.abort() if chance.random() < 0.1 else txn.commit()
            if commit % 3 == 0:
                assert damage(tmp_path, thorough=False, trees=True, values=True) is None, commit
        assert damage(tmp_path, thorough=True) is None
