"""An archive for zarr and xarray: a read-only zarr store whose objects are checked before anybody sees them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import xarray
    from zarr.core.buffer import Buffer, BufferPrototype

    from kvstore.archive.reading import Archive

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

__all__ = ["ArchiveZarrStore", "dataset"]


def dataset(archive: Archive) -> xarray.Dataset:
    """A lazy dataset of `archive`. Raises `MissingDependencyError`."""
    try:
        found: Any = importlib.import_module("xarray")
    except ImportError as error:
        raise MissingDependencyError(f"looking needs xarray ({error}): pip install 'kvstore-tiers[inspect]'") from error
    opened: xarray.Dataset = found.open_zarr(
        ArchiveZarrStore(archive), zarr_format=3, consolidated=True, chunks=None, decode_cf=False
    )
    return opened


class ArchiveZarrStore(Store):
    """The objects of one archive, by path. What is damaged raises `ArchiveDamagedError`."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(read_only=True)
        self._archive = archive

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArchiveZarrStore) and other._archive is self._archive

    def __hash__(self) -> int:
        return hash(id(self._archive))

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data = self._archive.object(key, _slice(byte_range))
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return key in self._archive.manifest.objects

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002 - as zarr calls it
        raise PermissionError(f"{self._archive.info.url} is only read: {key} is not written")

    async def delete(self, key: str) -> None:
        raise PermissionError(f"{self._archive.info.url} is only read: {key} is not removed")

    async def list(self) -> AsyncIterator[str]:
        for path in sorted(self._archive.manifest.objects):
            yield path

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for path in self.list():
            if path.startswith(prefix):
                yield path

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        found = {path.removeprefix(below).partition("/")[0] async for path in self.list_prefix(below)}
        for name in sorted(found):
            yield name


def _slice(wanted: ByteRequest | None) -> slice:
    match wanted:
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(-suffix, None)
        case _:
            return slice(None)
