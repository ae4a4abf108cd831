"""The C extension: which one is used when, and that it handles memory and references well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from extension_helpers import NEEDS_COMPILER, compiled

from kvstore import native
from kvstore.native import compiling
from kvstore_zarr import calls

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@NEEDS_COMPILER
def test_an_extension_of_this_source_is_used_unless_it_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiled(tmp_path, "-Werror")
    chosen(monkeypatch, module)
    assert native._found() == (module, "")
    monkeypatch.setattr(native, "extension", module)
    made_by, how = calls._choose()
    assert how == "a block's system calls in one, from C"
    assert made_by.lock_all == module.lock_all
    monkeypatch.setenv("KVSTORE_NATIVE", "no")
    assert native._found() == (None, "KVSTORE_NATIVE=no")
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(native, "reason", "KVSTORE_NATIVE=no")
    assert calls._choose() == (calls.PYTHON, "system calls one by one, from Python (KVSTORE_NATIVE=no)")


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["calls.c", "native.h"])
def test_an_extension_of_other_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(compiling.SOURCE, other, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (other / name).open("a") as file:
        file.write("\n")
    chosen(monkeypatch, compiled(tmp_path, source=other))
    module, reason = native._found()
    assert module is None
    assert "other source" in reason


def test_an_extension_that_cannot_be_loaded_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / compiling.EXTENSION.name).write_bytes(b"no library")
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.delitem(sys.modules, "kvstore.native._native", raising=False)
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    module, reason = native._found()
    assert module is None
    assert "cannot be used" in reason
    assert str(tmp_path) in reason


def chosen(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let that be what is imported."""
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.setattr(native, "importlib", SimpleNamespace(import_module=lambda _: module))


def test_without_a_compiler_there_is_no_extension_and_python_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "no C compiler" in str(compiling.compile_extension(tmp_path / "none.so"))
    monkeypatch.setenv("CC", "false")
    assert "failed" in str(compiling.compile_extension(tmp_path / "none.so"))
    monkeypatch.setenv("CC", "cc 'never closed")
    assert "closing quotation" in str(compiling.compile_extension(tmp_path / "none.so"))
    speaks = tmp_path / "cc"
    speaks.write_bytes(b"#!/bin/sh\nprintf '\\377 no such option' >&2; exit 1\n")
    speaks.chmod(0o755)
    monkeypatch.setenv("CC", str(speaks))
    assert "\ufffd no such option" in str(compiling.compile_extension(tmp_path / "none.so"))
    assert list(tmp_path.iterdir()) == [speaks]
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.setitem(sys.modules, "kvstore.native._native", None)  # as one that cannot be imported
    module, reason = native._found()
    assert module is None
    assert "no C compiler" in reason


SANITIZED = """
import errno, fcntl, os, sys
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(module)
path, new = sys.argv[2], os.O_RDWR | os.O_CREAT
def move(*some):
    return module.move(*some, 0, 0, 0)
first, second = bytearray(b"a" * 5000), bytearray(b"b" * 300)
references = [sys.getrefcount(held) for held in (path, first, second)]
for _ in range(50):
    error, step, fd, *_ = move(True, -1, path, new, 0o600, 0, first, None, 0)
    assert (error, move(True, fd, path, 0, 0, 5000, second, bytes(10), 2)[:3]) == (0, (0, 7, -1))
    assert move(False, -1, path, os.O_RDONLY, 5310, 0, first, second, 1)[:3] == (0, 7, -1)
    error, step, fd, *_ = move(False, -1, path, os.O_RDONLY, 5310, 5000, first, None, 1)
    os.close(fd)
    assert (error, step) == (errno.ENODATA, 3)
    error, step, fd, *_ = move(False, -1, path, os.O_RDONLY, 1, 0, first, None, 1)
    os.close(fd)
    assert (error, step) == (errno.EBADMSG, 2)
    assert move(True, -1, path + "/x", new, 0o600, 0, first, None, 1)[:3] == (errno.ENOTDIR, 0, -1)
    for bad in ((1,), (False, -1, path, 0, 0, 0, b"read-only", None, 1), (False, -1, path, 0, 0, 0, first, 5, 1)):
        try:
            move(*bad)
        except (TypeError, BufferError):
            pass
        else:
            raise AssertionError(bad)
fd, own = os.open(path, os.O_RDWR), path + "3"
os.link(path, own)
paths, targets = [own, path + "1", path + "0"], [path + "0", path + "2", own]
many = [(module.of_paths, (paths, targets)), (module.of_paths, (paths,)), (module.lock_all, (fd, [5, 900]))]
for bad in ((paths, targets[:1]), ([5],), ([own, "\\0"],), (paths, [own, 5, own]), (own,), ()):
    many.append((module.of_paths, bad))
many += [(module.lock_all, (fd, [1, own])), (module.lock_all, (fd, [1 << 63])), (module.lock_all, (fd, None))]
outcomes = []
def all_of_them():
    outcomes.clear()
    for call, arguments in many:
        try:
            outcomes.append(call(*arguments))
        except (TypeError, ValueError, OverflowError, IndexError, BufferError, NotImplementedError) as error:
            outcomes.append(type(error).__name__)
all_of_them()
assert outcomes[0] == [0, -errno.ENOENT, 0] and outcomes[2] == 2, outcomes
assert all(isinstance(outcome, str) for outcome in outcomes[3:]), outcomes
closing = bytearray(b"rest" + bytes(96))
for crc, at, until in ((-1, 0, 0), (0, 0, 0), (-1, 4, 96), (0, 4, 96), (7, 0, 4), (0, 92, 96)):
    end = module.move(True, -1, path, os.O_RDWR, 0, 0, b"body" * 90, closing, 1, crc, at, until)
    assert end[:3] == (0, 7, -1) and (end[-1] >= 0) == (crc >= 0), end
for at, until in ((-1, 4), (0, 3), (93, 96), (4, 97), (4, -1), (4, 1 << 40)):
    many.append((module.move, (True, -1, own, os.O_RDWR, 0, 0, b"body", closing, 1, 0, at, until)))
many.append((module.move, (True, -1, own, os.O_RDWR, 0, 0, b"body", b"read-only", 1, 0, 4, 8)))
many.append((module.move, (True, -1, own, os.O_RDWR, 0, 0, b"body", None, 1, 0, 4, 8)))
whole = [(True, -1, own + name, new, 0o600, 0, b"body" * 90, closing, then, 0, 4, 96) for name, then in
    (("a", 1), ("/b", 1), ("c", 2), ("d", 0))]
done = module.move_all(whole)
assert [one[:2] for one in done] == [(0, 7), (errno.ENOTDIR, 0), (0, 7), (0, 7)], done
assert module.move_all([]) == [] and done[0][2] == -1 and done[3][2] >= 0
os.close(done[3][2])
many += [(module.move_all, (bad,)) for bad in (whole[:2] + [(1,)], whole[:1] + [5], (whole[0],), None,
    [whole[0][:7] + (b"read-only",) + whole[0][8:]])]
for length in (0, 1, 7, 255, 256, 300, 511, 512, 513, 70000, 70001) if module.SUMS else ():
    source, into = bytes(range(251)) * 280, bytearray(length)
    crc = module.copy(into, source[:length])
    assert into == source[:length] and crc == module.copy(into, into[:]) and isinstance(crc, int)
    assert module.copy(bytearray(length - length // 3), source[length // 3:length], module.copy(bytearray(length // 3),
        source[:length // 3])) == crc
third = bytearray(5000)
for bad in ((third,), (b"no", b"no"), (third, b"short"), (third, 5), (5, third), (third, bytes(5000), -1, 1)):
    many.append((module.copy, bad))
many.append((module.copy, (third, bytes(5000))))
all_of_them()
assert all(isinstance(outcome, str) for outcome in outcomes[-7:-1]), outcomes
bad, into, before = None, None, sys.getallocatedblocks()
for _ in range(1000):
    move(True, -1, path + "/x", new, 0o600, 0, first, None, 1)
    all_of_them()
assert sys.getallocatedblocks() < before + 100
assert [sys.getrefcount(held) for held in (path, first, second)] == references
first.clear(), second.clear(), third.clear(), closing.clear()  # which nobody has a buffer of
"""


@NEEDS_COMPILER
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    extension = tmp_path / compiling.EXTENSION.name
    if compiling.compile_extension(extension, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"):
        pytest.skip("this compiler has no sanitizers")
    runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        [sys.executable, "-S", "-c", SANITIZED, str(extension), str(tmp_path / "file")],
        env=os.environ | {"LD_PRELOAD": runtime.strip(), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
