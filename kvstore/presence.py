"""Who has a local tier open, and in which state the last of them left it.

Both local backends open and close through here, before they touch a file of the tier. Liveness is a held file lock
(`flock`), never a process id: ids are reused, and containers number their own. In the tier's own directory:

| file | what it is |
|---|---|
| `gate` | locked exclusively while a process opens or closes, never longer |
| `users` | locked shared for as long as a process has the tier open; who gets it exclusively is alone |
| `lease-<32 hex digits>` | one per opening, locked exclusively for life; one that can be locked belongs to the dead |
| `state` | one line, padded to 64 bytes: `clean [<what the records were like>]`, `dirty <boot id>`, or `rebuilding` |
| `scrub` | locked exclusively by the one who scrubs, if anybody does; how far that has come (`kvstore.scrub`) |

A lease is made under a temporary name, locked, and then renamed, so one that can be seen unlocked is dead. `state` is
written to a temporary name, synced and renamed. All are for this machine: none of it works over a network.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvstore.errors import StoreAccessError, StoreFullError, StoreOpenError, TierUnavailable
from kvstore.files import DRAFT, open_or_make, permit, replace_file, sweep_drafts, sync_folder, write_all

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Self

__all__ = [
    "GATE_TIMEOUT_S",
    "PRESENCE_BYTES",
    "Presence",
    "State",
    "explained",
    "is_presence_file",
    "mode_of",
]

GATE_TIMEOUT_S = 60.0
"""How long an opening waits for another one (which may be rebuilding) before it gives up with an error."""

PRESENCE_BYTES = 4 * 4096
"""What these files occupy at most: `state`, its successor and `scrub`, a block each (locks are empty), and some air."""

_LEASE = "lease-"
_LINE_BYTES = 64


class State(enum.Enum):
    """How the last user left the tier."""

    MISSING = "missing"
    """No `state` file: a new tier, one that was never fully opened, or one somebody tampered with."""
    CLEAN = "clean"
    """Closed by its last user; everything is on disk."""
    DIRTY = "dirty"
    """Not closed, but the machine has been up since: what was written is there, in the page cache or on disk."""
    SUSPECT = "suspect"
    """Not closed, and the machine was restarted since (or the file cannot be read): nothing is sure to be on disk."""
    REBUILDING = "rebuilding"
    """Its records were being written anew and that did not end: they are incomplete."""


_REMEDIES = {
    errno.EACCES: "check owner, permissions and mount",
    errno.EPERM: "check owner, permissions and mount",
    errno.EROFS: "it is mounted read-only: mount it writable, or only look at it, with readonly=true in the URL",
    errno.EMFILE: "this process has too many files open (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter path",
}


@contextmanager
def explained(directory: Path) -> Generator[None]:
    """Turns an `OSError` about the tier at `directory` into the `StoreOpenError` that says what to do about it."""
    try:
        yield
    except StoreOpenError:
        raise
    except UnicodeEncodeError as error:
        raise StoreAccessError(
            f"{str(directory)!a} cannot be said in this process's file system encoding, {error.encoding}: set"
            " LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = StoreFullError if full else StoreAccessError
        remedy = "make room" if full else _REMEDIES.get(error.errno or 0, "look at its device and mount")
        named = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        raise kind(f"{directory} cannot be used as a tier: {error.strerror}{named}: {remedy}") from error


def mode_of(path: Path) -> int:
    """The permissions of files in a tier that is there already, from one of its own files or folders; 0600 if none."""
    try:
        return path.stat().st_mode & 0o666 | 0o600
    except (FileNotFoundError, NotADirectoryError):
        return 0o600


def is_presence_file(name: str) -> bool:
    """Whether a file of this name in a tier's directory belongs to this module."""
    return name in ("gate", "users", "state", "writer", "scrub") or name.startswith((_LEASE, DRAFT))


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

    def __init__(self, directory: Path, *, readonly: bool, mode: int) -> None:
        """For `opening`."""
        self.directory, self.readonly, self._mode = directory, readonly, mode
        self.lease = bytes(16) if readonly else os.urandom(16)
        self.alone, self.found = False, State.MISSING
        self._distrusted = False
        self._sealed = self._found_seal = ""
        self._descriptors: dict[str, int] = {}
        _all.add(self)

    @classmethod
    @contextmanager
    def opening(cls, directory: Path, *, readonly: bool = False, mode: int = 0o600) -> Generator[Self]:
        """Join, holding the gate until the body ends: nobody else opens or closes meanwhile.

        The directory must exist. The body looks at `alone` and `found` and repairs what it must. `clean` becomes
        `dirty` of this boot before the body starts, any other state once it has ended well (so that repairs that did
        not end are begun again); then the tier stays joined and the gate opens. If the body raises, everything is let
        go. Read-only, nothing is written, and where the lock files are missing none are held.

        Raises `StoreAccessError` when the directory cannot be written (or,
        read-only, read), or when the gate stays shut for `GATE_TIMEOUT_S`; `StoreFullError` when the disk is full.
        """
        presence = cls(directory, readonly=readonly, mode=mode)
        try:
            with explained(directory):
                presence._join()
            yield presence
            with explained(directory):
                presence._stay()
        except BaseException:
            presence._leave()
            raise

    @contextmanager
    def closing(self) -> Generator[bool]:
        """Leave, under the gate. Yields whether this was the last user, who must bring everything to disk.

        After the body of the last user, `state` says `clean` (or `rebuilding`, see `distrust`); if the body raised, it
        still says `dirty`. The locks are let go and the lease is removed in any case. A second call yields False and
        does nothing; where the directory is gone, nothing is written.
        """
        if "users" not in self._descriptors:
            yield False
            return
        if self.gone or not self.directory.exists():  # what stands there now, if anything, is another tier
            try:
                yield False
            finally:
                self._leave()
            return
        try:
            self._lock("gate")
            last = _try_exclusive(self._descriptors["users"]) and not self.readonly
            yield last
            if last:
                self.mark(State.REBUILDING if self._distrusted else State.CLEAN)
        finally:
            self._leave()

    @property
    def gone(self) -> bool:
        """Whether somebody removed the directory from under us: our own files have no name any more. One fstat."""
        descriptor = self._descriptors.get("lease", self._descriptors.get("users"))
        return descriptor is not None and not os.fstat(descriptor).st_nlink

    def check(self) -> None:
        """Raise `TierUnavailable` if the directory was removed (`gone`)."""
        if self.gone:
            raise TierUnavailable(f"{self.directory} was removed while it was open here: close it and open it again")

    def seal(self, records: Path) -> None:
        """Remember what this file is like, now that the last user is done with it: see `untouched`."""
        self._sealed = _likeness(records)

    def untouched(self, records: Path) -> bool:
        """Whether the tier was left clean and this file is, by inode, size and time, as its last user left it."""
        with suppress(OSError):
            return self.found is State.CLEAN and bool(self._found_seal) and self._found_seal == _likeness(records)
        return False

    def distrust(self) -> None:
        """The tier's records were found damaged: the last user to leave does not call them clean, and the next one to
        come alone looks closely or builds them anew.
        """
        self._distrusted = True

    def mark(self, state: State) -> None:
        """Write `state`, synced: `REBUILDING` before records are dropped to be rebuilt. For the body of `opening`.

        On a full disk the line is overwritten in place: less than a sector, and if it is torn it reads as `SUSPECT`.
        """
        more = _boot_id() if state is State.DIRTY else self._sealed if state is State.CLEAN else ""
        text = f"{state.value} {more}".rstrip().ljust(_LINE_BYTES - 1).encode("ascii") + b"\n"
        path, temporary = self.directory / "state", self.directory / f"{DRAFT}state"
        try:
            replace_file(path, text, draft=temporary, mode=self._mode)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise
            with path.open("r+b", buffering=0) as file:
                write_all(file.fileno(), text)
                os.fsync(file.fileno())
            sync_folder(self.directory)

    def dead(self) -> Generator[bytes]:
        """The lease of each user who died; locked while the caller reclaims what it left, then removed.

        A lease is removed only when the caller asks for the next one or exhausts the iterator: if reclaiming raises,
        it stays for the next try. Two processes that reclaim at once never get the same lease.
        """
        for path in sorted(self.directory.glob(f"{_LEASE}*")):
            name = path.name.removeprefix(_LEASE)
            if name == self.lease.hex() or not _is_lease(name):
                continue
            descriptor = _open_dead(path)
            if descriptor is None:
                continue
            try:
                yield bytes.fromhex(name)
                path.unlink()
            finally:
                os.close(descriptor)

    def leases(self) -> set[bytes]:
        """The leases that are there, of the living and of those of the dead that `dead` has not yet given out."""
        names = [path.name.removeprefix(_LEASE) for path in self.directory.glob(f"{_LEASE}*")]
        return {bytes.fromhex(name) for name in names if _is_lease(name)}

    def _join(self) -> None:
        self._lock("gate")
        descriptor = self._open("users")
        self.alone = descriptor is None or _try_exclusive(descriptor)
        self.found = self._read_state()
        if self.readonly:
            return
        if self.alone:
            sweep_drafts(self.directory)
            if self.found is State.CLEAN:
                self.mark(State.DIRTY)
        temporary = self.directory / f"{DRAFT}{self.lease.hex()}"
        self._descriptors["lease"] = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        permit(self._descriptors["lease"], self._mode)
        fcntl.flock(self._descriptors["lease"], fcntl.LOCK_EX)
        temporary.rename(self.directory / f"{_LEASE}{self.lease.hex()}")

    def _stay(self) -> None:
        if self.alone and not self.readonly and self._read_state() is not State.DIRTY:
            self.mark(State.DIRTY)
        if "users" in self._descriptors:
            fcntl.flock(self._descriptors["users"], fcntl.LOCK_SH)
        self._let_go("gate")

    def _open(self, name: str) -> int | None:
        path = self.directory / name
        try:
            descriptor = (
                os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if self.readonly
                else open_or_make(path, os.O_RDWR, self._mode)
            )
        except FileNotFoundError:
            if not self.readonly:
                raise
            return None
        self._descriptors[name] = descriptor
        return descriptor

    def _lock(self, name: str) -> None:
        descriptor = self._open(name)
        if descriptor is None:
            return
        deadline = time.monotonic() + GATE_TIMEOUT_S
        while not _try_exclusive(descriptor):
            if time.monotonic() > deadline:
                raise StoreAccessError(
                    f"{self.directory / name} has been locked for {GATE_TIMEOUT_S:.0f} s by a process that is opening"
                    " or closing this tier: find it (lslocks, fuser) and let it go on or end it"
                )
            time.sleep(0.002)

    def _read_state(self) -> State:
        try:
            words = (self.directory / "state").read_text("ascii", "replace").split()
        except FileNotFoundError:
            return State.MISSING
        if words[:1] == ["clean"] and len(words) <= 2:
            self._found_seal = words[1] if len(words) == 2 else ""
            return State.CLEAN
        if words == ["rebuilding"]:
            return State.REBUILDING
        return State.DIRTY if words == ["dirty", _boot_id()] else State.SUSPECT

    def _leave(self) -> None:
        if "lease" in self._descriptors:
            for prefix in (_LEASE, DRAFT):
                (self.directory / f"{prefix}{self.lease.hex()}").unlink(missing_ok=True)
        for name in ("lease", "users", "gate"):  # the gate last: whoever waits there must find the rest let go
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)


def _is_lease(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _try_exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_dead(path: Path) -> int | None:
    """The lease at `path`, locked, if its owner is dead and nobody else is reclaiming it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _try_exclusive(descriptor) and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None


def _likeness(path: Path) -> str:
    status = path.stat()
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


_all: WeakSet[Presence] = WeakSet()


def _close_in_child() -> None:
    for presence in list(_all):
        for name in list(presence._descriptors):  # pyright: ignore[reportPrivateUsage]
            presence._let_go(name)  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_close_in_child)
