"""The file that `kvstore purge --receipt` writes: its room is there before anything is removed, and it is whole or not.

What was there under its name stays until the new receipt is: an interrupted purge leaves no empty one behind.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.files import sync_folder

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["ReceiptFile"]

RESERVED = 256 << 10
"""Bytes: some hundred tiers of a few namespaces each."""

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class ReceiptFile:
    """A file to be written once, within a `with`. Raises a `click.ClickException` where that will not be possible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # What is no file (/dev/stdout, a pipe) is not replaced, and neither is what a link points to.
        self._target = Path(os.path.realpath(path))
        self._draft: Path | None = None
        try:
            if not self._target.exists() or self._target.is_file():
                self._draft = self._target.with_name(f".{self._target.name}.{secrets.token_hex(4)}")
                self._reserve(self._draft)
            else:
                os.close(os.open(self._target, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            self._forget()
            raise click.UsageError(
                f"--receipt {path}: it cannot be written there ({error.strerror}), and nothing was removed: name"
                " another file"
            ) from error

    def _reserve(self, draft: Path) -> None:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, RESERVED)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        finally:
            os.close(descriptor)

    def write(self, text: str) -> None:
        """Put the receipt there, on the device. Raises OSError."""
        with (self._draft or self._target).open("r+" if self._draft else "w") as file:
            file.write(text)
            file.flush()
            if self._draft is None:
                return
            file.truncate()
            os.fsync(file.fileno())
        if self._target.exists():
            self._draft.chmod(self._target.stat().st_mode & 0o777)
        self._draft.replace(self._target)
        self._draft = None
        sync_folder(self._target.parent)

    def _forget(self) -> None:
        if self._draft is not None:
            with suppress(OSError):
                self._draft.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
