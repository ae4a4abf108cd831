"""Zarr blocks: `file://` keeps each block as one shard of a sparse zarr v3 array, in local files.

The format is in `format` (a block's bytes) and `metadata` (the tree around it); stock zarr readers open it. Importing
this loads no zarr: kvstore writes the same documents itself.
"""

from kvstore_zarr.store import LocalZarrStore

__all__ = ["LocalZarrStore"]
