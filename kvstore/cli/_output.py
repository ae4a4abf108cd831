"""Where the command writes: a reader that leaves is no error, a full disk is one, and neither changes a verdict."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["OutputError", "guarded_output", "hold_standard_descriptors", "printable", "reader_left"]


class OutputError(click.ClickException):
    """The answer cannot be written to stdout."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"kvstore: {self.format_message()}", err=True, file=file)


def printable(text: str, keep: str = "") -> str:
    """`text` with what a terminal would act on, or cannot show, escaped as in Python; `keep` stays as it is."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def hold_standard_descriptors() -> None:
    """Open what is closed of descriptors 0 to 2 on the null device, so that no file of a tier comes to be stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free


def reader_left() -> bool:
    """Whether nobody reads what goes to stdout any more, as a write of the command has found."""
    return isinstance(sys.stdout, _Guarded) and sys.stdout.reader_left


@contextmanager
def guarded_output() -> Generator[None]:
    """Within the body, stdout and stderr are `_Guarded`."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = _Guarded(stdout, is_answer=True)
    sys.stderr = _Guarded(stderr, is_answer=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr


class _Guarded(io.TextIOBase):
    """A stream whose reader may leave: what comes after is dropped. The answer to any other failure is `OutputError`,
    where `is_answer`; what is only said beside it is dropped too. What cannot be encoded is escaped.
    """

    def __init__(self, stream: Any, *, is_answer: bool) -> None:
        self._stream, self._is_answer = stream, is_answer
        self._failure = OSError(errno.EBADF, "it is closed") if stream is None else None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str | bytes, /) -> int:  # click completes in bytes
        said = text.decode() if isinstance(text, bytes) else text
        self._try(lambda: self._stream.write(said))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and self._stream.closed:
            return  # whoever closed it has flushed it; the interpreter asks at the end
        self._try(lambda: self._stream.flush())

    def _try(self, call: Callable[[], object]) -> None:
        """Once something has failed it stays so: a caller may have swallowed the first error."""
        if self._failure is None:
            try:
                call()
            except OSError as error:
                self._failure = error
                self._to_null_device()
        if self._failure is not None and self._is_answer and self._failure.errno != errno.EPIPE:
            raise OutputError(f"stdout cannot be written: {self._failure.strerror}") from self._failure

    def _to_null_device(self) -> None:
        """The interpreter flushes once more at its end; that is not to fail again."""
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    @property
    def reader_left(self) -> bool:
        return self._failure is not None and self._failure.errno == errno.EPIPE

    def isatty(self) -> bool:
        return self._stream is not None and bool(self._stream.isatty())

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError(errno.EBADF, "the stream is closed")
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._stream, "encoding", None) or "utf-8")

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self._stream, "errors", None)
