"""A stock reader of archives in a process that cannot import kvstore: `python -I read_archive.py`, a JSON job on stdin.

The job: `archive` (its folder) and `expected` (array to .npy file). Prints JSON: for each array whether zarr, xarray
and slices of it by xarray are equal to what is expected; its dimensions; and what the archive says of itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the job, do it, print what was found."""
    sys.path.insert(0, str(Path(__file__).parent))
    from read_block import hide_kvstore

    hide_kvstore()
    import numpy as np
    import xarray
    import zarr

    job: dict[str, Any] = json.load(sys.stdin)
    group = zarr.open_group(job["archive"], mode="r")
    dataset = xarray.open_zarr(job["archive"], chunks=None)
    expected = {name: np.load(file) for name, file in job["expected"].items()}
    last = {name: {dataset[name].dims[-1]: -1, dataset[name].dims[0]: 0} for name in expected}
    report: dict[str, Any] = {
        "zarr": {name: bool(np.array_equal(group[name][:], values)) for name, values in expected.items()},
        "xarray": {name: bool(np.array_equal(dataset[name].values, values)) for name, values in expected.items()},
        "slices": {
            name: bool(np.array_equal(dataset[name].isel(last[name]).values, values[0, ..., -1]))
            for name, values in expected.items()
        },
        "dims": {name: list(dataset[name].dims) for name in expected},
        "tokens": dataset["tokens"].values.tolist(),
        "positions": dataset["g0_positions"].values.tolist(),
        "digests": [row.tobytes().hex() for row in dataset["g0_digests"].values],
        "label": dataset.attrs["kvstore_archive"]["label"],
        "kvstore": any(name.startswith("kvstore") for name in sys.modules),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
