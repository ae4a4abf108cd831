"""The keyring: a file with one data key for each tenant, shared by every process that seals or opens its blocks.

Reading takes no lock: the file is replaced whole, by a rename. Whoever writes holds the lock of `<keyring>.lock`,
writes `<keyring>.new`, syncs it, renames it and syncs the folder; a process that is killed meanwhile leaves the old
keyring or the new one. A new keyring and its lock have permissions 0600; what is written anew has the owner and the
permissions of what it replaces. A path that is a link is followed, so that all who name the file change the same one.

Before each batch a process looks whether the file is still the one it has read (`Keyring.ring`): it keeps that one
open, so that no other can get its inode, and compares. So a key that was destroyed serves nobody from then on. It does
so again for a block whose key it does not know: that may have been made since.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import KeyringError
from kvstore.files import sync_folder
from kvstore.sealing.document import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping
    from typing import Self

__all__ = ["DataKey", "Keyring", "Ring"]

PATIENCE_S = 5.0
"""How long who wants to write a keyring waits for another: puts of a tenant without a key wait, and slots with them."""
STALLED_PATIENCE_S = 0.05
"""How long who comes later waits, while it is known that somebody keeps the lock."""
_PAUSE_S = 0.01
_MODE = 0o600
_log = logging.getLogger("kvstore.sealing")


class _LockedError(KeyringError):
    """Somebody else has the lock, and keeps it."""


class DataKey(NamedTuple):
    """What seals a tenant's blocks: 16 bytes that name it, and the key itself, 32 bytes."""

    id: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"


@dataclass(frozen=True, slots=True)
class Ring:
    """The data keys as the file had them at one moment.

    `current` has a tenant's key for what is stored now, `keys` every key by its id, `tenants` whose it is. `destroyed`
    are ids of keys that are no more.
    """

    current: Mapping[str, DataKey] = field(default_factory=dict[str, DataKey], repr=False)
    keys: Mapping[bytes, bytes] = field(default_factory=dict[bytes, bytes], repr=False)
    destroyed: frozenset[bytes] = frozenset()
    tenants: Mapping[bytes, str] = field(default_factory=dict[bytes, str], repr=False)
    anew: Callable[[], Ring] | None = field(default=None, repr=False, compare=False)
    """How it is read again."""

    def key(self, key_id: bytes) -> bytes | None:
        """The data key of that id, also one that was made since: whoever reads a batch has its ring from before, and a
        block may be sealed anew meanwhile.
        """
        found = self.keys.get(key_id)
        if found is None and self.anew is not None and key_id not in self.destroyed:
            with suppress(KeyringError):
                found = self.anew().keys.get(key_id)
        return found


class Keyring:
    """An open keyring. Thread-safe; who reads waits for nobody who writes. Not for a forked child.

    Where the operator's key was changed meanwhile (`kvstore rekey`), what this process has unwrapped serves on for as
    long as it stands in the file; keys made since are unknown to it until it is opened anew.

    Every call raises `KeyringError` where the file is damaged or cannot be read, or the keyring was closed.
    """

    def __init__(self, path: Path, operator_key: bytes) -> None:
        """For `open`."""
        self.path = path
        self._operator_key = operator_key
        self._lock = threading.RLock()
        self._file = -1
        self._version: tuple[int, ...] = ()
        self._ring = Ring()
        self._is_stalled = False
        self._document, file = _read(path)
        if not self._document.is_wrapped_by(operator_key):
            os.close(file)
            raise KeyringError(
                f"{path} was made with another operator's key than encryption= names: give that one (kvstore rekey"
                " changes it); or it is damaged: restore it from a copy"
            )
        self._take(self._document, file)
        damaged = sorted({entry.tenant for entry in self._document.keys if entry.id not in self._ring.keys})
        if damaged:
            _log.warning(
                "%s: data keys of %s are damaged: what is sealed with them is a miss until the keyring is restored from"
                " a copy",
                *(path, ", ".join(map(repr, damaged))),
            )

    @classmethod
    def open(cls, path: str | Path, operator_key: bytes, *, create: bool = True) -> Self:
        """The keyring at `path`, wrapped by `operator_key` (32 bytes); `create` makes an empty one where none is.

        Raises `KeyringError` where there is none, a damaged one, or one of another operator's key, and
        `MissingDependencyError` without `cryptography`.
        """
        path = Path(path)
        if create and not os.path.exists(path):  # noqa: PTH110 - no error where it may not be looked for
            with _writing(path) as file:
                if not file.exists():
                    _replace(file, Document.new(operator_key))
        return cls(path, operator_key)

    @property
    def id(self) -> str:
        """What the tiers that are sealed with it know it by: 32 hex digits, the same for as long as it exists."""
        return self._document.id.hex()

    def ring(self) -> Ring:
        """The data keys as they are now: read anew if the file was replaced, changed or removed."""
        with self._lock:
            self._check_open()
            try:
                status = os.stat(self.path)  # noqa: PTH116 - once a batch
            except FileNotFoundError:
                return Ring()
            except OSError as error:
                raise KeyringError(f"{self.path}: {error.strerror}") from error
            if _version_of(status) != self._version:
                self._take(*_read(self.path))
            return self._ring

    def key(self, key_id: bytes) -> bytes | None:
        """The data key of that id; None where it was destroyed, or never was in this keyring."""
        return self.ring().keys.get(key_id)

    def data_key(self, tenant: str) -> DataKey:
        """The key that seals what is stored for `tenant` from now on; made where it has none.

        Raises `KeyringError` where one has to be made and cannot be written, or the operator's key was changed.
        """
        found = self.ring().current.get(tenant)
        if found is None:
            self._change(
                lambda document: document if document.current(tenant) else document.with_key(tenant, self._operator_key)
            )
            found = self.ring().current.get(tenant)
        if found is None:
            raise KeyringError(f"{self.path} has no usable data key for tenant {tenant!r}: it is damaged")
        return found

    def destroy(self, tenant: str) -> bool:
        """Destroy all data keys of `tenant`: whatever was sealed under them can be read by nobody any more.

        True where it had any, and the keyring was written without them. Copies of the file that others have kept, with
        the operator's key, are for them to erase. A block that was stored for `tenant` after this gets a new key.
        """
        gone: list[bytes] = []

        def without(document: Document) -> Document:
            gone[:] = [key.id for key in document.keys if key.tenant == tenant]
            return document.without(frozenset(gone))

        self._change(without)
        return bool(gone)

    def tenants(self) -> list[str]:
        """Those that have a data key, in order; `""` are blocks of nobody in particular."""
        return sorted(self.ring().current)

    def renew(self, tenants: Collection[str] | None = None) -> frozenset[bytes]:
        """A new data key for each tenant that has one, or for those of `tenants` alone; the ids of those before, which
        stay until they are retired.
        """
        old: list[bytes] = []

        def renewed(document: Document) -> Document:
            renewing = [key for key in document.keys if tenants is None or key.tenant in tenants]
            old[:] = [key.id for key in renewing]
            for tenant in {key.tenant for key in renewing}:
                document = document.with_key(tenant, self._operator_key)
            return document

        self._change(renewed)
        return frozenset(old)

    def old_keys(self) -> frozenset[bytes]:
        """Ids of data keys that seal nothing new: those before a `renew`."""
        ring = self.ring()
        return frozenset(ring.keys) - {key.id for key in ring.current.values()}

    def retire(self, ids: Iterable[bytes]) -> None:
        """Destroy these data keys, but for those in use for what is stored now."""
        wanted = frozenset(ids)

        def without(document: Document) -> Document:
            return document.without(wanted - {key.id for key in document.keys if key.current})

        self._change(without)

    def rewrap(self, new_operator_key: bytes) -> None:
        """Wrap every data key by another operator's key; the old one opens this keyring no more."""
        self._change(lambda document: document.rewrapped(self._operator_key, new_operator_key))
        with self._lock:
            self._operator_key = new_operator_key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and forget the keys."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._version, self._ring = -1, (), Ring()

    def _change(self, act: Callable[[Document], Document]) -> None:
        """Replace the document by what `act` makes of it, under the lock of all processes: it may take a while to come
        by, and readers in this process do not wait for it.
        """
        self._check_open()
        try:
            with _writing(self.path, STALLED_PATIENCE_S if self._is_stalled else None) as path:
                self._is_stalled = False
                self._change_locked(path, act)
        except _LockedError:
            self._is_stalled = True
            raise

    def _change_locked(self, path: Path, act: Callable[[Document], Document]) -> None:
        before, file = _read(path)
        os.close(file)
        if before.id != self._document.id:
            raise KeyringError(f"{self.path} is another keyring than the one that was opened: open the tier anew")
        if not before.is_wrapped_by(self._operator_key):
            raise KeyringError(f"{self.path}: its operator's key was changed meanwhile: open the tier with the new one")
        after = act(before)
        if after != before:
            _replace(path, after)

    def _check_open(self) -> None:
        if self._file < 0:
            raise KeyringError(f"{self.path}: this keyring was closed: open it anew")

    def _take(self, document: Document, file: int) -> None:
        """Make the ring of the document in `file`, which is kept open from now on. What was unwrapped already stays so,
        if it still stands there.
        """
        if self._file >= 0:
            os.close(self._file)
        self._file, self._version = file, _version_of(os.fstat(file))
        if document.id != self._document.id:
            self._ring = Ring()
            return
        known, keys = self._ring.keys, dict[bytes, bytes]()
        current: dict[str, DataKey] = {}
        for entry in document.keys:
            key = known.get(entry.id) or entry.unwrapped(document.id, self._operator_key)
            if key is None:
                continue
            keys[entry.id] = key
            if entry.current:
                current[entry.tenant] = DataKey(entry.id, key)
        tenants = {entry.id: entry.tenant for entry in document.keys}
        self._ring = Ring(current, keys, frozenset(document.destroyed), tenants, self.ring)


def _read(path: Path) -> tuple[Document, int]:
    """The document in the file, and the file, open."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise KeyringError(
            f"{path} is not there: an encrypted tier needs the keyring that it was made with; mend keyring="
        ) from None
    except OSError as error:
        raise KeyringError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Document.unpacked(os.pread(file, os.fstat(file).st_size, 0), str(path)), file
    except BaseException:
        os.close(file)
        raise


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _writing(path: Path, patience_s: float | None = None) -> Generator[Path]:
    """The lock of who writes the keyring, in any process; where the keyring really is, if `path` is a link. Raises
    `KeyringError` where nothing can be written.
    """
    path = path.resolve()
    try:
        file = _lock_file(path)
    except OSError as error:
        raise KeyringError(
            f"{path} cannot be changed here ({error.strerror}): make its folder, writable for this process, or have a"
            " process that may write it store for each tenant first"
        ) from error
    try:
        _lock(file, path, PATIENCE_S if patience_s is None else patience_s)
        yield path
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open
        os.close(file)


def _lock(file: int, path: Path, patience_s: float) -> None:
    """Take the lock, unless who has it keeps it for longer than it takes to write a keyring."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _LockedError(
                    f"{path} has been locked for {PATIENCE_S:.3g} s or more by a process that changes it, or was"
                    f" stopped while it did: find it (lslocks, fuser {path}.lock) and let it go on or end it"
                ) from None
            time.sleep(_PAUSE_S)
        else:
            return


def _lock_file(path: Path) -> int:
    lock, flags = f"{path}.lock", os.O_RDWR | os.O_CLOEXEC
    try:
        file = os.open(lock, flags | os.O_CREAT | os.O_EXCL, _MODE)
    except FileExistsError:
        return os.open(lock, flags)
    _make_like(path, file)
    return file


def _make_like(path: Path, file: int) -> None:
    """Give `file` the owner, the group and the permissions of what is at `path`, as far as this process may."""
    try:
        like = os.stat(path)  # noqa: PTH116 - as everywhere here
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(like.st_mode)
    try:
        os.fchown(file, like.st_uid, like.st_gid)
    except OSError:
        try:
            os.fchown(file, -1, like.st_gid)
        except OSError:
            mode &= ~stat.S_IRWXG  # they were meant for another group
    os.fchmod(file, mode)


def _replace(path: Path, document: Document) -> None:
    """Put `document` in place of what is there, whole or not at all. Under the lock."""
    new = Path(f"{path}.new")
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # of one that was killed
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with open(file, "wb") as stream:
            _make_like(path, file)
            stream.write(document.packed())
            stream.flush()
            os.fsync(file)
        new.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise KeyringError(f"{path} cannot be written: {error.strerror}") from error
