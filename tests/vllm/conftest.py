"""Tests against the managers of an installed vLLM; elsewhere there is nothing to run here.

Run them with `make test-vllm`, or `python -m pytest tests/vllm -p no:cacheprovider` in an environment that has both.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvstore.testing.patience import PATIENCE


def _vllm_is_here() -> bool:
    """Without importing anything of it."""
    package = find_spec("vllm")
    return package is not None and Path(package.origin or "", "../v1/kv_offload/tiering").resolve().is_dir()


VLLM = _vllm_is_here()

if VLLM:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # a wheel for GPUs finds no device here, hence no platform
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collect_file() -> None:
    """Import vLLM in the processes that collect: the one that only hands tests out to them is spared its seconds."""
    if VLLM:
        _imported()


@cache
def _imported() -> None:
    with warnings.catch_warnings():  # theirs, while they are imported; what they warn of later is an error as usual
        warnings.simplefilter("ignore")
        import vllm.v1.kv_offload.tiering.manager
        import vllm.v1.kv_offload.tiering.spec  # noqa: F401


@pytest.fixture(autouse=True)
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `patient`, for tiers that the option was not given to."""
    from kvstore.vllm.options import LOOKUP_TIMEOUT

    monkeypatch.setitem(vars(LOOKUP_TIMEOUT), "default", PATIENCE)


def pytest_report_header() -> str:
    """Say why nothing of this is collected."""
    if not VLLM:
        return "tests/vllm: no vLLM >= 0.26 here, not collected; `make test-vllm` makes an environment that has it"
    return f"vLLM {version(packages_distributions()['vllm'][0])}"
