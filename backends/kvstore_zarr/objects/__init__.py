"""Blocks in object stores, in directories that machines share, and in what else fsspec knows (`store`)."""

from kvstore_zarr.objects.store import DirectoryZarrStore, ObjectZarrStore

__all__ = ["DirectoryZarrStore", "ObjectZarrStore"]
