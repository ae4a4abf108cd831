"""Whether an archive's blocks are of use in a namespace, and if not, which field says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.archive.errors import NamespaceMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.namespace import Namespace

__all__ = ["Difference", "check_namespace", "check_one_of", "differences"]

_LONGEST = 120


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of two manifests that is not the same; None where one has no such field."""

    field: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.theirs)} there, {_shown(self.ours)} here"


def differences(ours: Namespace, theirs: Namespace) -> list[Difference]:
    """Each field in which two namespaces differ; none where the blocks of one are those of the other."""
    one, other = _flat(ours.to_manifest()), _flat(theirs.to_manifest())
    names = [*one, *(name for name in other if name not in one)]
    return [Difference(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def check_namespace(ours: Namespace, theirs: Namespace, archive: str) -> None:
    """Raise `NamespaceMismatchError` where the blocks of `archive`, which are of `theirs`, are of no use in `ours`."""
    found = differences(ours, theirs)
    if found:
        listing = "".join(f"\n  {one}" for one in found)
        raise NamespaceMismatchError(
            f"{archive}: its blocks are of another namespace ({theirs.name}, here {ours.name}) and would never be"
            f" asked for. What differs:{listing}\nArchive the prefix from an engine of this configuration"
        )


def check_one_of(ours: Sequence[Namespace], theirs: Namespace, archive: str) -> None:
    """`check_namespace` against the one of `ours` that is most alike; nothing where there is none."""
    if ours:
        check_namespace(min(ours, key=lambda one: len(differences(one, theirs))), theirs, archive)


def _flat(manifest: Mapping[str, Any]) -> dict[str, object]:
    """One level: `extra` and `layouts` by their entries."""
    flat: dict[str, object] = {}
    for name, value in manifest.items():
        if name == "extra":
            flat |= {f"extra[{key!r}]": text for key, text in sorted(value.items())}
        elif name == "layouts":
            for group, layout in enumerate(value):
                flat |= {f"layouts[{group}].{key}": part for key, part in layout.items()}
        else:
            flat[name] = value
    return flat


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
