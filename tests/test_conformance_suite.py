"""The suite of `kvstore.testing` as a third party runs it, and whether it finds what is wrong with a store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from readme_backend import code, code_lines, install_wheel

if TYPE_CHECKING:
    from pathlib import Path

FAULTS = '''
from dataclasses import replace

from kvstore import PutOutcome
from kvstore_memory import MemoryStore


class TornWrite(MemoryStore):
    """Half of each payload arrives, the rest is zeros, and STORED is what it says."""

    def put_many(self, namespace, blocks):
        for block in blocks:
            namespace.check_write(block)
        return super().put_many(namespace, [replace(block, data=half(block.data)) for block in blocks])


def half(data):
    whole = bytes(memoryview(data).cast("B"))
    return whole[: len(whole) // 2].ljust(len(whole), b"\\0")


class WrongKey(MemoryStore):
    """The blocks of a batch are stored under each other's keys, where they are of one size."""

    def put_many(self, namespace, blocks):
        given = [block.data for block in blocks]
        if len({memoryview(data).nbytes for data in given}) == 1:
            blocks = [replace(block, data=data) for block, data in zip(blocks, given[1:] + given[:1])]
        return super().put_many(namespace, blocks)


class LostDelete(MemoryStore):
    """A delete says what was there, and leaves it."""

    def delete_many(self, namespace, keys):
        return self.contains_many(namespace, keys)
'''

SUITE = """
import pytest
from kvstore.testing import StoreTests, run_against_a_dictionary


class TestFaulty(StoreTests):
    @pytest.fixture
    def url(self, tmp_path):
        return f"{scheme}://{{tmp_path}}"

    def test_a_store_answers_as_a_dictionary_would(self, url):
        run_against_a_dictionary(url, runs=60)  # four times the usual: chance may miss a fault
"""

IN_THE_MODEL = "test_a_store_answers_as_a_dictionary_would"


@pytest.fixture(scope="module")
def faulty_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores with one fault each, installed as any other backend."""
    schemes = {"torn-write": "faulty:TornWrite", "wrong-key": "faulty:WrongKey", "lost-delete": "faulty:LostDelete"}
    return install_wheel(tmp_path_factory.mktemp("faulty"), "faulty", {"faulty.py": FAULTS}, schemes)


def run_suite(folder: Path, site: Path, tests: str) -> tuple[int, set[str]]:
    """Run it in a folder and a process of its own: how many of its tests passed, and the names of those that failed."""
    (folder / "test_it.py").write_text(tests)
    # The model finds a fault by chance: the same chance in every run.
    options = ["-q", "--tb=line", "-rfE", "-p", "no:cacheprovider", "--basetemp=tmp", "--hypothesis-seed=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    assert not re.search(r"^ERROR ", done.stdout, re.MULTILINE), done.stdout
    return int(passed[1]), set(re.findall(r"^FAILED test_it\.py::\w+::(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("torn-write", "test_a_block_comes_back_as_it_was_put"),
        ("wrong-key", "test_outcomes_come_in_the_order_given"),
        ("lost-delete", "test_a_deleted_block_is_gone_and_may_be_put_anew"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, faulty_site: Path, fault: str, caught_by: str) -> None:
    passed, failed = run_suite(tmp_path, faulty_site, SUITE.format(scheme=fault))
    assert {caught_by, IN_THE_MODEL} <= failed
    assert passed > 20  # and the rest of the store works


def test_the_readme_store_passes_the_tests_that_the_readme_shows(tmp_path: Path) -> None:
    passed, failed = run_suite(tmp_path, readme_store(tmp_path, code("python")), code("python", 1))
    assert failed == set()
    assert passed > 80


def test_a_checksum_that_knows_nothing_of_the_key_is_caught(tmp_path: Path) -> None:
    """Right bytes under the wrong key, as a rename puts them there."""
    careless = code("python") + "\n\nfrom kvstore import values\n\nvalues.address_of = lambda namespace, key: b''\n"
    _, failed = run_suite(tmp_path, readme_store(tmp_path, careless), code("python", 1))
    assert failed == {
        "test_two_blocks_swapped",
        "test_a_block_in_the_place_of_another",
        "test_a_copy_elsewhere",
        "test_a_tier_of_another_namespace_renamed_into_this_one",
    }


def readme_store(folder: Path, source: str) -> Path:
    """The README's store, or a variant of it, installed."""
    return install_wheel(folder, "kvstore-dir", {"kvstore_dir.py": source}, {"dir": "kvstore_dir:DirectoryStore"})


def test_a_suite_without_a_url_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from kvstore.testing import StoreTests\nclass TestIt(StoreTests):\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_a_miss_is_a_value", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TestIt has to override the fixture `url`" in done.stdout


def test_the_readme_store_is_as_short_as_it_claims() -> None:
    assert code_lines(code("python")) <= 40


def test_nothing_in_kvstore_needs_what_only_tests_need() -> None:
    code = (
        "import sys, kvstore, kvstore.tiering, kvstore.cli, kvstore_memory, kvstore_zarr, kvstore_lmdb;"
        "print(*{'pytest', 'hypothesis', 'kvstore.testing'} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
