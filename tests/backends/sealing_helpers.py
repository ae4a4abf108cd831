"""What tests of encryption have in common: an operator's key in a file, and URLs of sealed tiers."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING

from kvstore.sealing import Keyring, KeySource

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["key_file", "keyring", "operator_key", "sealed"]


def operator_key() -> str:
    """A new one, as `openssl rand -base64 32` prints it."""
    return base64.b64encode(os.urandom(32)).decode()


def key_file(folder: Path, name: str = "operator.key") -> Path:
    """A file with an operator's key; the one that is there, if one is."""
    path = folder / name
    if not path.exists():
        path.write_text(operator_key() + "\n")
    return path


def sealed(url: str, folder: Path, *, key: str = "operator.key", keyring: str = "keyring.json") -> str:
    """`url` with the options of a sealed tier, whose key and keyring are in `folder`."""
    joint = "&" if "?" in url else "?"
    return f"{url}{joint}encryption=file:{key_file(folder, key)}&keyring={folder}/{keyring}"


def keyring(folder: Path) -> Keyring:
    """The keyring of the tiers there, opened."""
    return Keyring.open(folder / "keyring.json", KeySource.parse(f"file:{key_file(folder)}").read(), create=False)
