"""What kvstore does in C, without the GIL, where that was compiled (`compiling`: when it is installed, if there is a C
compiler and Python.h).

    calls.c      what a block asks of the system, in one go     kvstore_zarr.calls
    checksum.c   a copy, and its checksum on the way            kvstore.integrity
    module.c     the extension `_native` of both

Python does the same, with more CPU, where nothing was compiled, or `KVSTORE_NATIVE=no` asks for that: no result, error
or file is different. What each of them is in Python stands where it is used, beside the choice.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from kvstore.native.compiling import digest_of

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["extension", "reason"]


def _found() -> tuple[ModuleType | None, str]:
    if os.environ.get("KVSTORE_NATIVE") == "no":
        return None, "KVSTORE_NATIVE=no"
    try:
        module = importlib.import_module("kvstore.native._native")
        if digest_of() != module.SOURCE:
            return None, f"{module.__file__} was compiled from other source"
    except ModuleNotFoundError:
        return None, "nothing compiled: no C compiler, or no Python.h, at the installation"
    except (ImportError, OSError, AttributeError) as error:
        return None, f"what was compiled cannot be used: {error}"
    return module, ""


extension, reason = _found()
"""The extension, or None and why there is none."""
