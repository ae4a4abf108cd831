"""JSON that somebody may have damaged, or made up: whatever it says that cannot be is a `ValueError`, and nothing else.

Under all that reads manifests and documents of a tier, which is to pass over one that is bad, and not to end.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["entry", "fields", "members", "parsed", "record", "records"]

T = TypeVar("T")


def parsed(data: bytes | str) -> object:
    """The value that JSON text describes. Raises `ValueError`."""
    try:
        value: object = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def fields(value: object, what: str) -> Mapping[str, Any]:
    """`value`, which is to be an object of JSON. Raises `ValueError`."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_shown(value)}, and no object with named fields")
    return cast("Mapping[str, Any]", value)


def entry(value: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field `name`, of exactly that type: True is no number. Raises `ValueError`."""
    if name not in value:
        raise ValueError(f"it has no {name!r}")
    found: object = value[name]
    if type(found) is not kind:
        raise ValueError(f"{name!r} is {_shown(found)}, which is no {kind.__name__}")
    return found


def record(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The field `name`, which is to be an object of JSON. Raises `ValueError`."""
    if name not in value:
        raise ValueError(f"it has no {name!r}")
    return fields(value[name], repr(name))


def records(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The field `name`, a list of objects of JSON. Raises `ValueError`."""
    found = cast("list[object]", entry(value, name, list))
    return [fields(member, f"what stands in {name!r}") for member in found]


def members(value: Mapping[str, Any], name: str, kind: type[T]) -> list[T]:
    """The field `name`, a list of which each member is of exactly that type. Raises `ValueError`."""
    found = cast("list[object]", entry(value, name, list))
    for member in found:
        if type(member) is not kind:
            raise ValueError(f"{name!r} has {_shown(member)} in it, which is no {kind.__name__}")
    return cast("list[T]", found)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
