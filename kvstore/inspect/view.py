"""What every view of a namespace, of a prefix and of a block has: where it comes from, and what it is read with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.inspect.axes import Axes
    from kvstore.inspect.reading import BlockReader
    from kvstore.namespace import Namespace

__all__ = ["KVView", "View"]


class View:
    """Something of one `namespace`, read through `reader`."""

    def __init__(self, reader: BlockReader, namespace: Namespace) -> None:
        self.namespace = namespace
        self._reader = reader

    @property
    def source(self) -> str:
        """The tier's URL, as it was asked for."""
        return self._reader.source

    @property
    def store(self) -> BlockStore:
        """The tier."""
        return self._reader.store


class KVView(View):
    """Something that has values, over `axes`."""

    def __init__(self, reader: BlockReader, namespace: Namespace, axes: Axes) -> None:
        super().__init__(reader, namespace)
        self.axes = axes

    @property
    def why_opaque(self) -> str:
        """Why the bytes cannot be told apart; empty where they can."""
        return self.axes.why_opaque
