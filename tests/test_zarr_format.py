"""The zarr format: what kvstore wrote, stock readers read, refuse when damaged, and see as missing when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.errors import NewerFormatError, NotAStoreError
from kvstore_zarr.device import aligned_empty
from kvstore_zarr.format import PAGE, BlockFacts, BlockFrame, DigestWords, is_left_alone
from kvstore_zarr.metadata import NamespaceTree, read_namespace

if TYPE_CHECKING:
    from numpy.typing import NDArray

READER = Path(__file__).parent / "stock_zarr" / "read_block.py"

FLOATS = {
    dtype: BlockLayout.canonical(layers=3, tokens=16, heads=2, head_dim=20, dtype=dtype)
    for dtype in ("float16", "float32", "bfloat16")
}
LAYOUTS = {**FLOATS, "uint8": BlockLayout.opaque(10_000)}


def space_of(layout: BlockLayout, digest_bytes: int = 32) -> Namespace:
    return Namespace("model", "revision-1", (layout,), block_tokens=16, digest_bytes=digest_bytes)


def digest(digest_bytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(digest_bytes)


def values(layout: BlockLayout) -> NDArray[Any]:
    """Numbers that differ from place to place, in the layout's own type."""
    numbers = np.random.default_rng(2).standard_normal(layout.shape)
    return (numbers * (100 if layout.dtype == "uint8" else 1)).astype(layout.numpy_dtype)


def written(root: Path, layout: BlockLayout, digest_bytes: int = 32) -> tuple[Namespace, BlockKey, Path]:
    """A block that a store put: its namespace, its key, its file."""
    space, key = space_of(layout, digest_bytes), BlockKey(digest(digest_bytes))
    with open_store(f"file://{root}") as store:
        assert store.put_many(space, [BlockWrite(key, values(layout))]) == [PutOutcome.STORED]
    return space, key, root / NamespaceTree(space).block(key)


def read_by_stock_zarr(file: Path, key: BlockKey, expected: NDArray[Any], scratch: Path) -> dict[str, Any]:
    np.save(scratch / "expected.npy", expected)
    index = DigestWords(len(key.digest)).index(key.digest)
    job = {"array": str(file.parent), "index": index, "expected": str(scratch / "expected.npy")}
    done = subprocess.run(
        [sys.executable, "-I", str(READER)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["kvstore"] is False
    return report


class TestStockZarr:
    @pytest.mark.parametrize(
        ("dtype", "digest_bytes"), [("float16", 32), ("float16", 16), ("float32", 64), ("uint8", 32)]
    )
    def test_reads_what_kvstore_wrote_and_sees_a_missing_block_as_the_fill_value(
        self, tmp_path: Path, dtype: str, digest_bytes: int
    ) -> None:
        layout = LAYOUTS[dtype]
        _, key, file = written(tmp_path / "tier", layout, digest_bytes)
        report = read_by_stock_zarr(file, key, values(layout), tmp_path)
        assert (report["equal"], report["missing_is_nan"], report["refused"]) == (True, True, "")
        assert report["names"][-len(layout.axes) :] == list(layout.axes)

    def test_refuses_a_block_with_one_flipped_payload_bit(self, tmp_path: Path) -> None:
        layout = FLOATS["float16"]
        _, key, file = written(tmp_path / "tier", layout)
        flip_bit(file, 8 * 1234 + 3)
        report = read_by_stock_zarr(file, key, values(layout), tmp_path)
        assert not report["equal"]
        assert "checksum" in report["refused"].lower()

    def test_refuses_a_block_whose_shard_index_is_damaged(self, tmp_path: Path) -> None:
        layout = FLOATS["float16"]
        _, key, file = written(tmp_path / "tier", layout)
        flip_bit(file, 8 * (file.stat().st_size - 15))
        assert read_by_stock_zarr(file, key, values(layout), tmp_path)["refused"]

    @pytest.mark.parametrize("dtype", LAYOUTS)
    def test_tensorstore_reads_every_type_bfloat16_too(self, tmp_path: Path, dtype: str) -> None:
        tensorstore = pytest.importorskip("tensorstore")
        layout = LAYOUTS[dtype]
        _, key, file = written(tmp_path / "tier", layout)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{file.parent}/"}}
        array = tensorstore.open(spec, read=True).result()
        block = np.asarray(array[DigestWords(32).index(key.digest)].read().result())
        assert block.dtype == layout.numpy_dtype
        assert block.tobytes() == values(layout).tobytes()

    @pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
    def test_zarr_itself_would_write_the_same_documents(self, tmp_path: Path, dtype: str) -> None:
        import zarr

        space = space_of(LAYOUTS[dtype])
        for path, text in NamespaceTree(space).documents(BlockKey(digest(32))).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text)
            node = zarr.open(tmp_path / Path(path).parent, mode="r")
            written_again = json.loads(json.dumps(node.metadata.to_dict()))
            assert {**written_again, "storage_transformers": []} == {**json.loads(text), "storage_transformers": []}


def flip_bit(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


class TestNames:
    @given(digest_=st.binary(min_size=16, max_size=64), group=st.integers(0, 1))
    def test_a_file_name_leads_back_to_its_key(self, digest_: bytes, group: int) -> None:
        layouts = (BlockLayout.opaque(100), FLOATS["float16"])
        tree = NamespaceTree(Namespace("model", "1", layouts, 16, digest_bytes=len(digest_)))
        key = BlockKey(digest_, group)
        _, group_folder, folder, name = tree.block(key).split("/")
        assert group_folder == f"g{group}"
        assert tree.key(group, folder, name) == key
        assert len(name) < 255
        assert set(name) <= set("0123456789.")

    @pytest.mark.parametrize(
        "name",
        [
            "zarr.json",
            "1.2.3.4.5",
            "1.2.3.4.5.1",
            "01.2.3.4.5.0",
            "1.2.3.4.99999999999.0",
            "1.2.3.4.x.0",
            "+1.2.3.4.5.0",
        ],
    )
    def test_any_other_name_is_none(self, name: str) -> None:
        tree = NamespaceTree(space_of(BlockLayout.opaque(100)))
        with pytest.raises((ValueError, OverflowError)):
            tree.key(0, "a7", name)

    @pytest.mark.parametrize(("digest_bytes", "widths"), [(16, (7, 7, 1)), (32, (7, 7, 7, 7, 3)), (64, (7,) * 9)])
    def test_words_hold_all_but_the_first_byte(self, digest_bytes: int, widths: tuple[int, ...]) -> None:
        assert DigestWords(digest_bytes).widths == widths


class TestFrame:
    @pytest.mark.parametrize("payload", [1, 3868, 3869, 3870, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 200, 2 << 20])
    def test_a_file_is_whole_pages_and_its_closing_the_last_of_them(self, payload: int) -> None:
        frame = BlockFrame(payload)
        assert frame.file_bytes % PAGE == frame.whole % PAGE == 0
        assert frame.whole + frame.closing == frame.file_bytes
        assert frame.closing in (PAGE, 2 * PAGE)
        assert frame.whole + frame.rest == payload

    @given(
        payload=st.binary(min_size=1, max_size=3 * PAGE),
        created=st.integers(0, 2**64 - 1),
        generation=st.integers(0, 2**64 - 1),
        position=st.integers(-(2**63), 2**63 - 1),
        parent=st.one_of(st.just(b""), st.binary(min_size=16, max_size=64)),
        data=st.data(),
    )
    def test_facts_come_back_and_no_bit_of_the_closing_may_change(
        self, payload: bytes, created: int, generation: int, position: int, parent: bytes, data: st.DataObject
    ) -> None:
        frame, closing = BlockFrame(len(payload)), aligned_empty(2 * PAGE)
        body = np.frombuffer(payload, np.uint8)
        facts = BlockFacts(b"f" * 16, BlockKey(b"d" * 32, 3), len(payload), generation, created, position, parent)
        closing[:] = 255  # what a thread's buffer held before must not show
        frame.seal(closing, body, facts)
        assert frame.facts(closing) == facts
        assert frame.payload_is_intact(closing, body)
        bit = data.draw(st.integers(8 * frame.rest, 8 * frame.closing - 1))
        closing[bit // 8] ^= 1 << bit % 8
        assert frame.facts(closing) is None

    def test_sealing_depends_on_nothing_that_was_in_the_buffer(self) -> None:
        frame = BlockFrame(5000)
        body, facts = np.zeros(5000, np.uint8), BlockFacts(b"f" * 16, BlockKey(b"d" * 16), 5000, 1, 2, 3, b"")
        first, second = aligned_empty(2 * PAGE), aligned_empty(2 * PAGE)
        second[:] = 77
        for closing in (first, second):
            frame.seal(closing, body, facts)
        assert np.array_equal(first[: frame.closing], second[: frame.closing])


class TestManifest:
    def test_the_manifest_says_what_it_is(self, tmp_path: Path) -> None:
        space, key, file = written(tmp_path / "tier", FLOATS["float16"])
        document = json.loads((tmp_path / "tier" / space.name / "zarr.json").read_text())
        facts = document["attributes"]["kvstore"]
        assert facts["format"] == 1
        assert facts["digest_words"] == {"count": 5, "bytes": [7, 7, 7, 7, 3]}
        tree = read_namespace(tmp_path / "tier" / space.name)
        assert tree is not None
        assert Namespace.from_manifest(facts["namespace"]) == tree.namespace == space
        assert file.parent.name == f"{key.digest[0]:02x}"

    def test_a_later_format_is_refused_whole(self, tmp_path: Path) -> None:
        space, _, _ = written(tmp_path / "tier", FLOATS["float16"])
        path = tmp_path / "tier" / space.name / "zarr.json"
        path.write_text(path.read_text().replace('"format": 1', '"format": 7').replace("revision-1", "another"))
        for readonly in (False, True):
            with pytest.raises(NewerFormatError, match=r"format 7.*upgrade"):
                open_store(f"file://{tmp_path}/tier", readonly=readonly)

    def test_a_namespace_in_a_folder_of_another_name_is_not_served(self, tmp_path: Path) -> None:
        space, _, _ = written(tmp_path / "tier", FLOATS["float16"])
        (tmp_path / "tier" / space.name).rename(tmp_path / "tier" / ("0" * 32))
        with pytest.raises(NotAStoreError, match="renamed"):
            read_namespace(tmp_path / "tier" / ("0" * 32))
        with open_store(f"file://{tmp_path}/tier") as store:
            assert "renamed" in store.capabilities.notes[-1]

    def test_a_namespace_that_was_edited_is_not_served(self, tmp_path: Path) -> None:
        space, _, _ = written(tmp_path / "tier", FLOATS["float16"])
        path = tmp_path / "tier" / space.name / "zarr.json"
        path.write_text(path.read_text().replace("revision-1", "revision-2"))
        with open_store(f"file://{tmp_path}/tier") as store:
            assert "was changed, or the folder renamed" in store.capabilities.notes[-1]
            assert store.namespaces() == []


def test_opening_and_using_a_tier_loads_no_zarr(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import kvstore
space = kvstore.Namespace("m", "1", (kvstore.BlockLayout.opaque(4096),), 16)
key = kvstore.BlockKey(bytes(32))
with kvstore.open_store("file://{tmp_path}/tier") as store:
    store.put_many(space, [kvstore.BlockWrite(key, bytes(4096))])
    assert store.get_many_into(space, [kvstore.BlockRead(key, bytearray(4096))])[0].name == "HIT"
print(sorted(name for name in sys.modules if name in ("zarr", "torch", "fsspec", "numcodecs")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_bfloat16_block_is_read_back_as_it_was(tmp_path: Path) -> None:
    layout = FLOATS["bfloat16"]
    space, key, _ = written(tmp_path / "tier", layout)
    into = np.zeros(layout.shape, layout.numpy_dtype)
    with open_store(f"file://{tmp_path}/tier", readonly=True) as store:
        assert store.get_many_into(space, [BlockRead(key, into)]) == [GetOutcome.HIT]
    assert into.tobytes() == values(layout).tobytes()


@pytest.mark.parametrize("left", [0, 1, 19])
def test_a_file_that_becomes_shorter_while_it_is_looked_at_is_nobodys(left: int) -> None:
    """Who removes a block truncates its file, between the question how long it is and the reading."""
    assert not is_left_alone(8192, lambda _, length: bytes(length)[:left])


def test_a_frame_takes_the_same_memory_for_blocks_of_any_size() -> None:
    tracemalloc.start()
    try:
        frame = BlockFrame(1 << 40)
        assert next(iter(frame.parts)) == (0, 4 << 20)
        assert tracemalloc.get_traced_memory()[1] < 16 << 10
    finally:
        tracemalloc.stop()
