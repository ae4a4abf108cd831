"""Blocks in object stores, and in every other file system that fsspec knows (`store`)."""

from kvstore_zarr.objects.opening import connect
from kvstore_zarr.objects.store import ObjectZarrStore

__all__ = ["ObjectZarrStore", "connect"]
