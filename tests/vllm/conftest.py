"""Tests against the managers of an installed vLLM; elsewhere there is nothing to run here.

Run them with `make test-vllm`, or `python -m pytest tests/vllm -p no:cacheprovider` in an environment that has both.
"""

from __future__ import annotations

import importlib.util
import os
import warnings


def _vllm_is_here() -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.util.find_spec("vllm.v1.kv_offload.tiering") is not None
    except ImportError:
        return False


VLLM = _vllm_is_here()

if VLLM:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # a wheel for GPUs finds no device here, hence no platform
    with warnings.catch_warnings():  # theirs, while they are imported; what they warn of later is an error as usual
        warnings.simplefilter("ignore")
        import vllm.v1.kv_offload.tiering.manager
        import vllm.v1.kv_offload.tiering.spec  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Say why nothing of this is collected."""
    if not VLLM:
        return "tests/vllm: no vLLM >= 0.26 here, not collected; `make test-vllm` makes an environment that has it"
    import vllm

    return f"vLLM {vllm.__version__}"
