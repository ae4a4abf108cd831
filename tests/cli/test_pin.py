"""`kvstore pin` and `kvstore unpin`: by label, by namespace, by a file of keys; what cannot be pinned is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cli_helpers import KEYS, LARGE, OTHER, machine

from kvstore import BlockWrite, Mark, Namespace, block_keys, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_USAGE, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["file", "lmdb"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"{request.param}://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:4]])
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in KEYS[:2]])
        store.mark_many(OTHER, KEYS[:2], Mark("handbook", tenant="acme"))
        store.mark_many(OTHER, KEYS[1:3], Mark("handbook", tenant="zeta"))
    return url


def pinned(url: str, space: Namespace = OTHER) -> set[int]:
    with open_store(url) as store:
        return {KEYS.index(info.key) for info in store.scan(space) if info.pinned}


def test_blocks_are_pinned_by_label_and_tenant(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = machine(capsys, "pin", tier, "--label", "handbook", "--tenant", "acme")
    assert (said["blocks"], said["marked"]) == (2, 2)
    assert pinned(tier) == {0, 1}
    assert machine(capsys, "pin", tier, "--label", "handbook")["marked"] == 3
    assert pinned(tier) == {0, 1, 2}
    assert machine(capsys, "unpin", tier, "--label", "handbook", "--tenant", "acme")["unpinned"] == 2
    assert pinned(tier) == {0, 1, 2}  # by the label without a tenant
    assert machine(capsys, "unpin", tier, "--label", "handbook")["unpinned"] == 3
    assert pinned(tier) == set()
    with open_store(tier) as store:
        assert sum("handbook" in info.labels for info in store.scan(OTHER)) == 3


def test_blocks_are_pinned_by_namespace(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(capsys, "pin", tier, "--namespace", OTHER.name[:6])["marked"] == 4
    assert (pinned(tier), pinned(tier, LARGE)) == ({0, 1, 2, 3}, set())
    assert machine(capsys, "unpin", tier, "--namespace", OTHER.name[:6])["unpinned"] == 4
    assert pinned(tier) == set()


def test_blocks_are_pinned_by_a_file_of_keys(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    lines = [f"{OTHER.name} 0 {KEYS[number].digest.hex()}" for number in (3, 9)]
    file.write_text("# the handbook\n\n" + "\n".join(lines))
    said = machine(capsys, "pin", tier, "--keys", str(file), exit_code=EXIT_NOT_INTACT)
    assert (said["marked"], said["missing"]) == (1, 1)
    assert pinned(tier) == {3}
    listed = machine(capsys, "ls", tier, "--namespace", LARGE.name)
    file.write_text(json.dumps(listed))
    assert machine(capsys, "pin", tier, "--keys", str(file))["marked"] == 2
    assert pinned(tier, LARGE) == {0, 1}


@pytest.mark.parametrize(
    "text", ["x", "0011 0 00", f"{OTHER.name} 0 00", f"{OTHER.name} 7 {KEYS[0].digest.hex()}", '{"blocks": [1]}']
)
def test_a_file_that_makes_no_sense_is_an_error(tier: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    assert run(["pin", tier, "--keys", str(tmp_path / "keys")]) == EXIT_USAGE
    assert pinned(tier) == set()


def test_more_than_may_be_pinned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"lmdb://{tmp_path}/kv?capacity=4MiB"
    with open_store(url) as store:
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in block_keys(range(160), 4)])
    said = machine(capsys, "pin", url, "--namespace", LARGE.name, exit_code=EXIT_NOT_INTACT)
    assert said["marked"] + said["unpinned"] == said["blocks"]
    assert 0 < said["pinned_bytes"] <= 2 << 20
    assert said["unpinned"] > 0
    assert run(["pin", url, "--namespace", LARGE.name]) == EXIT_NOT_INTACT
    assert "of the capacity can be pinned" in capsys.readouterr().out


def test_which_blocks_has_to_be_said_once(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        [],
        ["--tenant", "acme"],
        ["--namespace", "", "--keys", "/dev/null"],
        ["--label", "a", "--keys", "/dev/null"],
    ):
        assert run(["pin", tier, *words]) == EXIT_USAGE
    capsys.readouterr()
    assert run(["pin", f"{tier}?readonly=true", "--label", "a"]) == EXIT_USAGE
    assert "leave out readonly" in capsys.readouterr().err
    assert run(["pin", f"file://{tmp_path}/nothing", "--label", "a"]) == EXIT_USAGE
    assert not (tmp_path / "nothing").exists()
    with open_store(f"zarr+local://{tmp_path}/objects") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
    assert run(["pin", f"zarr+local://{tmp_path}/objects", "--label", "a"]) == EXIT_USAGE
    assert "keeps no labels and pins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "what", "there"),
    [
        (("--label", "handbok"), "label 'handbok'", "There are labels: handbook"),
        (
            ("--label", "handbook", "--tenant", "acmee"),
            "label 'handbook' and the tenant 'acmee'",
            "tenants: acme, zeta",
        ),
    ],
)
def test_a_label_that_no_block_has_is_an_error_that_names_those_there_are(
    tier: str, asked: tuple[str, ...], what: str, there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("pin", "unpin"):
        assert run([command, tier, *asked]) == EXIT_NOT_INTACT
        said = capsys.readouterr().err
        assert f"no block has the {what}" in said
        assert there in said
    if "--tenant" not in asked:
        assert run(["cp", tier, f"file://{tmp_path}/target", *asked]) == EXIT_NOT_INTACT
        assert f"no block has the {what}. {there}" in capsys.readouterr().err
        assert not (tmp_path / "target").exists()
