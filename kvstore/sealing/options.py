"""The options `encryption` and `keyring`: where the operator's key comes from, and where the data keys are kept.

A key never stands in a URL, a configuration or a message: what stands there names the environment variable or the file
that has it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidOptionError
from kvstore.url import Option

if TYPE_CHECKING:
    from kvstore.url import TierURL

__all__ = ["ENCRYPTION", "KEYRING", "KEY_BYTES", "REMEDY", "SEALING", "KeySource", "check_outside"]

KEY_BYTES = 32
REMEDY = "make one with: openssl rand -base64 32"
ABSENT = f"it has to have the key that the tier was made with; for a new tier, {REMEDY}"

_FEWEST_VALUES = 16
"""Different byte values that a key must have: 32 random bytes all but never have fewer."""
_LARGEST_FILE = 4096


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where an operator's key comes from: `kind` is `env` or `file`, `where` the variable's name or the file's path."""

    kind: str
    where: str

    @classmethod
    def parse(cls, text: Any) -> KeySource:
        """From `env:NAME` or `file:/path`. Raises ValueError, whose message has nothing of what was given: people
        write keys where their names belong.
        """
        if isinstance(text, KeySource):
            return text
        match = re.fullmatch(r"(?:env:(?P<env>[A-Za-z_][A-Za-z0-9_]{0,39})|file:(?P<file>/.+))", str(text), re.DOTALL)
        if match is None:
            raise ValueError(
                "expected env:NAME (an environment variable) or file:/absolute/path; the key itself stands nowhere else"
            )
        return cls("env", match["env"]) if match["env"] else cls("file", match["file"])

    def read(self) -> bytes:
        """The key, 32 bytes. Raises `InvalidOptionError`, without anything of the key."""
        return _decoded(self._text(), str(self))

    def _text(self) -> str:
        if self.kind == "env":
            text = os.environ.get(self.where)
            if not text:
                raise InvalidOptionError(f"encryption={self}: that environment variable is not set; {ABSENT}")
            return text
        try:
            with open(self.where, "rb") as file:
                return file.read(_LARGEST_FILE).decode("ascii", errors="replace")
        except OSError as error:
            raise InvalidOptionError(f"encryption={self}: {error.strerror}; {ABSENT}") from error

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"


def _decoded(text: str, source: str) -> bytes:
    text = "".join(text.split())
    key = b""
    try:
        key = bytes.fromhex(text) if re.fullmatch("[0-9a-fA-F]{64}", text) else _base64(text)
    except (ValueError, binascii.Error):
        raise InvalidOptionError(f"encryption={source}: that is neither base64 nor hex; {REMEDY}") from None
    if len(key) != KEY_BYTES:
        raise InvalidOptionError(
            f"encryption={source}: a key has {KEY_BYTES} bytes, and what is there has {len(key)}; {REMEDY}"
        )
    if len(set(key)) < _FEWEST_VALUES or all(32 <= value < 127 for value in key):
        raise InvalidOptionError(f"encryption={source}: those bytes are not random, so no key; {REMEDY}")
    return key


def _base64(text: str) -> bytes:
    return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)


def _path(text: Any) -> Path:
    path = Path(text)
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("expected the absolute path of a file outside the tier")
    return path


ENCRYPTION: Option[KeySource | None] = Option(
    "encryption",
    KeySource.parse,
    None,
    "env:NAME or file:/path, where the operator's key is (32 random bytes, base64 or hex): blocks are encrypted",
)
KEYRING: Option[Path | None] = Option(
    "keyring", _path, None, "file with the data keys of an encrypted tier, outside of it: /etc/kvstore/keyring.json"
)
SEALING: tuple[Option[object], ...] = (ENCRYPTION, KEYRING)
"""Both, for the options of a backend that seals."""


def check_outside(url: TierURL, keyring: Path) -> None:
    """Raise `InvalidOptionError` for a keyring that lies in the tier: who took the tier would have taken it along."""
    if not url.location.startswith("/"):
        return
    root = Path(url.location).resolve()
    if keyring.resolve().is_relative_to(root):
        raise InvalidOptionError(
            f"{url}: keyring={keyring} lies in the tier, where whoever copies the blocks copies it too: choose a path"
            f" outside of {root}"
        )
