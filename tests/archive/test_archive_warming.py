"""A manager that begins with archives: in the background, whatever they are like."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from archive_helpers import KEYS, LABEL, SPACE, filled, values

from kvstore import open_store
from kvstore.archive import create
from kvstore.errors import ConfigurationError
from kvstore.testing.faults import FaultyStore
from kvstore.testing.patience import PATIENCE, within
from kvstore.tiering import SecondaryTier, TieringManager

if TYPE_CHECKING:
    from kvstore.testing.faults import Hanging


def archived(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/archives/one"
    with open_store(filled(tmp_path / "source")) as store:
        create(url, store, SPACE, KEYS, label=LABEL)
    return url


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_new_tier_answers_from_the_archive(tmp_path: Path, scheme: str) -> None:
    url = archived(tmp_path)
    with TieringManager(SPACE, [f"{scheme}://{tmp_path}/new"], primary_slots=16, archives=[url]) as manager:
        assert manager.warming is not None
        assert manager.warming.wait(PATIENCE)
        assert [report.complete for report in manager.warming.reports] == [True]
        loaded: list[bytes] = []
        assert manager.load_prefix(KEYS, lambda _, view: loaded.append(view.tobytes())) == len(KEYS)
    assert loaded == [values(SPACE, key).tobytes() for key in KEYS]


def test_what_cannot_be_restored_is_told_and_the_rest_is_restored(tmp_path: Path) -> None:
    good = archived(tmp_path)
    other = replace(SPACE, revision="revision-2")
    nothing = f"file://{tmp_path}/nothing"
    with TieringManager(SPACE, [f"file://{tmp_path}/new"], primary_slots=16, archives=[nothing, good]) as manager:
        assert manager.warming is not None
        assert manager.warming.wait(PATIENCE)
        assert list(manager.warming.errors) == [nothing]
        assert "there is no archive" in manager.warming.errors[nothing]
        assert [report.archive.url for report in manager.warming.reports] == [good]
    with TieringManager(other, [f"file://{tmp_path}/new"], primary_slots=16, archives=[good]) as manager:
        assert manager.warming is not None
        assert manager.warming.wait(PATIENCE)
        assert "revision: 'revision-1' there, 'revision-2' here" in manager.warming.errors[good]


def test_a_tier_that_hangs_holds_up_neither_step_nor_close(tmp_path: Path, hanging: Hanging) -> None:
    url = archived(tmp_path)
    with open_store(f"file://{tmp_path}/new") as inner:
        store = FaultyStore(inner)
        store.plan |= {"contains": hanging, "put": hanging}
        with within(0.5):
            manager = TieringManager(SPACE, [store], primary_slots=16, archives=[url])
            for _ in range(20):
                manager.step()
        with within(1.0):
            manager.close(timeout=1.0)
        assert manager.warming is not None
        assert not manager.warming.reports
        hanging.release()
        assert manager.warming.wait(PATIENCE)


def test_words_that_are_no_urls_are_errors_at_once_and_open_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        TieringManager(SPACE, [f"file://{tmp_path}/new"], primary_slots=4, archives=["/no/url"])
    assert not (tmp_path / "new").exists()
    tier = SecondaryTier(f"memory://{tmp_path.name}", SPACE)
    with pytest.raises(ConfigurationError, match="first tier"):
        TieringManager(SPACE, [tier], primary_slots=4, archives=[f"file://{tmp_path}/one"])
    tier.close(1.0)


def test_a_process_ends_although_its_warming_hangs(tmp_path: Path) -> None:
    code = f"""
from archive_helpers import SPACE
from kvstore import open_store
from kvstore.archive import Warming
from kvstore.testing.faults import FaultyStore, Hanging
store, hanging = FaultyStore(open_store("memory://hangs")), Hanging()
store.plan["put"] = hanging
warming = Warming(store, SPACE, [{archived(tmp_path)!r}])
while not hanging.waiting:
    assert not warming.wait(0.01)
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False,
                          cwd=Path(__file__).parent)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
