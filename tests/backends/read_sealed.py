"""Stock zarr-python on an encrypted tier, where kvstore is on the path and no tier is open: `python read_sealed.py`.

Arguments: a folder with a zarr.json, the block's place (numbers between commas), a .npy file with what is expected.
Prints `equal`, or the error.
"""

from __future__ import annotations

import sys

import numpy as np
import zarr
import zarr.registry


def main() -> None:
    """Read the block."""
    folder, place, expected = sys.argv[1:]
    if not any("kvstore" in name for name in zarr.registry.__dict__.get("__codec_registries", ())):
        import kvstore_zarr.codec

        kvstore_zarr.codec.register()  # as the entry point does where kvstore is installed
    try:
        array = zarr.open_array(folder, mode="r")
        found = array[tuple(map(int, place.split(",")))]
    except Exception as error:
        print(type(error).__name__, error)
        return
    print("equal" if np.array_equal(found, np.load(expected)) else "other values")


if __name__ == "__main__":
    main()
