"""`import kvstore` is light, whatever it offers is there when asked for, and Ctrl-C while it loads is no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvstore
from kvstore.keys import KEY_SCHEME

INTERRUPTED_AT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts this in the background ignores it
sys.argv = ["kvstore", "stat", "memory://nothing"]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
for name in [name for name in sys.modules if name == {module!r} or name.startswith({module!r} + ".")]:
    del sys.modules[name]
from kvstore.cli import main
main()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_importing_kvstore_loads_none_of_its_rooms() -> None:
    code = "import sys, kvstore; print(sorted(m for m in sys.modules if m.startswith(('kvstore', 'numpy'))))"
    assert python(code).stdout == "['kvstore']\n"


@pytest.mark.parametrize("name", kvstore.__all__)
def test_every_public_name_comes_alone(name: str) -> None:
    done = python(f"from kvstore import {name}; import kvstore; print(kvstore.{name} is {name})")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_rooms_and_names_are_attributes_and_nothing_else_is() -> None:
    code = """
import kvstore
print(kvstore.errors.TierUnavailable.__name__, kvstore.types.BlockKey is kvstore.BlockKey, kvstore.keys.KEY_SCHEME)
print("open_store" in dir(kvstore), hasattr(kvstore, "BlockKeys"))
from kvstore import *
print(Usage.__name__)
"""
    assert python(code).stdout.splitlines() == [f"TierUnavailable True {KEY_SCHEME}", "True False", "Usage"]


@pytest.mark.parametrize("module", ["importlib", "click", "kvstore.cli._output", "kvstore.errors", "numpy"])
def test_ctrl_c_while_the_command_loads_is_no_traceback(module: str) -> None:
    done = python(INTERRUPTED_AT.format(module=module))
    assert (done.returncode, done.stderr.strip()) == (130, "kvstore: interrupted")
