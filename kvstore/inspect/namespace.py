"""One namespace of a tier: its blocks as a table, its prefixes as a tree, and the way to any of them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvstore.errors import NotStoredError
from kvstore.inspect.axes import Axes, axes_of
from kvstore.inspect.block import BlockView
from kvstore.inspect.needs import needed
from kvstore.inspect.prefix import PrefixView
from kvstore.inspect.scanned import Scanned
from kvstore.inspect.summary import summary_of
from kvstore.inspect.tree import PrefixTree
from kvstore.inspect.view import View
from kvstore.inspect.wording import counted, listing, short
from kvstore.url import format_size

if TYPE_CHECKING:
    import pandas as pd

    from kvstore.inspect.axes import ModelConfig
    from kvstore.inspect.reading import BlockReader
    from kvstore.inspect.summary import NamespaceSummary
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["NamespaceView"]


class NamespaceView(View):
    """What one namespace holds, as of the first question that was asked of this view; `refresh` looks again.

    `model_config` helps to read rows of an engine's own (see `kvstore.inspect.axes`): a path to a `config.json` or its
    folder, or its contents.
    """

    def __init__(self, reader: BlockReader, namespace: Namespace, model_config: ModelConfig | None = None) -> None:
        super().__init__(reader, namespace)
        self._model_config = model_config
        self._axes: dict[int, Axes] = {}

    @property
    def name(self) -> str:
        """The namespace's name: its fingerprint in hex."""
        return self.namespace.name

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything that blocks must have in common to be in here."""
        return self.namespace.to_manifest()

    @cached_property
    def scanned(self) -> Scanned:
        """What a scan of the namespace found."""
        return Scanned(self.namespace, self.store.scan(self.namespace), self.source)

    @cached_property
    def summary(self) -> NamespaceSummary:
        """Counts, sizes, ages and labels."""
        return summary_of(self.namespace, self.scanned.infos)

    @cached_property
    def _tree(self) -> PrefixTree:
        return PrefixTree.of(self.scanned)

    def refresh(self) -> None:
        """Forget what was found; the next question looks again."""
        for name in ("scanned", "summary", "_tree"):
            self.__dict__.pop(name, None)

    def infos(self, label: str | None = None, tenant: str | None = None) -> list[BlockInfo]:
        """What the tier knows of each block, of those alone that have the label and the tenant, if they are given."""
        return [
            info
            for info in self.scanned.infos
            if (label is None or (info.marks and label in info.labels))
            and (tenant is None or (info.marks and tenant in info.tenants))
        ]

    def blocks(self, label: str | None = None, tenant: str | None = None) -> pd.DataFrame:
        """One row for each block, by group and position; of those alone that have the label and the tenant.

        Columns: group, digest and parent (hex; the parent is empty where there is none), position and tokens_end (in
        tokens; missing where nobody knows), stored_bytes, created and last_used (UTC), hits, labels, tenants, pinned.
        """
        needed("pandas")
        from kvstore.inspect.frames import blocks_frame

        return blocks_frame(self.namespace, self.infos(label, tenant))

    def prefixes(self) -> pd.DataFrame:
        """One row for each prefix: for each block that none follows, and for each at which a label ends. Longest first.

        Columns: group, digest (of the last block), blocks, tokens, bytes and hits (sums over the blocks), created and
        last_used (of the last block), labels, complete (whether every block from position 0 on is there).
        """
        needed("pandas")
        from kvstore.inspect.frames import prefixes_frame

        return prefixes_frame(self.tree())

    def tree(self) -> PrefixTree:
        """All prefixes as a tree in which blocks without a branch between them are one run."""
        return self._tree

    def axes(self, group: int = 0) -> Axes:
        """Which axes blocks of a KV-cache group are shown with, and why with none."""
        if group not in self._axes:
            self._axes[group] = axes_of(self.namespace, group, self._model_config)
        return self._axes[group]

    def block(self, digest: str, group: int = 0) -> BlockView:
        """The block whose digest begins so, in hex. Raises `NotStoredError` where there is none, or several."""
        return self.view(self.scanned.block(digest, group))

    def view(self, info: BlockInfo) -> BlockView:
        """A block that `infos`, a run of the tree or another view has told of."""
        return BlockView(self._reader, self.namespace, info, self.axes(info.key.group))

    def prefix(self, which: str = "", *, label: str | None = None, group: int = 0) -> PrefixView:
        """The blocks from the beginning up to the one that is named: by a label, or by how a digest begins in hex.

        `label` takes what is given as a label only. Raises `NotStoredError` where nothing is called so, or more than
        one prefix is.
        """
        if label is None and which not in self.scanned.labels():
            return self._prefix(self._named(which, group))
        wanted = which if label is None else label
        ends = self.scanned.ends(wanted, group)
        if len(ends) == 1:
            return self._prefix(ends[0])
        place = f"{self.source}: namespace {short(self.name)}"
        if ends:
            raise NotStoredError(
                f"{place}: {len(ends)} prefixes of group {group} are labelled {wanted!r}: say which by its digest:"
                f" {listing(info.key.digest.hex() for info in ends)}"
            )
        raise NotStoredError(
            f"{place}: no block of group {group} is labelled {wanted!r}. Labels: {listing(self.scanned.labels())}"
        )

    def _named(self, which: str, group: int) -> BlockInfo:
        try:
            return self.scanned.block(which, group)
        except NotStoredError as error:
            labels = self.scanned.labels()
            raise NotStoredError(f"{error}. Labels: {listing(labels)}") if labels else error from None

    def _prefix(self, end: BlockInfo) -> PrefixView:
        return PrefixView(self._reader, self.namespace, self.scanned.chain(end), self.axes(end.key.group))

    def __repr__(self) -> str:
        sums = self.summary
        return (
            f"<NamespaceView {short(self.name)} of {self.namespace.model}: {counted(sums.blocks, 'block')},"
            f" {format_size(sums.bytes)}, {self.namespace.block_tokens} tokens each, in {self.source}>"
        )

    def _repr_html_(self) -> str:
        from kvstore.inspect.html import namespace_html

        return namespace_html(self)
