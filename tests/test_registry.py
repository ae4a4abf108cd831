"""The registry: a URL finds its backend, and what cannot be found or used says what to do about it."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from keyvalue_helpers import DictStore
from readme_backend import install, install_wheel

import kvstore
from kvstore import BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, block_keys
from kvstore.cli import EXIT_USAGE, run
from kvstore.errors import (
    ConfigurationError,
    InvalidBlockError,
    MissingDependencyError,
    StoreClosedError,
    StoreNotFoundError,
    UnknownOptionError,
    UnknownSchemeError,
)
from kvstore.registry import BUILTINS, backend_class, known_schemes
from kvstore.url import TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(4096),), block_tokens=4)
KEYS = block_keys(range(16), 4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's backend is installed."""
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def dir_scheme(site: Path, on_path: OnPath) -> None:
    """`dir://` is installed while the test runs."""
    on_path(site, "kvstore_dir")


class OnPath:
    """Puts folders on `sys.path`; their modules are forgotten afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.modules: list[str] = []

    def __call__(self, folder: Path, *modules: str) -> None:
        self._monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        self.modules += modules


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnPath]:
    used = OnPath(monkeypatch)
    yield used
    for module in used.modules:
        sys.modules.pop(module, None)


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownSchemeError, match="Did you mean memory://") as refused:
        kvstore.open_store("memroy://kv")
    assert all(scheme in str(refused.value) for scheme in BUILTINS)
    assert "kvstore.backends" in str(refused.value)


def test_a_format_is_part_of_the_scheme() -> None:
    assert backend_class(TierURL.parse("zarr+file:///kv")) is backend_class(TierURL.parse("file:///kv"))
    with pytest.raises(UnknownSchemeError, match="no backend for lmdb\\+file://"):
        kvstore.open_store("lmdb+file:///kv")


@pytest.mark.usefixtures("dir_scheme")
def test_a_package_that_is_installed_adds_its_scheme(tmp_path: Path) -> None:
    assert "dir" in known_schemes()
    with kvstore.open_store(f"dir://{tmp_path}/kv") as store:
        assert type(store).__name__ == "DirectoryStore"


@pytest.mark.usefixtures("dir_scheme")
def test_the_options_of_an_installed_backend_are_checked_like_those_of_a_built_in(tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError, match="dir:// knows:\n  readonly"):
        kvstore.open_store(f"dir://{tmp_path}/kv?capacity=1GB")


def test_a_built_in_scheme_cannot_be_replaced(tmp_path: Path, on_path: OnPath) -> None:
    rogue = "from kvstore_memory import MemoryStore as Base\nclass Rogue(Base): pass\n"
    on_path(install_wheel(tmp_path, "rogue-memory", {"rogue.py": rogue}, {"memory": "rogue:Rogue"}), "rogue")
    assert backend_class(TierURL.parse("memory://kv")).__module__ == "kvstore_memory"


@pytest.mark.usefixtures("dir_scheme")
def test_a_scheme_that_two_packages_claim_is_an_error(tmp_path: Path, on_path: OnPath) -> None:
    on_path(install_wheel(tmp_path, "other-dir", {}, {"dir": "other:Store"}))
    with pytest.raises(ConfigurationError, match=r"kvstore-dir \(kvstore_dir:.*other-dir \(other:Store\)"):
        kvstore.open_store(f"dir://{tmp_path}/kv")


@pytest.mark.usefixtures("dir_scheme")
def test_a_package_that_is_found_twice_claims_its_scheme_once(tmp_path: Path, on_path: OnPath) -> None:
    on_path(install(tmp_path))
    kvstore.open_store(f"dir://{tmp_path}/kv").close()


def test_a_missing_dependency_says_how_to_install_it(tmp_path: Path, on_path: OnPath) -> None:
    modules = {"needy.py": "import nosuchclient.api\n"}
    on_path(install_wheel(tmp_path, "needy", modules, {"needy": "needy:Store"}), "needy")
    with pytest.raises(MissingDependencyError, match=r"pip install nosuchclient$") as refused:
        kvstore.open_store("needy://host")
    assert isinstance(refused.value, ImportError)


def test_a_dependency_that_is_there_and_unfit_is_not_called_missing(tmp_path: Path, on_path: OnPath) -> None:
    modules = {"picky.py": "from json import no_such_name\n"}
    on_path(install_wheel(tmp_path, "picky", modules, {"picky": "picky:Store"}), "picky")
    with pytest.raises(MissingDependencyError, match="cannot be used here: cannot import name 'no_such_name'"):
        kvstore.open_store("picky://host")


@pytest.mark.parametrize("path", ["odd:Store", "odd:number", "odd:Plain"])
def test_an_entry_point_that_is_no_backend_is_an_error_that_names_the_package(
    tmp_path: Path, on_path: OnPath, path: str
) -> None:
    modules = {"odd.py": "number = 1\nclass Plain: pass\n"}
    on_path(install_wheel(tmp_path, "odd-package", modules, {"odd": path}), "odd")
    with pytest.raises(ConfigurationError, match="odd-package"):
        kvstore.open_store("odd://host")


# The README's backend keeps the contract


def read(store: kvstore.BlockStore, *keys: kvstore.BlockKey) -> list[tuple[GetOutcome, bytes]]:
    buffers = [bytearray(4096) for _ in keys]
    outcomes = store.get_many_into(SPACE, list(map(BlockRead, keys, buffers)))
    return [(outcome, bytes(buffer)) for outcome, buffer in zip(outcomes, buffers, strict=True)]


@pytest.mark.usefixtures("dir_scheme")
def test_the_readme_backend_gives_back_what_was_put(tmp_path: Path) -> None:
    blocks = [BlockWrite(key, np.full(4096, number, np.uint8)) for number, key in enumerate(KEYS)]
    with kvstore.open_store(f"dir://{tmp_path}/kv") as store:
        assert store.put_many(SPACE, blocks[:3]) == [PutOutcome.STORED] * 3
        assert store.put_many(SPACE, blocks[2:3]) == [PutOutcome.EXISTS]
    with kvstore.open_store(f"dir://{tmp_path}/kv") as store:
        assert store.namespaces() == [SPACE]
        assert store.contains_many(SPACE, KEYS) == [True, True, True, False]
        assert [outcome for outcome, _ in read(store, *KEYS)] == [GetOutcome.HIT] * 3 + [GetOutcome.MISS]
        assert [data[0] for _, data in read(store, *KEYS[:3])] == [0, 1, 2]
        assert {info.key for info in store.scan(SPACE)} == set(KEYS[:3])
        assert store.usage().blocks == 3
        assert store.delete_many(SPACE, KEYS) == [True, True, True, False]
        assert store.usage().blocks == 0
    with pytest.raises(StoreClosedError):
        store.usage()


@pytest.mark.usefixtures("dir_scheme")
def test_the_readme_backend_finds_damaged_and_misplaced_blocks(tmp_path: Path) -> None:
    with kvstore.open_store(f"dir://{tmp_path}/kv") as store:
        store.put_many(SPACE, [BlockWrite(key, bytes(4096)) for key in KEYS])
        files = [tmp_path / "kv" / name_of(SPACE, key) for key in KEYS]
        files[0].write_bytes(b"\1" + files[0].read_bytes()[1:])
        files[1].write_bytes(files[1].read_bytes() + b"\0")
        files[2].write_bytes(files[3].read_bytes())
        assert [outcome for outcome, _ in read(store, *KEYS)] == [GetOutcome.CORRUPT] * 3 + [GetOutcome.HIT]
        assert store.contains_many(SPACE, KEYS) == [False, False, False, True]
        with pytest.raises(InvalidBlockError):
            store.put_many(SPACE, [BlockWrite(KEYS[0], bytes(4095))])


@pytest.mark.usefixtures("dir_scheme")
def test_the_readme_backend_changes_nothing_when_it_is_read_only(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        kvstore.open_store(f"dir://{tmp_path}/kv", readonly=True)
    assert not (tmp_path / "kv").exists()
    with kvstore.open_store(f"dir://{tmp_path}/kv") as store:
        store.put_many(SPACE, [BlockWrite(KEYS[0], bytes(4096))])
    file = tmp_path / "kv" / name_of(SPACE, KEYS[0])
    file.write_bytes(bytes(4096))
    with kvstore.open_store(f"dir://{tmp_path}/kv", readonly=True) as store:
        assert store.put_many(SPACE, [BlockWrite(KEYS[1], bytes(4096))]) == [PutOutcome.FAILED]
        assert store.delete_many(SPACE, KEYS[:1]) == [False]
        assert [outcome for outcome, _ in read(store, KEYS[0])] == [GetOutcome.CORRUPT]
    assert file.exists()


@pytest.mark.parametrize("url", ["file:///tmp/x", "lmdb:///tmp/x", "memory://x", "s3://b/x", "gs://b", "redis://h/0"])
def test_what_comes_over_a_network_is_known_before_it_is_opened(url: str) -> None:
    parsed = TierURL.parse(url)
    assert backend_class(parsed).remote is (parsed.scheme in {"s3", "gs", "redis"})
    assert backend_class(TierURL.parse("file:///tmp/x?remote=true")).remote


class TestAPackageWhoseBackendIsNotWhole:
    PATH = "from kvstore_memory import MemoryStore\nfrom kvstore import BlockStore\n"

    @pytest.mark.parametrize(
        ("source", "says"),
        [
            ("class Store(BlockStore): pass\n", "which lacks close, contains_many, .*usage"),
            (
                "class Store(MemoryStore):\n    def __init__(self, url): pass\n    def close(self): pass\n",
                "which lacks cap",
            ),
            ("class Store(MemoryStore):\n    def __init__(self, url): self.capabilities\n", "which lacks capabilities"),
        ],
    )
    def test_what_it_lacks_is_said(
        self, source: str, says: str, tmp_path: Path, on_path: OnPath, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wheel = install_wheel(tmp_path, "half", {"half.py": self.PATH + source}, {"half": "half:Store"})
        on_path(wheel, "half")
        with pytest.raises(ConfigurationError, match=f"half:// is half:Store, {says}"):
            kvstore.open_store("half://kv")
        assert run(["stat", "half://kv"]) == EXIT_USAGE
        assert "Traceback" not in capsys.readouterr().err

    def test_what_it_raises_is_its_own_fault(
        self, tmp_path: Path, on_path: OnPath, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = "class Store(MemoryStore):\n    def usage(self): return int('x')\n"
        on_path(install_wheel(tmp_path, "ill", {"ill.py": self.PATH + source}, {"ill": "ill:Store"}), "ill")
        with kvstore.open_store("ill://kv"):
            assert run(["top", "ill://kv", "--once"]) == EXIT_USAGE
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert "this is a fault in the package ill, which serves ill://, not in kvstore: report it there" in said


class Absent(DictStore):
    def connect(self) -> None:
        raise FileNotFoundError(self.url.location)


def test_a_path_that_a_hook_raises_gets_words() -> None:
    with pytest.raises(StoreNotFoundError, match=r"cannot be opened: /nope does not exist$"):
        Absent(TierURL.parse("absent:///nope").validated(Absent.options))
