"""How long a group's listing is, and how to read one beside other requests.

Digests are evenly spread over the 256 folders of a group, so the first page of a listing tells how many pages there
are: as many objects as stand in the folders that it has in full, times 256 by their number.
"""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvstore.objects.client import Listed

__all__ = ["PAGE", "Beside", "Estimate"]

PAGE = 1000
"""Objects in one page of a listing."""
FOLDERS = 256


class Estimate:
    """How many pages the listing of a group has, from those that were read."""

    def __init__(self, folder: str) -> None:
        self._start = len(folder) + 1
        self._counts: dict[str, int] = {}
        self._read = 0
        self.pages = 0

    def pages_left(self, page: Sequence[Listed]) -> int:
        """After one more page; 0 when the last folder was reached and nothing can follow."""
        for entry in page:
            name = entry.path[self._start : self._start + 3]
            self._counts[name] = self._counts.get(name, 0) + 1
        self._read += 1
        last = page[-1].path[self._start : self._start + 3]
        left = self._left(last)
        self.pages = self._read + left
        return left

    def _left(self, last: str) -> int:
        whole = sum(count for name, count in self._counts.items() if name != last)
        seen = whole + self._counts[last]
        try:
            done = int(last[:2], 16) if last.endswith("/") else FOLDERS
        except ValueError:
            return 0 if last > "ff/" else FOLDERS  # somebody else's: where this ends is not known
        objects = whole * FOLDERS / done if done else seen * FOLDERS
        return math.ceil(max(0.0, objects - seen) / PAGE)


class Beside:
    """`call` on a thread of its own, for which nobody has to wait. `inside` is entered around it: what it uses stays
    open so long.
    """

    def __init__(self, call: Callable[[], None], inside: AbstractContextManager[None] | None = None) -> None:
        self._call, self._inside = call, inside or nullcontext()
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        """Until it has ended, but no longer. Raises what it raised by then."""
        self._over.wait(seconds)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it and the frame that it was raised in would hold each other

    def _run(self) -> None:
        try:
            with self._inside:
                self._call()
        except BaseException as error:  # raised again, where somebody waits for it
            self._error = error
        finally:
            self._over.set()
