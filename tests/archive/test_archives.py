"""Archives: what goes in comes out, whole or not at all, checked to the last byte."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from archive_helpers import (
    BLOCKS,
    HYBRID,
    IDS,
    KEYS,
    LABEL,
    OPAQUE,
    SPACE,
    STEP,
    archived,
    facts,
    fill,
    filled,
    held,
    prefix,
    values,
)

from kvstore import BlockKey, BlockRead, BlockWrite, GetOutcome, PutOutcome, open_store
from kvstore.archive import (
    ArchiveExistsError,
    ArchiveHeldError,
    NoArchiveError,
    SelectionError,
    catalogue,
    create,
    open_archive,
    remove,
    restore,
    select,
)
from kvstore.archive.document import DRAFT_NAME, MANIFEST_NAME
from kvstore.archive.local import LocalClient
from kvstore.archive.removing import is_own
from kvstore.deriving import keys_of_tokens
from kvstore.errors import ConfigurationError, InvalidOptionError, InvalidURLError, StoreFullError, UnknownSchemeError
from kvstore.objects.directory_client import DRAFT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import Namespace
    from kvstore.objects.client import Listed


class TestThereAndBack:
    @pytest.mark.parametrize("space", [SPACE, HYBRID, OPAQUE], ids=["canonical", "three groups", "opaque"])
    @pytest.mark.parametrize("compression", ["none", "zstd", "blosc:9"])
    @pytest.mark.usefixtures("small_shards")
    def test_a_prefix_comes_back_with_its_positions_parents_and_label(
        self, tmp_path: Path, space: Namespace, compression: str
    ) -> None:
        url, info = archived(tmp_path, space, compression=compression)
        keys = keys_of_tokens(space, IDS)
        assert (info.blocks, info.tokens, info.label, info.name) == (len(keys), len(IDS), LABEL, "one")
        with open_store(f"lmdb://{tmp_path}/target") as store:
            report = restore(url, store)
            assert (report.restored, report.there, report.complete) == (len(keys), 0, True)
            assert report.labelled == len(keys)
            assert held(store, space, keys) == [True] * len(keys)
            restored = facts(store, space)
        with open_store(f"file://{tmp_path}/source") as source:
            assert restored == facts(source, space)

    @pytest.mark.parametrize("scheme", ["file", "lmdb"])
    def test_from_and_into_every_kind_of_tier(self, tmp_path: Path, scheme: str) -> None:
        url, _ = archived(tmp_path, tier=filled(tmp_path / "source", scheme=scheme))
        with open_store(f"{scheme}://{tmp_path}/target") as store:
            assert restore(url, store).complete
            assert all(held(store, SPACE, KEYS))

    @pytest.mark.usefixtures("small_shards")
    def test_what_is_there_is_not_written_again_and_what_is_missing_is(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        with open_store(f"file://{tmp_path}/target") as store:
            restore(url, store)
            store.delete_many(SPACE, KEYS[4:5])
            report = restore(url, store)
            assert (report.restored, report.there, report.complete) == (1, BLOCKS - 1, True)
            assert all(held(store, SPACE, KEYS))
            for shard in Path(tmp_path, "archives", "one").glob("g0/c/*/*/*/*/*"):
                shard.unlink()  # nothing is read of what nobody wants
            assert restore(url, store).complete

    def test_a_block_at_a_time_is_read_and_another_is_a_miss(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        stranger = BlockKey(bytes(32))
        with open_archive(url) as archive:
            assert archive.keys == KEYS
            assert archive.namespace == SPACE
            into = [bytearray(SPACE.block_bytes()) for _ in range(3)]
            reads = [BlockRead(key, buffer) for key, buffer in zip([KEYS[5], stranger, KEYS[0]], into, strict=True)]
            assert archive.read_many_into(reads) == [GetOutcome.HIT, GetOutcome.MISS, GetOutcome.HIT]
        assert into[0] == values(SPACE, KEYS[5]).tobytes()
        assert into[2] == values(SPACE, KEYS[0]).tobytes()

    def test_token_ids_are_kept_only_where_they_were_given(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path, tokens=[*IDS, 5])
        assert info.has_token_ids
        with open_archive(url) as archive:
            assert archive.token_ids is not None
            assert archive.token_ids.tolist() == IDS
        remove(url)
        url, info = archived(tmp_path, tier=f"file://{tmp_path}/source")
        with open_archive(url) as archive:
            assert archive.token_ids is None
        written = b"".join(file.read_bytes() for file in Path(tmp_path, "archives").rglob("*") if file.is_file())
        assert np.array(IDS[:4], "<i8").tobytes() not in written

    def test_labels_are_not_kept_where_a_tier_keeps_none(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        with open_store(f"zarr+memory://{tmp_path.name}") as store:
            report = restore(url, store)
        assert (report.complete, report.labelled) == (True, None)

    @pytest.mark.parametrize("scheme", ["file", "lmdb"])
    def test_an_encrypted_tier_seals_them_under_the_tenants_key(self, tmp_path: Path, scheme: str) -> None:
        url, _ = archived(tmp_path)
        (tmp_path / "key").write_text(os.urandom(32).hex())
        sealed = f"{scheme}://{tmp_path}/target?encryption=file:{tmp_path}/key&keyring={tmp_path}/keyring.json"
        with open_store(sealed) as store:
            assert restore(url, store, tenant="acme").complete
            assert all(held(store, SPACE, KEYS))
        keys = json.loads((tmp_path / "keyring.json").read_text())["keys"]
        assert {key["tenant"] for key in keys} == {"acme"}

    def test_what_a_tier_was_just_purged_of_is_refused_and_counted(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        with open_store(f"file://{tmp_path}/source") as store:
            store.purge_many(SPACE, KEYS[:2])
            report = restore(url, store)
            assert (report.restored, report.there, report.refused) == (0, BLOCKS - 2, 2)
            assert (report.full, report.complete) == (False, False)

    def test_a_tier_with_less_capacity_is_refused_before_it_evicts_anything(self, tmp_path: Path) -> None:
        space = replace(OPAQUE, layouts=(type(OPAQUE.layouts[0]).opaque(1 << 20),))
        url, _ = archived(tmp_path, space)
        with (
            open_store(f"file://{tmp_path}/target?capacity=5MiB") as store,
            pytest.raises(StoreFullError, match="larger tier"),
        ):
            restore(url, store)

    def test_shards_are_of_64_mib_and_blocks_stand_on_pages(self) -> None:
        from kvstore.archive.packing import SHARD_BYTES, room_for
        from kvstore.layout import BlockLayout

        assert SHARD_BYTES == 64 << 20
        rooms = {size: room_for(BlockLayout.opaque(size), 10_000) for size in (64 << 10, 2 << 20, 32 << 20, 100 << 20)}
        assert rooms == {64 << 10: 1024, 2 << 20: 32, 32 << 20: 2, 100 << 20: 1}


def test_a_restore_that_fails_leaves_nothing_to_be_written_behind_its_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = archived(tmp_path, HYBRID)  # a shard for each of three groups: two are under way when the first one fails
    begun, ended = itertools.count(1), [0.0]

    def put(_: Namespace, writes: list[BlockWrite]) -> list[PutOutcome]:
        if next(begun) == 1:
            raise OSError("the disk is gone")
        time.sleep(0.3)
        ended.append(time.monotonic())
        return [PutOutcome.STORED] * len(writes)

    with open_store(f"file://{tmp_path}/new") as store:
        monkeypatch.setattr(store, "capabilities", replace(store.capabilities, batch_bytes=1))
        monkeypatch.setattr(store, "put_many", put)
        with pytest.raises(OSError, match="the disk is gone"):
            restore(url, store)
        raised = time.monotonic()
        time.sleep(0.4)
    assert next(begun) <= BLOCKS
    assert max(ended) <= raised


class TestAtomic:
    @pytest.mark.usefixtures("small_shards")
    def test_one_in_the_making_is_none_and_is_gone_on_with(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path)
        root = tmp_path / "archives" / "one"
        (root / MANIFEST_NAME).unlink()
        (root / DRAFT_NAME).write_text("{}")
        shards = sorted(root.glob("g0/c/*/*/*/*/*"))
        shards[1].unlink()
        before = {file: file.stat().st_mtime_ns for file in shards if file.exists()}
        assert catalogue(f"file://{tmp_path}/archives") == []
        for act in (open_archive, lambda url: restore(url, None)):
            with pytest.raises(NoArchiveError):
                act(url)  # type: ignore[operator]
        told: list[int] = []
        with open_store(f"file://{tmp_path}/source") as store:
            again = create(url, store, SPACE, KEYS, label=LABEL, progress=told.append)
        assert replace(again, created=info.created, stored_bytes=info.stored_bytes) == info
        assert {file: file.stat().st_mtime_ns for file in before} == before
        assert told == [BLOCKS - 3, 3]
        assert not (root / DRAFT_NAME).exists()
        with open_archive(url) as archive:
            assert archive.verify().ok

    @pytest.mark.usefixtures("small_shards")
    @pytest.mark.parametrize("other", ["fewer blocks", "another codec", "another prefix"])
    def test_shards_of_another_plan_are_made_anew(self, tmp_path: Path, other: str) -> None:
        url, _ = archived(tmp_path, compression="zstd")
        root = tmp_path / "archives" / "one"
        (root / MANIFEST_NAME).unlink()
        (root / DRAFT_NAME).write_text("{}")
        keys = keys_of_tokens(SPACE, IDS[::-1]) if other == "another prefix" else KEYS
        keys = keys[:4] if other == "fewer blocks" else keys
        with open_store(f"file://{tmp_path}/source") as store:
            store.put_many(SPACE, prefix(SPACE, keys))
            create(url, store, SPACE, keys, compression=None if other == "another codec" else "zstd")
        with open_archive(url) as archive, open_store("memory://another-plan") as target:
            assert archive.keys == keys
            assert archive.verify().ok
            assert restore(url, target).complete
            assert all(held(target, SPACE, keys))
            target.delete_many(SPACE, keys)
        assert len(list(root.glob("g0/c/*/*/*/*/*"))) == -(-len(keys) // 3)

    def test_the_same_again_is_left_as_it_is_and_another_is_refused(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path)
        with open_store(f"file://{tmp_path}/source") as store:
            assert create(url, store, SPACE, KEYS, label=LABEL) == info
            with pytest.raises(ArchiveExistsError, match="overwrite"):
                create(url, store, SPACE, KEYS[:3], label=LABEL)
            assert create(url, store, SPACE, KEYS[:3], label=LABEL, overwrite=True).blocks == 3

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path) -> None:
        tier = filled(tmp_path / "source")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("mine")
        with open_store(tier) as store:
            for folder in ("other", "source"):
                with pytest.raises((ArchiveExistsError, ConfigurationError), match=r"no archive|one place"):
                    create(f"file://{tmp_path}/{folder}", store, SPACE, KEYS, overwrite=True)
        for folder in ("other", "source"):
            with pytest.raises(NoArchiveError):
                remove(f"file://{tmp_path}/{folder}", force=True)
        assert (tmp_path / "other" / "file").read_text() == "mine"

    def test_a_block_that_went_meanwhile_stops_it_and_leaves_no_archive(self, tmp_path: Path) -> None:
        tier = filled(tmp_path / "source")
        url = f"file://{tmp_path}/archives/one"
        with open_store(tier) as store:
            keys = select(store, SPACE, label=LABEL)
            store.delete_many(SPACE, KEYS[3:4])
            with pytest.raises(SelectionError, match=r"block 3 .*not there any more"):
                create(url, store, SPACE, keys)
            assert catalogue(f"file://{tmp_path}/archives") == []
            store.put_many(SPACE, [BlockWrite(KEYS[3], values(SPACE, KEYS[3]), 3, KEYS[2].digest)])
            create(url, store, SPACE, keys)
        remove(url)

    def test_looking_makes_no_folder(self, tmp_path: Path) -> None:
        assert catalogue(f"file://{tmp_path}/nothing") == []
        with pytest.raises(NoArchiveError):
            open_archive(f"file://{tmp_path}/nothing/at-all")
        assert list(tmp_path.iterdir()) == []


class TestKeeping:
    def test_one_that_is_to_be_kept_is_not_removed_before(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path, keep_until=time.time() + 1000)
        assert info.keep_until is not None
        with pytest.raises(ArchiveHeldError, match="to be kept until 20"):
            remove(url)
        with open_store(f"file://{tmp_path}/source") as store, pytest.raises(ArchiveHeldError):
            create(url, store, SPACE, KEYS[:2], overwrite=True)
        with open_archive(url) as archive:
            assert archive.verify().ok
        remove(url, force=True)
        with pytest.raises(NoArchiveError):
            remove(url)
        assert not (tmp_path / "archives" / "one").exists()

    def test_one_whose_time_has_come_is(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path, keep_until=time.time() - 1)
        remove(url)
        assert not (tmp_path / "archives" / "one").exists()


class TestWhatIsNotTheArchives:
    def test_an_archive_below_another_keeps_it_from_being_removed_or_overwritten(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path)
        with open_store(f"file://{tmp_path}/source") as store:
            child = create(url, store, SPACE, KEYS[:2], name="child", label="held", keep_until=time.time() + 1000)
            for force in (False, True):
                with pytest.raises(ArchiveExistsError, match="'child'"):
                    remove(url, force=force)
            with pytest.raises(ArchiveExistsError, match="'child'"):
                create(url, store, SPACE, KEYS[:3], overwrite=True)
        for one in (url, child.url):
            with open_archive(one) as archive:
                assert archive.verify().ok
        remove(child.url, force=True)
        remove(info.url)
        assert not (tmp_path / "archives" / "one").exists()

    def test_to_be_removed_or_overwritten_it_is_listed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url, _ = archived(tmp_path)
        listed: list[str] = []
        pages = LocalClient.list

        def counted(client: LocalClient, folder: str = "") -> Iterator[Sequence[Listed]]:
            listed.append(folder)
            return pages(client, folder)

        monkeypatch.setattr(LocalClient, "list", counted)
        with open_store(f"file://{tmp_path}/source") as store:
            create(url, store, SPACE, KEYS[:3], overwrite=True)
        assert listed == [""] * 3  # before, for what of the new one is there already, and in the end
        listed.clear()
        remove(url)
        assert listed == [""]
        assert not (tmp_path / "archives" / "one").exists()

    def test_drafts_of_its_own_writers_go_and_others_stay(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        mine, theirs = (tmp_path / "archives" / "one" / folder / f"{DRAFT}0" for folder in ("g0/c", "other/g0/c"))
        for draft in (mine, theirs):
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text("half of it")
        remove(url)
        assert not mine.exists()
        assert theirs.exists()

    @pytest.mark.parametrize("what", ["remove", "overwrite", "continue"])
    def test_what_somebody_keeps_in_its_folder_stays(self, tmp_path: Path, what: str) -> None:
        url, _ = archived(tmp_path, tokens=IDS)
        root = tmp_path / "archives" / "one"
        others = ["notes.txt", "g0/notes.txt", "g0/c/notes.txt", "g0/c/x/0", "papers/zarr.json", "other/g0/c/0/0"]
        for other in others:
            (root / other).parent.mkdir(parents=True, exist_ok=True)
            (root / other).write_text(other)
        if what == "remove":
            remove(url)
            assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == sorted(others)
        else:
            if what == "continue":
                (root / MANIFEST_NAME).rename(root / DRAFT_NAME)
            with open_store(f"file://{tmp_path}/source") as store:
                create(url, store, SPACE, KEYS[:2], overwrite=what == "overwrite")
            assert not (root / "tokens").exists()
            with open_archive(url) as archive:
                assert archive.verify().ok
            assert [(root / other).read_text() for other in others] == others

    def test_all_that_an_archive_consists_of_is_known_as_its_own(self, tmp_path: Path) -> None:
        archived(tmp_path, tokens=IDS)
        root = tmp_path / "archives" / "one"
        paths = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        assert len(paths) > 8
        assert [path for path in paths if not is_own(path)] == []


class TestWords:
    def test_a_url_that_is_no_folder_and_a_codec_that_is_none_are_refused(self, tmp_path: Path) -> None:
        with open_store(filled(tmp_path / "source")) as store:
            for url in (f"lmdb://{tmp_path}/x", "memory://x", "nothing://x"):
                with pytest.raises((UnknownSchemeError, InvalidOptionError)):
                    create(url, store, SPACE, KEYS)
            for codec in ("gzip", "zstd:99", "zstd:x"):
                with pytest.raises(InvalidOptionError, match="zstd"):
                    create(f"file://{tmp_path}/x", store, SPACE, KEYS, compression=codec)
            with pytest.raises(SelectionError, match="twice"):
                create(f"file://{tmp_path}/x", store, SPACE, [KEYS[0], KEYS[0]])
            with pytest.raises(SelectionError, match="nothing"):
                create(f"file://{tmp_path}/x", store, SPACE, [])
        assert not (tmp_path / "x").exists()

    def test_a_name_may_have_blanks_and_is_one_part_of_a_path(self, tmp_path: Path) -> None:
        root = f"file://{tmp_path}/archives"
        with open_store(filled(tmp_path / "source")) as store:
            info = create(root, store, SPACE, KEYS, name="hand book?")
            assert (info.name, info.url) == ("hand book?", f"{root}/hand%20book%3F")
            assert catalogue(root) == [info]
            with open_archive(info.url) as archive:
                assert archive.info == info
            for name in ("", "a/b", "..", ".hidden"):
                with pytest.raises(InvalidURLError, match="no name"):
                    create(root, store, SPACE, KEYS, name=name)

    def test_it_says_which_tier_it_was_taken_from(self, tmp_path: Path) -> None:
        _, info = archived(tmp_path)
        assert info.source == f"file://{tmp_path}/source"
        document = json.loads((tmp_path / "archives" / "one" / MANIFEST_NAME).read_text())
        assert document["kvstore_archive"]["source"] == info.source


def test_a_put_of_the_prefix_is_what_the_helpers_say(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/tier") as store:
        assert fill(store) == KEYS
        assert store.put_many(SPACE, [BlockWrite(KEYS[0], values(SPACE, KEYS[0]))]) == [PutOutcome.EXISTS]
    assert len(KEYS) * STEP == len(IDS)
