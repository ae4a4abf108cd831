"""A stock reader in a process that cannot import kvstore: run as `python -I read_block.py` with a JSON job on stdin.

The job: `array` (a folder with a zarr.json), `index` (the block's place), `expected` (a .npy file). Prints JSON:
`equal`, `missing_is_nan` (zero, for bytes) of the place after it, and `refused`, the error if the block was refused.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class _NoKvstore(importlib.abc.MetaPathFinder):
    """Hides kvstore where it happens to be installed, so that nothing of it can help."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname.split(".")[0].startswith("kvstore"):
            raise ModuleNotFoundError(f"{fullname} is hidden from a stock reader")


def _hide_entry_points() -> None:
    """Where kvstore is not installed, zarr finds no entry points of it either."""
    installed = [one for package in importlib.metadata.distributions() for one in package.entry_points]

    def others() -> importlib.metadata.EntryPoints:
        return importlib.metadata.EntryPoints(one for one in installed if not one.value.startswith("kvstore"))

    importlib.metadata.entry_points = others  # type: ignore[assignment]


def hide_kvstore() -> None:
    """From here on kvstore cannot be imported, nor found by its entry points."""
    sys.meta_path.insert(0, _NoKvstore())
    _hide_entry_points()


def main() -> None:
    """Read the job, do it, print what was found."""
    hide_kvstore()
    import numpy as np
    import zarr

    job: dict[str, Any] = json.load(sys.stdin)
    array = zarr.open_array(job["array"], mode="r")
    place = tuple(job["index"])
    beside = array[((place[0] + 1) % array.shape[0], *place[1:])]
    report: dict[str, Any] = {
        "missing_is_nan": bool(np.isnan(beside).all()) if array.dtype.kind == "f" else not beside.any(),
        "names": list(array.metadata.dimension_names),
        "kvstore": any(name.startswith("kvstore") for name in sys.modules),
        "equal": False,
        "refused": "",
    }
    try:
        block = array[place]
    except Exception as error:
        report["refused"] = f"{type(error).__name__}: {error}"
    else:
        report["equal"] = bool(np.array_equal(block, np.load(job["expected"])))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
