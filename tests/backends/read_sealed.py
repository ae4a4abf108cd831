"""Stock zarr-python on an encrypted tier, where kvstore is on the path and no tier is open.

On stdin a JSON list of looks: `folder` (with a zarr.json), `place` (numbers), `expected` (a .npy file), `environment`.
Prints a line for each: `equal`, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import zarr
import zarr.registry


def main() -> None:
    """Look at each block."""
    if not any("kvstore" in name for name in zarr.registry.__dict__.get("__codec_registries", ())):
        import kvstore_zarr.codec

        kvstore_zarr.codec.register()  # as the entry point does where kvstore is installed
    for look in json.load(sys.stdin):
        os.environ.update(look["environment"])
        print(found(look))


def found(look: dict[str, Any]) -> str:
    """What reading it gives."""
    try:
        values = zarr.open_array(look["folder"], mode="r")[tuple(look["place"])]
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "equal" if np.array_equal(values, np.load(look["expected"])) else "other values"


if __name__ == "__main__":
    main()
