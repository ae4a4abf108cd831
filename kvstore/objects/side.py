"""Many small requests at a time: what a batch takes when each of its requests waits for a network."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["WIDTH", "side_by_side"]

A = TypeVar("A")
B = TypeVar("B")

WIDTH = 32
"""Requests at a time. On loopback 1,000 HEADs take as long with 64; over a distance of 10 ms it is 3,000 a second."""


def side_by_side(call: Callable[[A], B], items: Sequence[A], width: int = WIDTH) -> list[B]:
    """`call` of each item, at most `width` of them at once; the results in the items' order.

    The first exception ends it: what has not begun does not begin, what has is waited for, and the exception is raised.
    One item is called on this thread. The threads live as long as the call, so there is nothing to close, and none is
    inherited by a fork; they are daemons, so that a call that hangs holds up no exit.
    """
    if len(items) < 2:
        return [call(item) for item in items]
    results: dict[int, B] = {}
    errors: list[BaseException] = []
    waiting = deque(enumerate(items))

    def work() -> None:
        while not errors:
            try:
                number, item = waiting.popleft()
            except IndexError:
                return
            try:
                results[number] = call(item)
            except BaseException as error:  # raised again, where somebody waits for it
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(width, len(items)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # an error and the frame it was raised in would hold each other, and what the items hold
    return [results[number] for number in range(len(items))]
