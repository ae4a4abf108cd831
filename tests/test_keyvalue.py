"""A backend made of hooks: what `KeyValueStore` makes of their answers and of their errors, and how a value looks.

That such a store keeps the contract is shown by the suite, on a folder and on SQLite (`tests/backends`).
"""

from __future__ import annotations

import errno
import json
import sqlite3
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from keyvalue_helpers import CORRUPT, EXISTS, FAILED, FULL, HIT, MANIFEST, MISS, ONE, STORED, DictStore, opened

from kvstore import BlockRead, BlockWrite, PutOutcome
from kvstore.errors import (
    TierUnavailable,
)
from kvstore.integrity import crc32c
from kvstore.keyvalue import KeyValueStore
from kvstore.layout import BlockLayout
from kvstore.records import address_of
from kvstore.testing.supply import SPACE, content, get, held, key, keys, write, writes
from kvstore.types import NO_PARENT, NO_POSITION
from kvstore.url import READONLY, TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore import Namespace


@pytest.fixture
def store() -> Iterator[DictStore]:
    with opened() as it:
        yield it


# How a value looks


def test_a_block_is_one_value_as_the_page_of_the_format_has_it(store: DictStore) -> None:
    space = replace(SPACE, layouts=(BlockLayout.opaque(1000), BlockLayout.opaque(3000)))
    before = time.time_ns()
    store.put_many(space, [write(1, space, 1, position=7, parent=key(9).digest)])
    value = store.values[f"{space.name}-1-{key(1).digest.hex()}"]
    head, payload = value[:128], value[128:]
    assert payload == content(1, 3000).tobytes()
    fields = struct.unpack("<8sHHHHQq64s24sII", head)
    magic, version, flags, length, nothing, created, position, parent, zeros, payload_crc, head_crc = fields
    assert (magic, version, flags, nothing) == (b"kvvalue\0", 1, 0, 0)
    assert (position, parent[:length]) == (7, key(9).digest)
    assert not any(parent[length:] + zeros)
    assert before <= created <= time.time_ns()
    address = space.fingerprint + struct.pack(">H", 1) + key(1).digest
    assert (payload_crc, head_crc) == (crc32c(payload), crc32c(address + head[:-4]))
    assert address == address_of(space, key(1, group=1))
    assert json.loads(store.values[f"manifest-{space.name}"]) == space.to_manifest()


def test_names_are_fit_for_files_and_databases_alike(store: DictStore) -> None:
    space = replace(SPACE, digest_bytes=64)
    store.put_many(space, [write(1, space)])
    for name in store.values:
        assert len(name) <= 167
        assert set(name) <= set("0123456789abcdefghijklmnopqrstuvwxyz-")


def test_a_store_that_gives_whole_values_whatever_was_asked_for_works_too(store: DictStore) -> None:
    store.read = lambda name, nbytes: store.values.get(name)  # type: ignore[method-assign]  # noqa: ARG005
    store.put_many(SPACE, [write(1, position=4)])
    assert get(store, [1, 2]) == [HIT, MISS]
    assert [info.position for info in store.scan(SPACE)] == [4]
    store.values[ONE] += b"\0"
    assert get(store, [1]) == [CORRUPT]


def test_a_class_without_either_way_to_read_is_told_so() -> None:
    class Unreadable(DictStore):
        read = KeyValueStore.read

    with pytest.raises(NotImplementedError, match="Unreadable has neither `read` nor `read_into`"):
        Unreadable(TierURL.parse("dict://x").validated([READONLY]))


# What the hooks answer


def test_what_is_there_or_not_may_be_said_by_the_errors_of_files(store: DictStore) -> None:
    store.put_many(SPACE, writes([1]))
    store.faults = {f"{hook} {name_of(SPACE, key(2))}": FileNotFoundError() for hook in ("read", "remove")}
    store.faults[f"write {name_of(SPACE, key(2))}"] = FileExistsError()
    assert get(store, [1, 2]) == [HIT, MISS]
    assert store.contains_many(SPACE, keys([1, 2])) == [True, False]
    assert store.put_many(SPACE, writes([2, 3])) == [EXISTS, STORED]
    assert store.delete_many(SPACE, keys([2, 1])) == [False, True]
    store.faults = {"names": FileNotFoundError()}
    assert (store.namespaces(), list(store.scan(SPACE)), store.usage().blocks) == ([], [], 0)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(OSError(errno.ENOSPC, ""), FULL), (OSError(errno.EDQUOT, ""), FULL), (PermissionError(), FAILED)],
    ids=["no space", "quota", "permission"],
)
def test_a_refused_block_is_an_outcome_and_does_not_fail_its_batch(
    store: DictStore, fault: Exception, outcome: PutOutcome
) -> None:
    store.faults = {f"write {ONE}": fault}
    assert store.put_many(SPACE, writes([0, 1, 2])) == [STORED, outcome, STORED]
    store.faults = {f"write manifest-{replace(SPACE, revision='two').name}": fault}
    assert store.put_many(replace(SPACE, revision="two"), writes([0, 1])) == [outcome, outcome]
    assert held(store, replace(SPACE, revision="two")) == set()


def test_a_value_that_the_device_cannot_read_is_damage_and_does_not_fail_its_batch(store: DictStore) -> None:
    store.put_many(SPACE, writes([1, 2]))
    store.faults = {f"read {ONE}": OSError(errno.EIO, "")}
    assert store.contains_many(SPACE, keys([1, 2])) == [True, True]
    assert held(store) == set(keys([1, 2]))
    assert get(store, [1, 2]) == [CORRUPT, HIT]
    assert ONE not in store.values


VERBS: dict[str, Callable[[DictStore], object]] = {
    "names": lambda store: store.namespaces(),
    "read": lambda store: get(store, [1]),
    "remove": lambda store: store.delete_many(SPACE, [key(1)]),
    "write": lambda store: store.put_many(SPACE, [write(2)]),
}


@pytest.mark.parametrize("hook", VERBS)
@pytest.mark.parametrize("fault", [sqlite3.OperationalError("locked"), ConnectionResetError(), TimeoutError()], ids=str)
def test_what_cannot_tell_is_unavailable(store: DictStore, hook: str, fault: Exception) -> None:
    store.put_many(SPACE, [write(1)])
    store.faults = {hook: fault}
    with pytest.raises(TierUnavailable, match=r"dict://x cannot tell") as caught:
        VERBS[hook](store)
    assert caught.value.__cause__ is fault
    store.faults = {}
    assert get(store, [1]) == [HIT]


def test_scan_and_contains_and_usage_of_what_cannot_tell(store: DictStore) -> None:
    store.put_many(SPACE, [write(1)])
    scan = store.scan(SPACE)
    store.faults = {"read": sqlite3.OperationalError("locked")}
    for verb in (lambda: next(scan), lambda: store.contains_many(SPACE, [key(1)]), store.usage):
        with pytest.raises(TierUnavailable):
            verb()


def test_errors_of_kvstore_itself_pass(store: DictStore) -> None:
    store.faults = {"read": TierUnavailable("the server is away")}
    with pytest.raises(TierUnavailable, match=r"^the server is away$"):
        get(store, [1])


def test_a_fault_in_a_hook_is_not_taken_for_an_answer(store: DictStore) -> None:
    store.faults = {"read": KeyError("a slip")}
    with pytest.raises(KeyError):
        get(store, [1])


def test_a_name_that_comes_twice_and_names_that_nobody_gave_do_no_harm(store: DictStore) -> None:
    store.put_many(SPACE, [write(1)])
    digest = key(2).digest.hex()
    for stranger in (f"0-{digest}-x", f"0-{digest[:-2]}", f"1-{digest}", f"-1-{digest}", f"00-{digest}", "0-", "", "0"):
        store.values[f"{SPACE.name}-{stranger}"] = b""
    store.values[f"{SPACE.name}-0-{digest.upper()}"] = b""
    store.values["manifest-"] = store.values["something"] = store.values["manifest-nonsense"] = b""
    store.names = lambda prefix: 2 * [*store.values]  # type: ignore[method-assign]  # noqa: ARG005
    assert [info.key for info in store.scan(SPACE)] == [key(1)]
    store.calls.clear()
    assert store.namespaces() == [SPACE]
    assert store.calls.count("read") == 3  # those that are called manifests, and no block
    assert (store.usage().blocks, store.usage().used) == (1, len(store.values[ONE]))


# Records


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{", b"[]", b"7", b"null", b"\xff", b'{"model": 1}', b'{"block_tokens": 1e999}', b"[" * 100_000, b"other"],
    ids=["empty", "cut", "list", "number", "null", "no text", "fields", "infinite", "deep", "of another namespace"],
)
def test_a_damaged_manifest_is_no_namespace_and_the_next_put_mends_it(store: DictStore, damaged: bytes) -> None:
    store.put_many(SPACE, [write(1)])
    other = json.dumps(replace(SPACE, revision="other").to_manifest()).encode()
    store.values[MANIFEST] = other if damaged == b"other" else damaged
    assert store.namespaces() == []
    assert store.put_many(SPACE, writes([1, 2])) == [EXISTS, STORED]
    assert store.namespaces() == [SPACE]


def test_a_manifest_that_the_device_evicted_is_back_with_the_next_put(store: DictStore) -> None:
    store.put_many(SPACE, [write(1)])
    del store.values[MANIFEST]
    assert store.put_many(SPACE, [write(1)]) == [EXISTS]
    assert store.namespaces() == [SPACE]


def test_a_manifest_may_be_long(store: DictStore) -> None:
    space = replace(SPACE, extra={"rope": "x" * 100_000})
    store.put_many(space, [write(1, space)])
    assert store.namespaces() == [space]


def test_a_put_of_nothing_makes_no_namespace(store: DictStore) -> None:
    assert store.put_many(SPACE, []) == []
    assert store.values == {"format": b"1"}


def test_a_scan_lists_a_damaged_block_so_that_verify_finds_it(store: DictStore) -> None:
    store.put_many(SPACE, [write(1, position=3, parent=key(0).digest)])
    store.values[ONE] = b"\0" + store.values[ONE][1:]
    (info,) = store.scan(SPACE)
    assert (info.key, info.position, info.parent) == (key(1), NO_POSITION, NO_PARENT)
    assert get(store, [1]) == [CORRUPT]


def test_a_block_that_goes_while_it_is_scanned_is_not_listed(store: DictStore) -> None:
    store.put_many(SPACE, writes([1, 2]))
    scan = store.scan(SPACE)
    store.delete_many(SPACE, [key(1)])
    assert [info.key for info in scan] == [key(2)]


def test_a_block_of_a_format_before_the_first_is_no_hit(store: DictStore) -> None:
    store.put_many(SPACE, [write(1)])
    head, payload = bytearray(store.values[ONE][:128]), store.values[ONE][128:]
    head[:8] = b"kvvalue0"
    head[-4:] = crc32c(address_of(SPACE, key(1)) + bytes(head[:-4])).to_bytes(4, "little")
    store.values[ONE] = bytes(head) + payload
    assert get(store, [1]) == [CORRUPT]


def test_a_scan_reads_heads_alone_and_many_at_a_time(store: DictStore) -> None:
    store.put_many(small := replace(SPACE, layouts=(BlockLayout.opaque(1),)), writes(range(600), small))
    asked: list[int] = []
    read = store.read
    store.read = lambda name, nbytes: (asked.append(nbytes), read(name, nbytes))[1]  # type: ignore[method-assign]
    assert len({info.key for info in store.scan(small)}) == 600
    assert set(asked) == {128}


# Batches


class PipelineStore(DictStore):
    """Whole batches in one round trip."""

    def write_many(self, values: Iterable[tuple[str, Sequence[memoryview]]]) -> list[PutOutcome]:
        self.called("write_many", "")
        joined = [(name, b"".join(parts)) for name, parts in values]
        return [STORED if self.values.setdefault(name, value) is value else EXISTS for name, value in joined]

    def read_many_into(self, reads: Iterable[tuple[str, Sequence[memoryview]]]) -> list[int | None]:
        self.called("read_many_into", "")
        return [self.read_into(name, buffers) for name, buffers in list(reads)]

    def remove_many(self, names: Iterable[str]) -> list[bool]:
        self.called("remove_many", "")
        return [self.values.pop(name, None) is not None for name in names]

    def exist_many(self, names: Iterable[str]) -> list[bool]:
        self.called("exist_many", "")
        return [name in self.values for name in names]


def test_a_client_with_pipelines_gets_whole_batches() -> None:
    with PipelineStore(TierURL.parse("dict://x").validated([READONLY])) as store:
        assert store.put_many(SPACE, writes([1, 2, 1])) == [STORED, STORED, EXISTS]
        assert get(store, [1, 2, 3]) == [HIT, HIT, MISS]
        assert store.contains_many(SPACE, keys([2, 3])) == [True, False]
        assert held(store) == set(keys([1, 2]))
        assert store.delete_many(SPACE, keys([1, 1, 2])) == [True, False, True]
        assert [store.calls.count(f"{verb}_many") for verb in ("write", "exist", "remove")] == [1, 1, 1]
        assert store.calls.count("read_many_into") == 2  # the get and the scan
        store.faults = {"write_many": sqlite3.OperationalError("gone")}
        with pytest.raises(TierUnavailable):
            store.put_many(SPACE, [write(1)])


def test_a_batch_that_is_answered_in_part_is_a_fault_and_no_wrong_answer() -> None:
    class Short(PipelineStore):
        def read_many_into(self, reads: Iterable[tuple[str, Sequence[memoryview]]]) -> list[int | None]:
            return super().read_many_into(reads)[:-1]

    with Short(TierURL.parse("dict://x").validated([READONLY])) as store, pytest.raises(ValueError, match="shorter"):
        get(store, [1, 2])


# Buffers


def test_a_store_that_reads_in_place_is_lent_the_callers_memory_and_a_byte_beyond() -> None:
    class InPlace(DictStore):
        lent: list[int]

        def read_into(self, name: str, buffers: Sequence[memoryview]) -> int | None:
            self.lent = [len(buffer) for buffer in buffers]
            return super().read_into(name, buffers)

    into = bytearray(SPACE.block_bytes())
    with InPlace(TierURL.parse("dict://x").validated([READONLY])) as store:
        store.put_many(SPACE, [write(1)])
        assert store.get_many_into(SPACE, [BlockRead(key(1), into)]) == [HIT]
        assert store.lent == [128, SPACE.block_bytes(), 1]
        assert into == content(1).tobytes()


def test_what_is_written_is_the_callers_memory_itself(store: DictStore) -> None:
    data = bytearray(content(1).tobytes())
    lent: list[Sequence[memoryview]] = []
    store.write = lambda name, parts: bool(lent.append(parts)) or True  # type: ignore[method-assign]  # noqa: ARG005
    assert store.put_many(SPACE, [BlockWrite(key(1), data)]) == [STORED]
    data[5] ^= 1
    assert lent[-1][1].tobytes() == bytes(data)


def test_every_namespace_is_scanned_on_its_own(store: DictStore) -> None:
    spaces: list[Namespace] = [replace(SPACE, revision=f"r{number}") for number in range(3)]
    for number, space in enumerate(spaces):
        store.put_many(space, writes(range(number), space))
    assert [len(held(store, space)) for space in spaces] == [0, 1, 2]
    assert store.usage().blocks == 3
