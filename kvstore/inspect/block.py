"""One stored block: its facts, its bytes, and its values as an array of any of the usual libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import DamagedBlockError
from kvstore.inspect.axes import tokens_of
from kvstore.inspect.needs import needed
from kvstore.inspect.view import KVView
from kvstore.inspect.wording import short
from kvstore.types import NO_POSITION
from kvstore.url import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    import xarray
    import zarr
    from numpy.typing import NDArray

    from kvstore.inspect.axes import Axes
    from kvstore.inspect.reading import BlockReader
    from kvstore.inspect.statistics import LayerStatistics
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey

__all__ = ["BlockView"]


class BlockView(KVView):
    """One block of a tier, read when its values are first asked for, through all checks of the store.

    `info` is what the tier knew of it when it was looked at, `axes` which axes its values have. What is read is kept by
    the inspection for the next question, as long as there is room (`kvstore.inspect.reading.KEPT_BYTES`). Thread-safe.

    Whatever reads raises `NotStoredError` where the block is gone, `DamagedBlockError` where it fails its checks and
    `TierUnavailable` where the store cannot tell; each names the block and the tier.
    """

    def __init__(self, reader: BlockReader, namespace: Namespace, info: BlockInfo, axes: Axes) -> None:
        super().__init__(reader, namespace, axes)
        self.info = info

    @property
    def key(self) -> BlockKey:
        """Its key in the namespace."""
        return self.info.key

    @property
    def digest(self) -> str:
        """Its digest in hex."""
        return self.info.key.digest.hex()

    @property
    def group(self) -> int:
        """Its KV-cache group."""
        return self.info.key.group

    @property
    def tokens(self) -> range | None:
        """The tokens of the prompt that it holds; None where its position is not known."""
        if self.info.position == NO_POSITION:
            return None
        count = tokens_of(self.namespace, self.group)
        return range(self.info.position * count, (self.info.position + 1) * count)

    def bytes(self) -> bytes:
        """All of the payload: the caller's own copy."""
        return self._data().tobytes()

    def numpy(self) -> NDArray[Any]:
        """The values over `axes.dims`, read-only and shared with whoever else asks. bfloat16, FP8: as `ml_dtypes`."""
        return self.axes.decode(self._data())

    def torch(self) -> torch.Tensor:
        """The values over `axes.dims` as a CPU tensor of the stored dtype: the caller's own copy."""
        torch_api = needed("torch")
        values = np.array(self.numpy(), order="C")
        tensor: torch.Tensor = torch_api.from_numpy(values.reshape(-1).view(np.uint8))
        return tensor.view(getattr(torch_api, self.axes.dtype_name)).reshape(values.shape)

    def zarr(self) -> zarr.Array[Any]:
        """The block as a zarr array. Of a tier that keeps zarr it is the stored chunk itself, which stock zarr reads
        when values are asked for (and checks by its checksum alone); else an array in memory with the block's values,
        as for rows of vLLM's, which are stored as bytes and shown as keys and values.
        """
        from kvstore.inspect.zarrs import zarr_array

        return zarr_array(self)

    def xarray(self, dtype: str | None = None) -> xarray.DataArray:
        """The values as a labelled array, none of them read before they are asked for.

        Coordinates: `layer` (the model's number), `kv` (`key` or `value`), `token` (the place in the prompt, where it
        is known). `dtype` is what values are turned into as they are read: by default bfloat16 and FP8, with which
        xarray cannot compute, become float32 (which changes no value), and all others stay what they are.
        """
        needed("xarray")
        from kvstore.inspect.labels import block_array

        return block_array(self, dtype)

    def statistics(self, damaged: Callable[[DamagedBlockError], object] | None = None) -> list[LayerStatistics]:
        """What the numbers of each layer are like; `pandas.DataFrame` takes the list as it is.

        Where the block fails its checks, and `damaged` is given, that is told of it, and nothing else comes back.
        """
        from kvstore.inspect.statistics import statistics_of

        if damaged is not None:
            try:
                self._data()
            except DamagedBlockError as error:
                damaged(error)
                return []
        return statistics_of(self.axes, [self._data()])

    def read_each(self, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """For `kvstore.inspect.lazy`: the only block there is, however often."""
        for _ in numbers:
            yield self._data()

    def _data(self) -> NDArray[np.uint8]:
        return self._reader.read(self.namespace, self.info.key)

    def __repr__(self) -> str:
        at = "position unknown" if self.tokens is None else f"tokens {self.tokens.start}–{self.tokens.stop - 1}"
        return (
            f"<BlockView {short(self.digest)} group {self.group}, {at}: {self.axes.words} {self.axes.dtype_name},"
            f" {format_size(self.namespace.block_bytes(self.group))}, in {self.source}>"
        )

    def _repr_html_(self) -> str:
        from kvstore.inspect.html import block_html

        return block_html(self)
