"""What the command says of a later version's block, and of a namespace that cannot be served: each in its own word."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from golden_contents import LATER_S, SPACES, at
from golden_tiers import opened
from test_other_versions import ONE, VERSION, describe_as, edited, stored

from kvstore import BlockWrite
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Told = Callable[..., dict[str, Any]]

REMOTE = "?remote=true"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """What the command answers."""

    def ask(*args: str, exit_code: int = EXIT_OK) -> dict[str, Any]:
        capsys.readouterr()
        assert run([*args, "--json"]) == exit_code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return ask


@pytest.fixture(params=["file", "lmdb", "objects"])
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(name: str, copied: Path) -> str:
    return f"{'lmdb' if name == 'lmdb' else 'file'}://{copied}/{name}{REMOTE if name == 'objects' else ''}"


def test_verify_and_cp_name_it_and_only_cp_is_not_done(
    name: str, url: str, copied: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with at(LATER_S), opened(name, copied) as store:
        stored(name, copied, store, ONE, lambda data: edited(name, data, ONE, version=VERSION))
    for how in ((), ("--repair",)):
        answer = told("verify", url, *how)
        assert (answer["ok"], answer["blocks"] - answer["intact"]) == (True, 1)
        assert [one["digest"] for one in answer["later"]] == [ONE.key.digest.hex()]
        assert (answer["missing"], answer["corrupt"], answer["repaired"]) == ([], [], [])
    assert run(["verify", url]) == EXIT_OK
    line = f"of a later version: {ONE.namespace.name} group {ONE.key.group} digest {ONE.key.digest.hex()}"
    assert line in capsys.readouterr().out
    answer = told("cp", url, f"file://{copied}/target", exit_code=EXIT_NOT_INTACT)
    assert [one["digest"] for one in answer["later"]] == [ONE.key.digest.hex()]
    assert (answer["missing"], answer["corrupt"]) == ([], [])


@pytest.mark.parametrize("name", ["file", "objects"])
def test_a_namespace_that_cannot_be_served_for_damage_is_not_intact(
    name: str, url: str, copied: Path, told: Told
) -> None:
    space = SPACES["bf16"]
    manifest = copied / name / space.name / "zarr.json"
    sound = manifest.read_text()
    whole = told("verify", url)["intact"]
    describe_as(manifest, VERSION)
    assert told("verify", url)["records"] == [], "what a later version wrote is no damage"
    manifest.write_text(sound.replace('"model": "', '"model": "another '))
    answer = told("verify", url, exit_code=EXIT_NOT_INTACT)
    assert not answer["ok"]
    assert space.name in answer["records"][0]
    assert 0 < answer["intact"] < whole
    if name == "file":
        assert told("verify", url, "--repair")["records"] == []
        assert manifest.read_text() == sound
    else:
        answer = told("verify", url, "--repair", exit_code=EXIT_NOT_INTACT)
        assert "the next store into the namespace" in answer["records"][0]
        manifest.unlink()
        with opened(name, copied) as store:
            key = ONE.key.__class__(bytes(space.digest_bytes))
            store.put_many(space, [BlockWrite(key, bytes(space.block_bytes()))])
            store.delete_many(space, [key])
        assert manifest.read_text() == sound
    assert told("verify", url)["intact"] == whole
