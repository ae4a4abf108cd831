"""A tier begins with archives: what one engine stored and labelled, the first request of another finds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from driver import Driver, keys, kvstore_tier

from kvstore import open_store
from kvstore.archive import create, select
from kvstore.vllm.lookups import block_key

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PROMPT = keys(6)
SHORT = keys(6, digest_bytes=16)
PARAMS = {"kvstore": {"label": "handbook"}}


def archived(folder: Path, names: list[bytes] = PROMPT, **options: Any) -> str:
    """An archive of a prompt that an engine computed."""
    tier, archive = f"file://{folder}/old", f"file://{folder}/archives/handbook"
    with Driver([kvstore_tier(tier)], **options) as engine:
        engine.store(names, params=PARAMS)
    with open_store(tier) as store:
        (space,) = store.namespaces()
        # By keys: an older vLLM does not say where in its prefix a block stands, and a label alone gives no order.
        chosen = select(store, space, keys=[block_key(name) for name in names])
        create(archive, store, space, chosen, label="handbook")
    return archive


def test_the_first_request_of_a_new_engine_finds_them(tmp_path: Path) -> None:
    archive = archived(tmp_path)
    with Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive]}]) as engine:
        assert engine.tiers[0].warming.wait(60)
        assert engine.load(PROMPT) == len(PROMPT)


def test_how_long_digests_are_is_seen_at_the_first_key_and_the_archives_are_compared_again(tmp_path: Path) -> None:
    archive = archived(tmp_path, SHORT)
    with Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive]}]) as engine:
        assert engine.tiers[0].warming.wait(60)
        assert "digest" in engine.tiers[0].warming.errors[archive]
        engine.load(SHORT)
        assert engine.tiers[0].warming.wait(60)
        assert engine.tiers[0].warming.errors == {}
        assert engine.load(SHORT) == len(SHORT)


def test_one_of_other_blocks_is_a_warning_and_the_engine_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = archived(tmp_path, row_bytes=4096)
    with (
        caplog.at_level(logging.WARNING),
        Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive]}]) as engine,
    ):
        assert engine.tiers[0].warming.wait(60)
        assert "layouts" in engine.tiers[0].warming.errors[archive]
        assert engine.load(PROMPT) == 0
        assert engine.store(PROMPT) == len(PROMPT)
    assert "layouts" in caplog.text


def counted(tier: Any) -> dict[str, float]:
    """What the tier's metrics say of archives."""
    observed: dict[str, float] = tier.get_stats().reduce()
    return {name.split(":")[1]: value for name, value in observed.items() if "archive" in name}


def test_the_metrics_say_what_became_of_each(tmp_path: Path) -> None:
    archive, nothing = archived(tmp_path), f"file://{tmp_path}/nothing"
    with Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive, nothing]}]) as engine:
        (tier,) = engine.tiers
        assert tier.warming.wait(60)
        assert counted(tier) == {
            "kvstore_restored_archives": 1,
            "kvstore_failed_archives": 1,
            "kvstore_waiting_archives": 0,
            "kvstore_archive_blocks": len(PROMPT),
        }
    with Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive]}]) as engine:
        (tier,) = engine.tiers
        assert tier.warming.wait(60)
        assert counted(tier)["kvstore_archive_blocks"] == 0


def test_the_metrics_never_go_back_when_archives_are_compared_again(tmp_path: Path) -> None:
    archive = archived(tmp_path, SHORT)
    with Driver([{**kvstore_tier(f"lmdb://{tmp_path}/new"), "archives": [archive]}]) as engine:
        (tier,) = engine.tiers
        assert tier.warming.wait(60)
        before = counted(tier)
        assert before["kvstore_failed_archives"] == 1
        engine.load(SHORT)
        assert tier.warming.wait(60)
        steps = {name: step for name, step in counted(tier).items() if "waiting" not in name}
        assert steps == {"kvstore_restored_archives": 1, "kvstore_archive_blocks": len(SHORT)}


def test_nothing_is_begun_without_archives(tmp_path: Path) -> None:
    with Driver([kvstore_tier(f"file://{tmp_path}/new")]) as engine:
        assert engine.tiers[0].warming is None
