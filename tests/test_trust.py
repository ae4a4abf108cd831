"""What kvstore never does, in any module: run what it reads, or open a door. Field report 24."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore import GetOutcome
from kvstore.testing.supply import SPACE, get, write

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for room in ("kvstore", "backends") for path in (ROOT / room).rglob("*.py") if "testing" not in path.parts
)

LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
"""Of these only what writes may be used."""
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "numpy.load", "np.load"),
    *("socket.create_server", "asyncio.start_server", "http.server", "socketserver", "xmlrpc"),
}
WRITERS = {"dumps", "dump", "safe_load"}


OWN_CHILD = ROOT / "kvstore" / "apart" / "messages.py"
"""Over an unnamed pair of sockets, between a process and the child that it started: nothing that was stored."""


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every dotted name that is called, and every module that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {name.name}") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def runs_or_listens(name: str) -> bool:
    room, _, last = name.rpartition(".")
    if name in FORBIDDEN or name.removeprefix("import ") in FORBIDDEN:
        return True
    if room in LOADERS or room.rpartition(".")[2] in LOADERS:
        return last not in WRITERS
    return last in ("listen", "bind", "serve_forever", "Unpickler", "start_server", "create_server")


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_module_deserialises_code_evaluates_text_or_listens(path: Path) -> None:
    allowed = {"pickle.loads", "import pickle"} if path == OWN_CHILD else set[str]()
    found = [
        f"{path.name}:{line}: {name}"
        for line, name in called(ast.parse(path.read_text()))
        if runs_or_listens(name) and name not in allowed
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import socket\nsocket.create_server(('', 0))",
        "sock.bind(('', 0))",
        "import http.server",
        "yaml.load(text)",
    ],
)
def test_what_would_do_so_is_seen(source: str) -> None:
    assert any(runs_or_listens(name) for _, name in called(ast.parse(source)))


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_pickle_in_a_tier_is_damage_like_any_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"{kind}://{tmp_path}/kv"
    bomb = pickle.dumps(_Bomb())
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(1)])
        if kind == "file":
            (path,) = (
                one for one in (tmp_path / "kv").rglob("*.*.*.*") if one.is_file() and one.stat().st_size > 60000
            )
            path.write_bytes(bomb.ljust(path.stat().st_size, b"\0"))
        else:
            environment = store._tier.environment  # type: ignore[attr-defined]
            with environment.write() as txn:  # its first block stands under 1
                assert txn.replace(
                    b"\1".rjust(8, b"\0"), bomb.ljust(65536 + 128, b"\0"), environment.databases["blocks"]
                )
        assert get(store, [1]) == [GetOutcome.CORRUPT]
        assert get(store, [1]) == [GetOutcome.MISS]
    assert not (tmp_path / "ran").exists()
