"""What one scan of a namespace found, and how a few letters name one block of it."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from kvstore.errors import NotStoredError
from kvstore.inspect.wording import listing, short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["Scanned", "named_like"]

_HEX = frozenset(string.hexdigits)


class Scanned:
    """The blocks of a namespace as one scan found them: `by_group[group][digest]`, in order of position and digest."""

    def __init__(self, namespace: Namespace, infos: Iterable[BlockInfo], where: str) -> None:
        self.namespace = namespace
        self.where = where
        self.infos = sorted(infos, key=lambda info: (info.key.group, info.position, info.key.digest))
        self.by_group: dict[int, dict[bytes, BlockInfo]] = {group: {} for group in range(len(namespace.layouts))}
        for info in self.infos:
            self.by_group[info.key.group][info.key.digest] = info

    def block(self, digest: str, group: int) -> BlockInfo:
        """The one block whose digest begins so, in hex. Raises `NotStoredError` where there is none, or several."""
        found = self._matching(digest, group)
        if len(found) == 1:
            return found[0]
        place = f"{self.where}: namespace {short(self.namespace.name)}"
        if found:
            raise NotStoredError(
                f"{place}: {len(found):,} blocks of group {group} begin with {digest!r}: give more digits of"
                f" {listing(info.key.digest.hex() for info in found)}"
            )
        elsewhere = [other for other in self.by_group if other != group and self._matching(digest, other)]
        hint = f" (group {elsewhere[0]} has one)" if elsewhere else ""
        some = listing(short(digest.hex()) for digest in self.by_group[group])
        raise NotStoredError(f"{place}: no block of group {group} begins with {digest!r}{hint}. There are: {some}")

    def ends(self, label: str, group: int) -> list[BlockInfo]:
        """Where the prefixes end that have a label: labelled blocks of a group that no labelled block follows."""
        labelled = [info for info in self.by_group[group].values() if info.marks and label in info.labels]
        followed = {info.parent for info in labelled}
        return [info for info in labelled if info.key.digest not in followed]

    def labels(self) -> list[str]:
        """Every label of any block."""
        return sorted({label for info in self.infos if info.marks for label in info.labels})

    def chain(self, end: BlockInfo) -> list[BlockInfo]:
        """The blocks from the first that is known to `end`, along their parents."""
        known = self.by_group[end.key.group]
        chain, seen = [end], {end.key.digest}
        while (before := known.get(chain[-1].parent)) is not None and before.key.digest not in seen:
            chain.append(before)
            seen.add(before.key.digest)
        return chain[::-1]

    def _matching(self, digest: str, group: int) -> list[BlockInfo]:
        if group not in self.by_group:
            raise NotStoredError(
                f"{self.where}: namespace {self.namespace.name} has groups 0 to {len(self.by_group) - 1}, not {group}"
            )
        wanted = digest.lower()
        if not set(wanted) <= _HEX:
            return []
        whole = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
        return [
            info
            for name, info in self.by_group[group].items()
            if name.startswith(whole) and name.hex().startswith(wanted)
        ]


def named_like(where: str, prefix: str | None, spaces: Iterable[Namespace]) -> Namespace:
    """The one namespace whose name begins so; without a prefix the only one. Raises `NotStoredError` and lists them."""
    every = list(spaces)
    found = [space for space in every if prefix is None or space.name.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    names = listing(f"{space.name} ({space.model})" for space in every)
    if not found:
        wanted = "no namespace" if prefix is None else f"no namespace starts with {prefix!r}"
        raise NotStoredError(f"{where}: {wanted}. There are: {names}")
    which = "several namespaces" if prefix is None else f"{len(found)} namespaces start with {prefix!r}"
    raise NotStoredError(f"{where}: {which}: say which with the beginning of its name. There are: {names}")
