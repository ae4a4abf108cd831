"""Tables of namespaces, blocks and prefixes say what is stored, on every tier alike, and looking changes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from inspect_helpers import KEYS, PROMPT, SPACE, TOKENS, looking, store_prompt

pd = pytest.importorskip("pandas", reason='pip install "kvstore-tiers[inspect]"')

import kvstore.inspect  # noqa: E402
from kvstore import BlockLayout, BlockWrite, Mark, Namespace, TierURL, open_store  # noqa: E402
from kvstore.errors import InvalidOptionError, NotStoredError, StoreNotFoundError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

OTHER = Namespace("org/other", "revision-2", (BlockLayout.opaque(4096),), block_tokens=8, extra={"engine": "mine"})
BLOCKS = [
    *("group", "digest", "position", "parent", "tokens_end", "stored_bytes"),
    *("created", "last_used", "hits", "labels", "tenants", "pinned"),
]


def test_every_block_is_a_row_with_its_place(tier: str) -> None:
    began = time.time()
    with looking(tier, SPACE) as look:
        blocks = look.namespace().blocks()
        known = {info.key.digest.hex(): info for info in look.store.scan(SPACE)}
    assert list(blocks.columns) == BLOCKS
    assert list(blocks.digest) == [key.digest.hex() for key in KEYS]
    assert list(blocks.parent) == ["", *(key.digest.hex() for key in KEYS[:-1])]
    assert list(blocks.position) == list(range(10))
    assert list(blocks.tokens_end) == list(range(TOKENS, 41, TOKENS))
    assert list(blocks.stored_bytes) == [known[digest].stored_bytes for digest in blocks.digest]
    assert str(blocks.created.dt.tz) == str(blocks.last_used.dt.tz) == "UTC"
    seconds = (blocks.created - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    assert (seconds - [known[digest].created for digest in blocks.digest]).abs().max() < 1e-3
    assert seconds.min() > began - 2
    assert not blocks.pinned.any()


def test_a_block_of_unknown_place_has_none(tier: str) -> None:
    with open_store(tier) as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        with kvstore.inspect.open(store) as look:
            blocks = look.namespace().blocks()
    assert blocks.position.isna().all()
    assert blocks.tokens_end.isna().all()
    assert list(blocks.parent) == [""]


def test_namespaces_are_rows_under_their_names(tier: str) -> None:
    with looking(tier, SPACE) as look:
        spaces = look.namespaces()
    assert list(spaces.index) == [SPACE.name]
    row = spaces.loc[SPACE.name]
    assert (row.model, row.revision, row["dtype"], row.engine) == ("org/model", "revision-1", "float16", "")
    assert (row.block_tokens, row.groups, row.blocks) == (TOKENS, 1, 10)
    assert row.oldest <= row.newest
    assert str(spaces.oldest.dt.tz) == "UTC"


def test_an_empty_tier_has_empty_tables(tier: str) -> None:
    with open_store(tier) as store, kvstore.inspect.open(store) as look:
        assert len(look.namespaces()) == len(look.prefixes()) == 0
        assert "model" in look.namespaces().columns
        with pytest.raises(NotStoredError, match="no namespace"):
            look.namespace()


def test_a_namespace_is_named_by_how_its_name_begins(tmp_path: Path) -> None:
    with open_store(f"lmdb://{tmp_path}/kv") as store:
        store_prompt(store)
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096), position=0)])
        with kvstore.inspect.open(store) as look:
            assert look.namespace(OTHER.name[:6].upper()).namespace == OTHER
            assert look.namespaces().loc[OTHER.name].engine == "mine"
            for wanted in (None, ""):
                with pytest.raises(NotStoredError, match=r"several|2 namespaces") as error:
                    look.namespace(wanted)
                assert SPACE.name in str(error.value)
                assert OTHER.name in str(error.value)
            with pytest.raises(NotStoredError, match="starts with 'zz'"):
                look.namespace("zz")
            assert set(look.prefixes().namespace) == {SPACE.name, OTHER.name}


def test_blocks_are_chosen_by_label_and_tenant(local: str) -> None:
    with open_store(local) as store:
        store_prompt(store)
        store.mark_many(SPACE, KEYS[:4], Mark("handbook", pinned=True, tenant="acme"))
        store.mark_many(SPACE, KEYS[2:6], Mark("prices"))
    with kvstore.inspect.open(local) as look:
        space = look.namespace()
        assert list(space.blocks(label="handbook").position) == [0, 1, 2, 3]
        assert list(space.blocks(label="prices", tenant="acme").position) == [2, 3]
        assert list(space.blocks(tenant="nobody").position) == []
        blocks = space.blocks()
        assert list(blocks.labels[2:5]) == [("handbook", "prices"), ("handbook", "prices"), ("prices",)]
        assert list(blocks.tenants[3:5]) == [("acme",), ()]
        assert list(blocks.pinned) == [True] * 4 + [False] * 6
        assert look.namespaces().labels.iloc[0] == ("handbook", "prices")


def test_a_prefix_is_a_row_for_each_leaf_and_each_end_of_a_label(local: str) -> None:
    with open_store(local) as store:
        store_prompt(store)
        other = store_prompt(store, tokens=[*PROMPT[:20], 7, 7, 7, 7])
        store.mark_many(SPACE, KEYS[:3], Mark("handbook"))
    with kvstore.inspect.open(local) as look:
        prefixes = look.namespace().prefixes().set_index("digest")
    assert list(prefixes.index) == [KEYS[-1].digest.hex(), other[-1].digest.hex(), KEYS[2].digest.hex()]
    assert list(prefixes.blocks) == [10, 6, 3]
    assert list(prefixes.tokens) == [40, 24, 12]
    assert list(prefixes.labels) == [(), (), ("handbook",)]
    assert prefixes.complete.all()
    sizes = prefixes.bytes / prefixes.blocks
    assert sizes.nunique() == 1
    assert sizes.iloc[0] > SPACE.block_bytes()


def test_hits_and_uses_are_those_of_the_tier(tmp_path: Path) -> None:
    from kvstore import BlockRead

    url = f"lmdb://{tmp_path}/kv"
    with open_store(url) as store:
        store_prompt(store)
        for _ in range(3):
            store.get_many_into(SPACE, [BlockRead(KEYS[4], bytearray(SPACE.block_bytes()))])
    with kvstore.inspect.open(url) as look:
        blocks = look.namespace().blocks()
        assert list(blocks.hits) == [0] * 4 + [3] + [0] * 5
        assert blocks.last_used[4] == blocks.last_used.max() > blocks.created[4]
        assert look.namespace().prefixes().hits.iloc[0] == 3


def test_a_view_is_as_of_its_first_question_until_it_looks_again(tmp_path: Path) -> None:
    with open_store(f"lmdb://{tmp_path}/kv") as store, kvstore.inspect.open(store) as look:
        store_prompt(store, tokens=PROMPT[:8])
        space = look.namespace()
        assert len(space.blocks()) == 2
        store_prompt(store)
        assert len(space.blocks()) == space.tree().blocks == space.summary.blocks == 2
        assert len(look.namespace().blocks()) == 10
        space.refresh()
        assert len(space.blocks()) == space.tree().blocks == space.summary.blocks == 10


def test_looking_and_reading_leave_every_file_as_it_is(local: str) -> None:
    from pathlib import Path

    with open_store(local) as store:
        store_prompt(store)
    root = Path(TierURL.parse(local).location)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "lock" not in path.name}

    before = files()
    with kvstore.inspect.open(local) as look:
        space = look.namespace()
        space.prefix(KEYS[-1].digest.hex()).xarray().load()
        space.block(KEYS[1].digest.hex()).zarr()[...]
        for shown in (look, space, space.tree()):
            assert shown._repr_html_()
    assert files() == before
    with kvstore.inspect.open(local) as look:
        assert (look.namespace().blocks().hits == 0).all()


def test_reading_makes_nothing_younger(tier: str) -> None:
    with open_store(tier) as store:
        store_prompt(store)
        before = {info.key: (info.hits, info.last_used) for info in store.scan(SPACE)}
        if not tier.startswith("memory"):
            store.close()
        with kvstore.inspect.open(tier) as look:
            assert look.namespace().block(KEYS[1].digest.hex()).bytes()
            assert {info.key: (info.hits, info.last_used) for info in look.store.scan(SPACE)} == before
        if tier.startswith("memory"):
            assert {info.key: (info.hits, info.last_used) for info in store.scan(SPACE)} == before


def test_a_buckets_blocks_are_counted_from_its_listing(s3_tier: str) -> None:
    with looking(s3_tier, SPACE) as look:
        before: dict[str, int] = look.store.requests()  # type: ignore[attr-defined]
        assert look.namespaces().blocks.iloc[0] == 10
        assert look._repr_html_()
        after: dict[str, int] = look.store.requests()  # type: ignore[attr-defined]
        assert after["GET"] == before["GET"]
        assert len(look.namespace().blocks()) == 10
        assert look.store.requests()["GET"] == after["GET"] + 10  # type: ignore[attr-defined]


def test_a_place_where_nothing_is_is_an_error_and_stays_so(tmp_path: Path) -> None:
    for scheme in ("file", "lmdb"):
        with pytest.raises(StoreNotFoundError, match="nothing"):
            kvstore.inspect.open(f"{scheme}://{tmp_path}/nothing")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreNotFoundError, match="another process"):
        kvstore.inspect.open("memory://nobody")
    with pytest.raises(InvalidOptionError, match="leave out readonly"):
        kvstore.inspect.open(f"file://{tmp_path}/nothing", readonly=False)


def test_a_capacity_that_is_not_the_tiers_is_a_note(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/kv"
    with looking(url, SPACE):
        pass
    with kvstore.inspect.open(url, capacity="1GB") as look:
        assert "is not the tier's, which has none" in look.notes[0]
        assert "is not the tier&#x27;s" in look._repr_html_()


def test_a_store_that_is_open_stays_the_callers() -> None:
    with open_store("memory://callers") as store:
        store_prompt(store)
        with kvstore.inspect.open(store) as look:
            assert len(look.namespaces()) == 1
        assert store.usage().blocks == 10
        with pytest.raises(TypeError, match="capacity"):
            kvstore.inspect.open(store, capacity="1GB")
