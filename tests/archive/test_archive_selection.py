"""Which blocks are one prefix: by label, tokens, keys; and what is told where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from archive_helpers import BLOCKS, HYBRID, IDS, KEYS, LABEL, SPACE, STEP, fill, prefix

from kvstore import BlockKey, BlockWrite, Mark, open_store
from kvstore.archive import NamespaceMismatchError, SelectionError, create, differences, restore, select, warm
from kvstore.archive.selecting import Start
from kvstore.deriving import keys_of_tokens
from kvstore.errors import ConfigurationError
from kvstore.keys import KeyExtras, block_keys
from kvstore.layout import BlockLayout
from kvstore.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.abc import BlockStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with open_store(f"file://{tmp_path}/tier") as opened:
        yield opened


class TestByLabel:
    @pytest.mark.parametrize("space", [SPACE, HYBRID], ids=["one group", "three groups"])
    def test_the_blocks_of_a_label_are_a_chain_in_its_order(self, store: BlockStore, space: object) -> None:
        assert space in (SPACE, HYBRID)
        chosen = SPACE if space is SPACE else HYBRID
        keys = fill(store, chosen)
        found = select(store, chosen, label=LABEL)
        assert sorted(found) == sorted(keys)
        for group in range(len(chosen.layouts)):
            assert [key for key in found if key.group == group] == [key for key in keys if key.group == group]

    def test_a_gap_is_told_with_its_place(self, store: BlockStore) -> None:
        fill(store)
        store.delete_many(SPACE, [KEYS[2], KEYS[4]])
        with pytest.raises(SelectionError, match=r"2 blocks .* at positions 2, 4: have the engine read"):
            select(store, SPACE, label=LABEL)

    def test_a_beginning_that_is_missing_is_told(self, store: BlockStore) -> None:
        fill(store)
        store.unmark_many(SPACE, KEYS[:2], Mark(LABEL))
        with pytest.raises(SelectionError, match=r"positions 0 to 1 are not there"):
            select(store, SPACE, label=LABEL)

    def test_two_prefixes_under_one_label_are_told(self, store: BlockStore) -> None:
        fill(store)
        other = block_keys([*IDS[: 3 * STEP], *range(900, 900 + 2 * STEP)], STEP)
        store.put_many(SPACE, prefix(SPACE, other))
        store.mark_many(SPACE, other, Mark(LABEL))
        with pytest.raises(SelectionError, match=r"these are 2 prefixes.*position 4.*label of its own"):
            select(store, SPACE, label=LABEL)

    def test_parts_of_two_prefixes_one_behind_the_other_are_told(self, store: BlockStore) -> None:
        fill(store)
        other = block_keys(range(900, 900 + BLOCKS * STEP), STEP)
        store.put_many(SPACE, prefix(SPACE, other))
        store.unmark_many(SPACE, KEYS[3:], Mark(LABEL))
        store.mark_many(SPACE, other[3:], Mark(LABEL))
        with pytest.raises(SelectionError, match="parts of several prefixes"):
            select(store, SPACE, label=LABEL)

    def test_blocks_without_a_position_are_told(self, store: BlockStore) -> None:
        store.put_many(SPACE, [BlockWrite(KEYS[0], bytes(SPACE.block_bytes()))])
        store.mark_many(SPACE, KEYS[:1], Mark(LABEL))
        with pytest.raises(SelectionError, match="without their position"):
            select(store, SPACE, label=LABEL)

    def test_a_label_that_nothing_has_an_empty_one_and_a_store_that_keeps_none(self, store: BlockStore) -> None:
        fill(store)
        with pytest.raises(SelectionError, match="no block of namespace"):
            select(store, SPACE, label="another")
        with pytest.raises(SelectionError, match="empty label"):
            select(store, SPACE, label="")
        with open_store("zarr+memory://selection") as other, pytest.raises(SelectionError, match="keeps no labels"):
            select(other, SPACE, label=LABEL)


class TestByTokensAndKeys:
    def test_tokens_are_cut_into_whole_blocks(self, store: BlockStore) -> None:
        fill(store)
        assert select(store, SPACE, tokens=[*IDS, 1, 2]) == KEYS
        assert select(store, SPACE, tokens=IDS[: 2 * STEP]) == KEYS[:2]

    def test_what_is_missing_is_told_with_what_can_be_had(self, store: BlockStore) -> None:
        fill(store)
        store.delete_many(SPACE, KEYS[5:])
        with pytest.raises(SelectionError, match=r"position 5: archive the tokens of the first 5 blocks alone"):
            select(store, SPACE, tokens=IDS)
        store.delete_many(SPACE, KEYS[:1])
        with pytest.raises(SelectionError, match=r"position 0: have the engine read"):
            select(store, SPACE, tokens=IDS)
        with pytest.raises(SelectionError, match="less than one block"):
            select(store, SPACE, tokens=[1, 2])

    def test_a_group_may_have_its_last_blocks_alone_while_another_has_all(
        self, store: BlockStore, tmp_path: Path
    ) -> None:
        keys = fill(store, HYBRID)
        window = [key for key in keys if key.group == 1]
        store.delete_many(HYBRID, window[:5])
        for found in (select(store, HYBRID, tokens=IDS), select(store, HYBRID, label=LABEL)):
            assert found.starts == {1: Start(5, window[4].digest)}
            assert sorted(found) == sorted(set(keys) - set(window[:5]))
        create(f"file://{tmp_path}/archive", store, HYBRID, select(store, HYBRID, label=LABEL))
        with open_store(f"lmdb://{tmp_path}/target") as target:
            assert restore(f"file://{tmp_path}/archive", target).complete
            placed = {info.key: (info.position, info.parent) for info in target.scan(HYBRID)}
        assert placed[window[5]] == (5, window[4].digest)
        assert placed == {info.key: (info.position, info.parent) for info in store.scan(HYBRID)}

    def test_keys_are_taken_as_they_are_given(self, store: BlockStore) -> None:
        fill(store)
        assert select(store, SPACE, keys=KEYS[:3]) == KEYS[:3]
        with pytest.raises(SelectionError, match="1 of 2 blocks are not there"):
            select(store, SPACE, keys=[KEYS[0], BlockKey(bytes(32))])
        with pytest.raises(SelectionError, match="nothing to archive"):
            select(store, SPACE, keys=[])
        with pytest.raises(ValueError, match="exactly one"):
            select(store, SPACE, keys=KEYS, label=LABEL)


class TestDerivedKeys:
    def test_kvstores_own_scheme_with_salt_and_adapter(self) -> None:
        assert keys_of_tokens(SPACE, IDS, salt="s") == block_keys(IDS, STEP, KeyExtras(salt="s"))
        extras = KeyExtras(adapter="a", salt="s")
        assert keys_of_tokens(SPACE, IDS, extras=extras) == block_keys(IDS, STEP, extras)
        assert keys_of_tokens(SPACE, IDS, salt="s") != keys_of_tokens(SPACE, IDS)
        with pytest.raises(ValueError, match="once"):
            keys_of_tokens(SPACE, IDS, extras=extras, salt="s")

    def test_of_each_position_one_for_every_group_and_short_digests(self) -> None:
        short = replace(HYBRID, digest_bytes=16)
        digests = [key.digest[:16] for key in KEYS]
        assert keys_of_tokens(short, IDS) == [BlockKey(digest, group) for digest in digests for group in range(3)]

    def test_vllms_scheme_is_derived_by_vllms_rules(self) -> None:
        from kvstore.vllm.keys import block_keys as vllm_keys
        from kvstore.vllm.keys import seed_digest

        extra = {
            "engine": "vllm",
            "tokens_per_hash": str(STEP),
            "blocks_per_chunk": "1",
            "hash_seed": seed_digest("0"),
            "groups": f'[{{"id": 0, "tokens_per_block": {STEP}}}]',
        }
        space = replace(SPACE, key_scheme="vllm-sha256", extra=extra)
        found = keys_of_tokens(space, IDS)
        assert found == vllm_keys(space, IDS)
        assert len(found) == BLOCKS

    def test_another_scheme_is_told_with_the_way_out(self) -> None:
        with pytest.raises(ConfigurationError, match="--label"):
            keys_of_tokens(replace(SPACE, key_scheme="of-another-engine"), IDS)


class TestNamespaces:
    def test_each_field_that_differs_is_named(self) -> None:
        other = replace(SPACE, revision="revision-2", block_tokens=8, extra={"topology": "tp=2"})
        assert [one.field for one in differences(SPACE, other)] == ["revision", "block_tokens", "extra['topology']"]
        assert differences(SPACE, replace(SPACE)) == []
        [layout] = differences(SPACE, replace(SPACE, layouts=(replace(SPACE.layouts[0], dtype="float16"),)))
        assert str(layout) == "layouts[0].dtype: 'float16' there, 'float32' here"

    def test_an_archive_of_another_namespace_restores_nothing_and_says_why(
        self, store: BlockStore, tmp_path: Path
    ) -> None:
        fill(store)
        mine, other = f"file://{tmp_path}/mine", f"file://{tmp_path}/other"
        create(mine, store, SPACE, KEYS)
        rows = [replace(SPACE, extra={"topology": f"tp={size}"}) for size in (2, 4)]
        store.put_many(rows[0], prefix(rows[0], KEYS))
        create(other, store, rows[0], KEYS)
        with open_store("memory://another-namespace") as target:
            with pytest.raises(NamespaceMismatchError, match=r"extra\['topology'\]: 'tp=2' there, 'tp=4' here"):
                warm(target, rows[1], [other])
            with pytest.raises(NamespaceMismatchError, match="topology"):
                warm(target, SPACE, [mine, other])
            with pytest.raises(NamespaceMismatchError):
                restore(other, target, namespace=SPACE)
            assert target.namespaces() == []
            assert [report.complete for report in warm(target, SPACE, [mine])] == [True]

    def test_what_four_ranks_stored_two_ranks_find_and_so_do_rows_of_any_topology(
        self, store: BlockStore, tmp_path: Path
    ) -> None:
        layout = BlockLayout.canonical(layers=2, tokens=STEP, heads=4, head_dim=8, dtype="float16")
        canonical = replace(SPACE, layouts=(layout,))
        blocks: list[BlockWrite] = []
        for written in prefix(canonical, KEYS):
            block = bytearray(layout.nbytes)
            for rank in range(4):  # each rank of four writes its own heads
                whole = layout.to_numpy(written.data)[Shards(layout, tensor=4).index(rank)]
                Shards(layout, tensor=4).to_numpy(block, rank)[:] = whole
            blocks.append(replace(written, data=block))
        store.put_many(canonical, blocks)
        create(f"file://{tmp_path}/archive", store, canonical, KEYS)
        with open_store("memory://two-ranks") as target:
            # The namespace of an engine with two ranks is the same one: its size is no part of it.
            assert warm(target, replace(canonical), [f"file://{tmp_path}/archive"])[0].complete
            from archive_helpers import held, values

            assert all(held(target, canonical, KEYS))
            second = Shards(layout, tensor=2).to_numpy(blocks[0].data, 1)
            assert (second == values(canonical, KEYS[0])[:, :, :, 2:]).all()
        rows = replace(SPACE, layouts=(BlockLayout.opaque(4096),), extra={"topology": "any"})
        store.put_many(rows, prefix(rows, KEYS))
        create(f"file://{tmp_path}/rows", store, rows, KEYS)
        with open_store("memory://rows") as target:
            assert warm(target, replace(rows, extra={"topology": "any"}), [f"file://{tmp_path}/rows"])[0].complete
