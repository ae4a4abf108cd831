"""Who has a local tier open, and in which state the last of them left it.

Both local backends open and close through here, before they touch a file of the tier. Liveness is a held file lock
(`flock`), never a process id: ids are reused, and containers number their own. In the tier's own directory:

| file | what it is |
|---|---|
| `gate` | locked exclusively while a process opens or closes, never longer |
| `users` | locked shared for as long as a process has the tier open; who gets it exclusively is alone |
| `lease-<32 hex digits>` | one per opening, locked exclusively for life; one that can be locked belongs to the dead |
| `state` | one line: `clean`, `dirty <boot id>`, or `rebuilding` |

A lease is made under a temporary name, locked, and then renamed, so one that can be seen unlocked is dead. `state` is
written to a temporary name, synced and renamed. All are for this machine: none of it works over a network.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["GATE_TIMEOUT_S", "Presence", "State"]

GATE_TIMEOUT_S = 60.0
"""How long an opening waits for another one (which may be rebuilding) before it gives up with an error."""


class State(enum.Enum):
    """How the last user left the tier."""

    MISSING = "missing"
    """No `state` file: a new tier, or one somebody tampered with."""
    CLEAN = "clean"
    """Closed by its last user; everything is on disk."""
    DIRTY = "dirty"
    """Not closed, but the machine has been up since: what was written is there, in the page cache or on disk."""
    SUSPECT = "suspect"
    """Not closed, and the machine was restarted since (or the file cannot be read): nothing is sure to be on disk."""
    REBUILDING = "rebuilding"
    """Its records were being written anew and that did not end: they are incomplete."""


@dataclass
class Presence:
    """One opening of a tier's directory by this process. Make one with `opening`, end it with `closing`.

    Usable from any thread. In a forked child the descriptors are closed at once, so that a child neither keeps the
    tier alive nor holds the lease.
    """

    directory: Path
    readonly: bool
    found: State
    """The state at the moment of opening."""
    alone: bool
    """Whether nobody else had the tier open; sure only inside `opening`, under the gate."""
    lease: bytes
    """16 random bytes that name this opening; all zero when it is read-only (it writes no intents)."""

    @classmethod
    @contextmanager
    def opening(cls, directory: Path, *, readonly: bool = False, mode: int = 0o600) -> Iterator[Presence]:
        """Join, holding the gate until the body ends: nobody else opens or closes meanwhile.

        The directory must exist. The body looks at `alone` and `found` and repairs what it must. If it raises,
        everything is let go. When it ends well and is not read-only, `state` says `dirty` of this boot and the tier
        stays joined after the gate is open again. Raises `StoreAccessError` when the directory cannot be written (or,
        read-only, read), or when the gate stays shut for `GATE_TIMEOUT_S`.
        """
        raise NotImplementedError
        yield

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Leave, under the gate. Yields whether this was the last user, who must bring everything to disk.

        After the body of the last user, `state` says `clean`; if the body raised, it still says `dirty`. The locks
        are let go and the lease is removed in any case. A second call yields False and does nothing.
        """
        raise NotImplementedError
        yield

    def mark(self, state: State) -> None:
        """Write `state`, synced: `REBUILDING` before records are dropped to be rebuilt. For the body of `opening`."""
        raise NotImplementedError

    def dead(self) -> Iterator[bytes]:
        """The lease of each user who died; locked while the caller reclaims what it left, then removed.

        A lease is removed only when the caller asks for the next one or exhausts the iterator: if reclaiming raises,
        it stays for the next try. Two processes that reclaim at once never get the same lease.
        """
        raise NotImplementedError
        yield
