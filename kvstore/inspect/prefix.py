"""A stored prefix: the blocks from the beginning of a prompt up to one of them, as one array over all its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from kvstore.errors import DamagedBlockError
from kvstore.inspect.axes import tokens_of
from kvstore.inspect.block import BlockView
from kvstore.inspect.needs import needed
from kvstore.inspect.view import KVView
from kvstore.inspect.wording import counted, short
from kvstore.types import NO_PARENT, NO_POSITION
from kvstore.url import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import pandas as pd
    import xarray
    from numpy.typing import NDArray

    from kvstore.inspect.axes import Axes
    from kvstore.inspect.reading import BlockReader
    from kvstore.inspect.statistics import LayerStatistics
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey

__all__ = ["PrefixView"]


class PrefixView(KVView):
    """Blocks of one KV-cache group that follow each other, `infos`, up to the one that names the prefix.

    Iterating gives a `BlockView` for each; `view[3]` is one of them, `view[1:3]` a view of some. `complete` says
    whether they begin at position 0; where they do not, what came before is not stored any more. What reads raises what
    `BlockView` does. Thread-safe.
    """

    def __init__(self, reader: BlockReader, namespace: Namespace, infos: Sequence[BlockInfo], axes: Axes) -> None:
        super().__init__(reader, namespace, axes)
        self.infos = tuple(infos)

    @property
    def digest(self) -> str:
        """The last block's digest in hex, which stands for the whole prefix."""
        return self.infos[-1].key.digest.hex()

    @property
    def group(self) -> int:
        """The KV-cache group of all of them."""
        return self.infos[-1].key.group

    @property
    def keys(self) -> list[BlockKey]:
        """The blocks' keys, first to last."""
        return [info.key for info in self.infos]

    @property
    def labels(self) -> tuple[str, ...]:
        """The last block's labels."""
        return self.infos[-1].labels

    @property
    def complete(self) -> bool:
        """Whether nothing is missing before the first block."""
        return self.infos[0].position == 0 and self.infos[0].parent == NO_PARENT

    @property
    def tokens(self) -> int:
        """Tokens in the blocks that are there."""
        return len(self.infos) * tokens_of(self.namespace, self.group)

    def blocks(self) -> pd.DataFrame:
        """One row for each block, first to last; columns as in `NamespaceView.blocks`."""
        needed("pandas")
        from kvstore.inspect.frames import blocks_frame

        return blocks_frame(self.namespace, self.infos)

    def xarray(self, dtype: str | None = None) -> xarray.DataArray:
        """The values over all tokens as one labelled array, none of them read before they are asked for.

        Only blocks that have a share in what is selected are read. Blocks without a token axis stand one after another
        along an axis `block`. Coordinates, attributes and `dtype` as in `BlockView.xarray`.
        """
        needed("xarray")
        from kvstore.inspect.labels import prefix_array

        return prefix_array(self, dtype)

    def statistics(self, damaged: Callable[[DamagedBlockError], object] | None = None) -> list[LayerStatistics]:
        """What the numbers of each layer are like, over all blocks, which are read one after another.

        A block that fails its checks is left out, and told to `damaged`; without that it is raised.
        """
        from kvstore.inspect.statistics import statistics_of

        every = range(len(self.infos))
        return statistics_of(self.axes, self.read_each(every) if damaged is None else self._intact(every, damaged))

    def _intact(
        self, numbers: Iterable[int], damaged: Callable[[DamagedBlockError], object]
    ) -> Iterator[NDArray[np.uint8]]:
        for number in numbers:
            try:
                yield from self.read_each([number])
            except DamagedBlockError as error:
                damaged(error)

    def read_each(self, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """For `kvstore.inspect.lazy`: the bytes of blocks by their place in `infos`."""
        return self._reader.read_each(self.namespace, [self.infos[number].key for number in numbers])

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[BlockView]:
        return (self[number] for number in range(len(self.infos)))

    @overload
    def __getitem__(self, number: int) -> BlockView: ...
    @overload
    def __getitem__(self, number: slice) -> PrefixView: ...
    def __getitem__(self, number: int | slice) -> BlockView | PrefixView:
        """One block, or a view of those that follow each other from one to another."""
        if not isinstance(number, slice):
            if not -len(self.infos) <= number < len(self.infos):
                raise IndexError(f"{self!r}: there is no block {number}: they are counted from 0 to {len(self) - 1}")
            return BlockView(self._reader, self.namespace, self.infos[number], self.axes)
        some = self.infos[number]
        if number.step not in (None, 1) or not some:
            raise IndexError(
                f"{self!r}: blocks {number.start} to {number.stop}, step {number.step}, are no blocks that follow each"
                f" other: name some of 0 to {len(self) - 1}, in steps of 1"
            )
        return PrefixView(self._reader, self.namespace, some, self.axes)

    def __repr__(self) -> str:
        start = self.infos[0].position
        begins = "" if self.complete else " of unknown place" if start == NO_POSITION else f" from block {start} on"
        size = format_size(sum(info.stored_bytes for info in self.infos))
        return (
            f"<PrefixView {short(self.digest)} group {self.group}: {counted(len(self.infos), 'block')}{begins},"
            f" {self.tokens:,} tokens, {size}, in {self.source}>"
        )

    def _repr_html_(self) -> str:
        from kvstore.inspect.html import prefix_html

        return prefix_html(self)
