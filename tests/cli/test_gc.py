"""`kvstore gc`: what is to go is said, and goes only when it is to; nothing else ever does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cli_helpers import KEYS, MODEL, OTHER, machine, tree

from kvstore import BlockWrite, Mark, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.testing.clock import movable_clock
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.clock import MovableClock

HOUR = 3600.0
SCHEMES = ("file", "lmdb", "zarr+local", "dir")


@pytest.fixture
def clock() -> Iterator[MovableClock]:
    with movable_clock() as clock:
        yield clock


@pytest.fixture(params=SCHEMES)
def old_tier(request: pytest.FixtureRequest, tmp_path: Path, clock: MovableClock, scheme: str) -> str:
    """Six blocks of one namespace, two of another; eight hours ago, as far as this process knows."""
    del scheme
    url = f"{request.param}://{tmp_path}/kv"
    with open_store(url) as store:
        for space in (MODEL, OTHER):
            size = space.block_bytes()
            blocks = [BlockWrite(key, bytes(size), position=place) for place, key in enumerate(KEYS[:6])]
            store.put_many(space, blocks if space is MODEL else blocks[:2])
    clock.advance(8 * HOUR)
    return url


def blocks_of(url: str) -> dict[str, int]:
    with open_store(url) as store:
        return {space.model: sum(1 for _ in store.scan(space)) for space in store.namespaces()}


def removed(said: dict[str, Any]) -> dict[str, int]:
    return {
        name: said["removed"][name] for name in ("expired", "over", "dropped", "namespaces") if said["removed"][name]
    }


def test_without_yes_nothing_is_changed(old_tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = TierURL.parse(old_tier).location
    before = tree_of(folder)
    said = machine(capsys, "gc", old_tier, "--ttl", "7h")
    assert (said["dry_run"], said["to_go"]["blocks"], said["removed"]) == (True, 8, None)
    assert {space["model"]: space["expired"] for space in said["namespaces"]} == {"org/model": 6, "org/other": 2}
    assert machine(capsys, "gc", old_tier, "--ttl", "9h")["to_go"]["blocks"] == 0
    assert run(["gc", old_tier, "--ttl", "7h"]) == EXIT_OK
    assert "--yes removes them" in capsys.readouterr().out
    assert blocks_of(old_tier) == {"org/model": 6, "org/other": 2}
    assert before <= tree_of(folder)


def tree_of(folder: str) -> set[str]:
    from pathlib import Path

    return set(tree(Path(folder)))


def test_what_has_expired_goes_and_what_is_young_stays(
    old_tier: str, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    if old_tier.startswith("zarr"):  # the file system dates its files: there everything is as old
        assert removed(machine(capsys, "gc", old_tier, "--ttl", "7h", "--yes")) == {"expired": 8}
        assert blocks_of(old_tier) == {"org/model": 0, "org/other": 0}
        return
    with open_store(old_tier) as store:
        store.put_many(MODEL, [BlockWrite(KEYS[9], bytes(8192))])
    said = machine(capsys, "gc", f"{old_tier}?ttl=7h", "--yes")
    assert removed(said) == {"expired": 8}
    assert said["removed"]["bytes"] >= 6 * 8192 + 2 * 4096
    assert blocks_of(old_tier) == {"org/model": 1, "org/other": 0}
    clock.advance(HOUR)
    assert removed(machine(capsys, "gc", old_tier, "--ttl", "7h", "--yes")) == {"namespaces": 1}
    assert blocks_of(old_tier) == {"org/model": 1}


def test_the_oldest_go_until_the_rest_is_within_the_capacity(old_tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(old_tier) as store:
        occupied = store.excess(0)
        infos = {info.key: info for space in store.namespaces() for info in store.scan(space)}
    nbytes = max(info.stored_bytes for info in infos.values())
    capacity = occupied - 2 * nbytes + 1
    said = machine(capsys, "gc", old_tier, "--capacity", str(capacity), "--yes")
    assert said["removed"]["over"] in (2, 3, 4)
    assert said["removed"]["bytes"] >= 2 * nbytes - 1
    assert said["left_over_capacity"] == 0
    assert sum(blocks_of(old_tier).values()) == 8 - said["removed"]["over"]
    assert machine(capsys, "gc", old_tier, "--capacity", "1GB", "--yes")["removed"]["over"] == 0


@pytest.mark.parametrize("scheme_", ["file", "lmdb"])
def test_pinned_blocks_stay_and_are_said_to_be_too_many(
    scheme_: str, tmp_path: Path, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme_}://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:6]])
        store.mark_many(OTHER, KEYS[:2], Mark("handbook", pinned=True))
    clock.advance(8 * HOUR)
    assert removed(machine(capsys, "gc", url, "--ttl", "1h", "--yes")) == {"expired": 4}
    assert blocks_of(url) == {"org/other": 2}
    said = machine(capsys, "gc", url, "--capacity", "1", "--yes", exit_code=EXIT_NOT_INTACT)
    assert said["left_over_capacity"] > 8192
    assert blocks_of(url) == {"org/other": 2}


def test_a_namespace_goes_as_a_whole_and_nothing_else(old_tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = machine(capsys, "gc", f"{old_tier}?ttl=1h", "--namespace", OTHER.name[:8])
    assert (said["to_go"]["blocks"], [space["model"] for space in said["namespaces"]]) == (2, ["org/other"])
    assert blocks_of(old_tier) == {"org/model": 6, "org/other": 2}
    said = machine(capsys, "gc", old_tier, "--namespace", OTHER.name[:8], "--yes")
    assert removed(said) == {"dropped": 2, "namespaces": 1}
    assert blocks_of(old_tier) == {"org/model": 6}


def test_nothing_is_made_and_nothing_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/kv"
    assert run(["gc", url, "--yes"]) == EXIT_USAGE
    assert not (tmp_path / "kv").exists()
    with open_store(url):
        pass
    for words in (["--ttl", "0"], ["--ttl", "soon"], ["--capacity", "80%"], ["--yes", "--dry-run"]):
        assert run(["gc", url, *words]) == EXIT_USAGE
    assert run(["gc", f"{url}?readonly=true", "--yes"]) == EXIT_USAGE
    assert run(["gc", url, "--namespace", "f"]) == EXIT_USAGE
    assert "no namespace starts with" in capsys.readouterr().err


def test_what_dead_writers_left_is_found_and_goes(
    tmp_path: Path, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"zarr+local://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:2]])
    draft, mine = tmp_path / "kv" / ".drafts" / "0123", tmp_path / "kv" / "notes.txt"
    draft.parent.mkdir(exist_ok=True)
    draft.write_bytes(bytes(100))
    mine.write_text("mine")
    assert machine(capsys, "gc", url, "--yes")["removed"]["leftovers"] == 0  # somebody may be writing it
    clock.advance(2 * HOUR)
    said = machine(capsys, "gc", url, "--yes")
    assert (said["removed"]["leftovers"], said["leftovers"][0]["place"]) == (1, ".drafts/0123")
    assert not draft.exists()
    assert mine.read_text() == "mine"
    assert blocks_of(url) == {"org/other": 2}


@pytest.mark.parametrize("options", ["", "?remote=true"], ids=["local", "remote"])
def test_folders_of_namespaces_that_have_neither_manifest_nor_blocks_are_named_and_go(
    options: str, tmp_path: Path, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    url, root = f"file://{tmp_path}/kv{options}", tmp_path / "kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:2]])
    purged, made, mine, blocks = (root / (letter * 32) for letter in "abcd")
    (purged / "g0" / "1f").mkdir(parents=True)
    (purged / "g0" / "zarr.json").write_text("{}")
    made.mkdir()
    for folder, name in ((mine, "notes.txt"), (blocks, "g0/ab/1.2.3")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(bytes(100))
    said = machine(capsys, "gc", url, "--yes")
    assert (said["leftovers"], said["removed"]["leftovers"]) == ([], 0)  # somebody may be making them
    assert purged.exists()
    assert made.exists()
    clock.advance(2 * HOUR)
    said = machine(capsys, "gc", url)
    named = {leftover["place"].rstrip("/").partition("/")[0] for leftover in said["leftovers"]}
    assert named == {purged.name, made.name}
    assert (purged / "g0" / "zarr.json").exists()
    said = machine(capsys, "gc", url, "--yes")
    assert said["removed"]["leftovers"] == 2
    assert not purged.exists()
    assert not made.exists()
    assert (mine / "notes.txt").exists()
    assert (blocks / "g0" / "ab" / "1.2.3").exists()
    assert blocks_of(url) == {"org/other": 2}
    assert machine(capsys, "gc", url)["leftovers"] == []


def test_what_has_no_age_is_said_to_have_none(
    tmp_path: Path, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        store.purge_many(OTHER, KEYS[:1])
    clock.advance(2 * HOUR)
    assert run(["gc", url]) == EXIT_OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left over: ")]
    assert line.endswith(" B")
    assert "tombstones that have ended" in line
