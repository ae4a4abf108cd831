"""A tier that is looked into: what `kvstore.inspect.open` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.inspect.namespace import NamespaceView
from kvstore.inspect.needs import needed
from kvstore.inspect.reading import BlockReader
from kvstore.inspect.scanned import named_like
from kvstore.inspect.summary import counted

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import pandas as pd

    from kvstore.abc import BlockStore
    from kvstore.inspect.axes import ModelConfig

__all__ = ["Inspection"]


class Inspection:
    """A tier to look into. A context manager; `close` closes the tier, unless it was handed over open.

    Each call of `namespaces`, `namespace` and `prefixes` looks anew; a `NamespaceView` stays as it was. `source` is its
    URL, as it was asked for, and `notes` what an operator should know of it. Thread-safe.
    """

    def __init__(self, store: BlockStore, source: str, *, owned: bool, note: str = "") -> None:
        self.store = store
        self.source = source
        self.notes = (*((note,) if note else ()), *store.capabilities.notes)
        self._owned = owned
        self._reader = BlockReader(store, source)

    def namespaces(self) -> pd.DataFrame:
        """One row for each namespace, under its name, the largest first; all blocks are counted.

        Columns: model, revision, engine, dtype, block_tokens, groups, blocks, bytes, oldest, newest, last_used (UTC),
        pinned (blocks that are not evicted), labels.
        """
        needed("pandas")
        from kvstore.inspect.frames import namespaces_frame

        return namespaces_frame(counted(self.store))

    def namespace(self, name: str | None = None, *, model_config: ModelConfig | None = None) -> NamespaceView:
        """The namespace whose name begins so; without a name the only one. `model_config`: see `NamespaceView`.

        Raises `NotStoredError`, which lists them, where there is none or several.
        """
        space = named_like(self.source, name, self.store.namespaces())
        return NamespaceView(self._reader, space, model_config)

    def prefixes(self) -> pd.DataFrame:
        """The prefixes of all namespaces, as `NamespaceView.prefixes`, behind the columns namespace and model."""
        pandas = needed("pandas")
        frames: list[pd.DataFrame] = []
        for space in self.store.namespaces():
            view = NamespaceView(self._reader, space)
            frame = view.prefixes()
            frame.insert(0, "namespace", view.name)
            frame.insert(1, "model", view.namespace.model)
            frames.append(frame)
        joined: pd.DataFrame = pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()
        return joined

    def close(self) -> None:
        """Close the tier; a store that was handed over open stays so. Views can read nothing afterwards."""
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Inspection of {self.source}>"

    def _repr_html_(self) -> str:
        from kvstore.inspect.html import inspection_html

        return inspection_html(self)
