"""Packages that only some questions need, imported when those are asked."""

from __future__ import annotations

import importlib
from typing import Any

from kvstore.errors import MissingDependencyError

__all__ = ["needed"]

_INSTALL = {"torch": "pip install torch"}
_EXTRA = 'pip install "kvstore-tiers[inspect]"'


def needed(name: str) -> Any:
    """The package `name`, imported. Raises `MissingDependencyError` with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise MissingDependencyError(
            f"{name} is not installed, and this needs it: {_INSTALL.get(name, _EXTRA)}"
        ) from error
