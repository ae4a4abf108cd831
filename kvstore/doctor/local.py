"""What every tier in a local folder needs of the folder, its file system, its other users, and of this process.

Each check is a method that yields findings; a backend's `diagnose` calls those that matter to it. None of them leaves a
trace: where something has to be written to know, it is a file without a name (`O_TMPFILE`).
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.doctor.finding import Finding, ok, problem, warning
from kvstore.errors import StoreAccessError, StoreOpenError
from kvstore.lmdb_files import check_filesystem, filesystem_of
from kvstore.presence import Presence, State
from kvstore.url import CAPACITY, READONLY, TierURL, format_size, local_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kvstore.types import Usage

__all__ = ["LocalPlace"]

LEAST_FREE = 1 << 20
"""Bytes on the disk without which no tier can be made."""

SMALL_BLOCK = 256 << 10
"""Where inodes run out before the room does, blocks larger than this are common enough for that not to matter."""

CLOCK_TOLERANCE_S = 2.0

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs")

_READ_ONLY_MOUNT = (
    "mount it writable (mount -o remount,rw; in Kubernetes leave out readOnly of the volume), or give the URL"
    " readonly=true where an engine is only to read"
)
_NO_PRIVILEGE = (
    "give it to the user that the engine runs as (chown), or name another folder; in Kubernetes set"
    " securityContext.fsGroup to a group that may write the volume"
)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """Where a tier is, or would be made. `records` is the folder with its lock files."""

    url: TierURL
    path: Path
    standing: Path
    """The path itself, or the nearest folder above it that exists: what the tier would be made in."""
    records: Path

    @classmethod
    def of(cls, url: TierURL, *, inner: str = "") -> LocalPlace:
        """The place that the validated `url` names, whose lock files are in the folder `inner` of it."""
        path = local_path(url)
        standing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110 - no error
        return cls(url, path, standing, path / inner)

    @property
    def is_made(self) -> bool:
        """Whether a tier is there already."""
        return os.path.exists(self.records / "gate")  # noqa: PTH110

    @property
    def is_usable(self) -> bool:
        """Whether the other checks can be made: a folder stands here that this user may enter."""
        return self.standing.is_dir() and os.access(self.standing, os.X_OK, effective_ids=True)

    @contextmanager
    def nameless(self, flags: int = 0) -> Generator[int | None]:
        """A descriptor of a new file without a name on the tier's file system; None where that is not possible."""
        try:
            descriptor = os.open(self.standing, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def location(self) -> Iterator[Finding]:
        """It exists or can be made, this user may use it, nobody may who should not."""
        status, who = self.standing.stat(), f"uid {os.geteuid()}"
        owned = f"owned by uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        if not stat.S_ISDIR(status.st_mode):
            yield problem("location", f"{self.standing} is not a directory", "name another path")
            return
        readonly = self.url.option(READONLY)
        wanted, verb = (os.R_OK, "read") if readonly else (os.W_OK, "write")
        if not readonly and os.statvfs(self.standing).f_flag & os.ST_RDONLY:
            yield problem("location", f"{self.standing} is mounted read-only", _READ_ONLY_MOUNT)
        elif not os.access(self.standing, os.X_OK | wanted, effective_ids=True):
            yield problem("location", f"{who} cannot {verb} {self.standing} ({owned})", _NO_PRIVILEGE)
        elif self.standing == self.path:
            yield ok("location", f"{self.path} exists ({owned}); {who} may use it")
        elif readonly:
            yield problem("location", f"{self.path} does not exist", "leave out readonly=true once, so that it is made")
        else:
            yield ok("location", f"{self.path} does not exist; {who} can make it in {self.standing}")
        if self.is_made and status.st_mode & 0o007:
            yield warning(
                "permissions",
                f"everybody on this machine may enter {self.path} (mode {stat.S_IMODE(status.st_mode):04o}), and KV"
                " caches can be turned back into prompts",
                "chmod o-rwx, and give the URL no mode= that lets others in",
            )

    def filesystem(self) -> Iterator[Finding]:
        """Local, lasting, and known."""
        kind = filesystem_of(self.standing)
        try:
            check_filesystem(self.standing)
        except StoreAccessError as error:
            yield problem("file system", str(error))
            return
        if kind in ("tmpfs", "ramfs"):
            yield warning(
                "file system",
                f"{kind}: memory, lost with a restart, and counted against a container's memory",
                "use a folder on an NVMe drive",
            )
        elif kind == "overlay":
            yield warning(
                "file system",
                "overlay: a container's own layer, lost with the container and slow",
                "mount a volume (Kubernetes: hostPath or a local persistent volume)",
            )
        elif kind in _LOCAL:
            yield ok("file system", f"{kind}, local")
        else:
            yield warning(
                "file system", f"{kind or 'unknown'}: kvstore was not tried on it", "use ext4 or xfs on a local drive"
            )

    def space(self, usage: Usage | None, *, file_per_block: bool = False) -> Iterator[Finding]:
        """The disk holds what the capacity allows. `usage`: the tier's, where it could be opened."""
        disk = os.statvfs(self.standing)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        taken = 0 if usage is None else usage.used + usage.reserved + usage.overhead
        wanted = self.url.option(CAPACITY)
        capacity = wanted.resolve(self.standing) if wanted else usage.capacity if usage else None
        of_disk = f"{format_size(free)} free of {format_size(size)}"
        if not size:
            yield warning("space", "the file system does not tell its size", "give the URL a capacity in bytes")
        elif free < LEAST_FREE and not self.is_made:
            yield problem("space", f"{of_disk}: too little for even an empty tier", "make room")
        elif capacity is None:
            yield warning(
                "space", f"{of_disk}, and no capacity: the tier grows until the disk is full", "add capacity=80%"
            )
        elif capacity > taken + free:
            yield warning(
                "space",
                f"{of_disk} beside {format_size(taken)} of this tier: less than its capacity, {format_size(capacity)}",
                f"make room, or set capacity to less than {format_size(taken + free)}",
            )
        else:
            yield ok("space", f"{of_disk}; capacity {format_size(capacity)}, {format_size(taken)} of it in use")
        if file_per_block:
            yield from self._inodes(disk, min(free, sizes) if (sizes := (capacity or size) - taken) > 0 else 0)

    def _inodes(self, disk: os.statvfs_result, room: int) -> Iterator[Finding]:
        if not disk.f_files:
            yield ok("inodes", "the file system makes them as needed")
        elif room > disk.f_favail * SMALL_BLOCK:
            least = format_size(room / disk.f_favail) if disk.f_favail else "any size"
            yield warning(
                "inodes",
                f"{disk.f_favail} free: blocks smaller than {least} use them up before the room",
                "use lmdb://, which has one file, or a file system made with more inodes",
            )
        else:
            yield ok("inodes", f"{disk.f_favail} free")

    def users(self) -> Iterator[Finding]:
        """Who else has the tier open, as its locks tell, and how the last one left it."""
        if not self.is_made:
            yield ok("other users", f"none, there is no tier yet ({_namespace_of_pids()})")
            return
        try:
            with Presence.opening(self.records, readonly=True) as presence:
                alone, found = presence.alone, presence.found
                pids = [] if alone else _holders(self.records / "users")
            with presence.closing():
                pass
        except StoreOpenError as error:
            yield problem("other users", str(error))
            return
        if alone:
            yield ok("other users", f"none at the moment ({_namespace_of_pids()})")
        elif pids:
            yield ok("other users", f"open in {', '.join(map(_process, pids))}: they share its blocks and its capacity")
        else:
            yield problem(
                "other users",
                f"a process that cannot be seen from here has it open: it is in another PID namespace than this one"
                f" ({_namespace_of_pids()})",
                "give containers that share a tier one PID namespace (docker --pid, Kubernetes shareProcessNamespace),"
                " or a directory each",
            )
        if alone and found in (State.SUSPECT, State.REBUILDING):
            yield warning(
                "last use",
                "it was not closed before the machine was restarted, or its records were being built anew",
                "the next opening that writes checks all of it first: let that happen before traffic comes",
            )
        elif alone and found is State.DIRTY:
            yield ok("last use", "it was not closed; the next opening gives back what was left half done")

    def clock(self) -> Iterator[Finding]:
        """Files get the time that this process has, and the machine says which boot this is."""
        if not os.access("/proc/sys/kernel/random/boot_id", os.R_OK):
            yield problem(
                "clock",
                "/proc/sys/kernel/random/boot_id cannot be read: a crash could not be told from a restart",
                "mount /proc in the container",
            )
            return
        offsets = [max(0.0, self.records.stat().st_mtime - time.time())] if self.is_made else []
        with self.nameless() as descriptor:
            if descriptor is not None:
                offsets.append(os.fstat(descriptor).st_mtime - time.time())
        ahead = max(offsets, key=abs, default=0.0)
        if abs(ahead) > CLOCK_TOLERANCE_S:
            yield warning(
                "clock",
                f"the tier's files are {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's clock:"
                " ages and ttl are off by as much",
                "synchronise the clocks (chrony, systemd-timesyncd)",
            )
        else:
            yield ok("clock", "files get this machine's time")


def _namespace_of_pids() -> str:
    """`/proc/self/ns/pid`; the machine's own has a constant number (PROC_PID_INIT_INO in Linux's proc_ns.h)."""
    try:
        name = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path
    except OSError:
        return "PID namespace unknown"
    return f"{name}, {'the machine' if name == 'pid:[4026531836]' else 'a container'}'s own"


def _holders(file: Path) -> list[int]:
    """The processes, of those that can be seen from here, that hold an flock on `file`."""
    try:
        lines = Path("/proc/locks").read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    inode = str(file.stat().st_ino)
    fields = [line.split() for line in lines]
    held = [row for row in fields if row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]
    return sorted({int(row[4]) for row in held} - {os.getpid(), -1, 0})


def _process(pid: int) -> str:
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text('utf-8', 'replace').strip()})"
    except OSError:
        return f"process {pid}"
