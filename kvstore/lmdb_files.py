"""What can be said of LMDB's files without LMDB: may it be used where they are, and are they sound?

`Environment.open` asks before it hands them over, because LMDB answers damage with a signal.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from lmdb.verify import VerifyError, verify  # pyright: ignore[reportUnknownVariableType]

from kvstore.errors import StoreAccessError
from kvstore.lmdb_pages import PAGE, PageError, Pages, Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.lmdb_pages import Numbers

__all__ = ["PAGE", "Entries", "check_filesystem", "damage", "filesystem_of", "free_pages", "is_network", "readable"]

Entries: TypeAlias = "dict[bytes, Callable[[], bytes]]"
"""Keys of a database, and what reads their values (and may raise `PageError` or OSError)."""

# Untyped in py-lmdb.
_verify = cast("Callable[[str], list[str]]", verify)

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|ceph|lustre|9p|afs|gpfs|beegfs\w*|orangefs|pvfs2|ocfs2|gfs2|virtiofs|fuse(\..*)?", re.I
)


def filesystem_of(path: Path) -> str:
    """The type of the file system that the existing `path` is on, as `/proc/self/mountinfo` has it; "" if unknown."""
    place, found, longest = os.path.realpath(path), "", -1
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        at = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        inside = place == at or place.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= longest:  # of two mounts at one place the later one is seen
            found, longest = right.split(" ")[0], len(at)
    return found


def is_network(kind: str) -> bool:
    """Whether a file system of that type is a network's, a cluster's, or FUSE's, behind which anything may be."""
    return _NETWORK.fullmatch(kind) is not None


def check_filesystem(path: Path) -> None:
    """Raise `StoreAccessError` if the existing `path` is on a network, cluster or FUSE file system.

    LMDB needs coherent shared memory and locks between all users, which such file systems promise poorly or not.
    """
    kind = filesystem_of(path)
    if is_network(kind):
        raise StoreAccessError(
            f"{path} is on {kind}, where LMDB's shared memory and locks are not safe: choose a directory on a local"
            " disk (ext4, xfs, btrfs, tmpfs), or share blocks between machines: in a directory with"
            " file://…?remote=true (no catalogue), in an object store, or in Redis"
        )


_LOOKS = 5
"""At the headers of a file that others write to, before it is called damaged."""

_NO_FAULT = re.compile(r"freeDB: record \d+ count 0 does not match")
"""What `lmdb.verify` says of a record that LMDB reserved and had no use for (mdb_freelist_save): it lists no page."""

SOON_DONE = 20_000
"""Pages that are read through in some 0.2 s from a disk: those of about 300,000 blocks."""

_META = struct.Struct("=IIQQ48s48sQQ")  # magic, version, address, map size, free DB, main DB, last page, transaction
_MAGIC, _VERSION, _META_FLAG = 0xBEEFC0DE, 1, 0x08


def damage(
    directory: Path, *, thorough: bool, trees: bool = False, values: bool = False, untouched: bool = False
) -> str | None:
    """What is wrong with the environment in `directory`, in words; None when it may be opened (or there is none).

    Reads `data.mdb` with plain reads, never through LMDB. Always quick (header pages, length: catches what would
    be SIGBUS). `trees` reads every page that LMDB would find its way by (`kvstore.lmdb_pages`): what LMDB might abort
    at, which takes 1 us a block; of a file that is `untouched` since it was closed, only where that is soon done.
    `values` reads the header of every large value too: what LMDB would call damaged once it is asked for. `thorough`
    walks every page that is in use (`lmdb.verify`; 0.3 s for 100,000 catalogue entries) and finds every lost write,
    for use after an unclean close. All of them only when nobody has the environment open.
    None sees a flipped byte inside a value: that is what block checksums are for.
    """
    path = directory / "data.mdb"
    try:
        with path.open("rb") as file:
            heads, problem = _heads(file.fileno()), None
            for _ in range(_LOOKS):
                problem = _header_problem(file.fileno(), heads)
                before, heads = heads, _heads(file.fileno())
                if problem is None or heads == before:  # else somebody wrote meanwhile
                    break
            if problem is None and (trees or values or thorough):
                most = SOON_DONE if untouched and not (values or thorough) else None
                problem = _tree_problem(file.fileno(), heads, values=values, most=most)
        if problem is None and thorough:
            found = [line for line in _verify(str(directory)) if not _NO_FAULT.match(line)]
            problem = f"{found[0]} (and {len(found) - 1} more)" if found else None
    except FileNotFoundError:
        return None
    except VerifyError as error:
        problem = str(error)
    return f"{path}: {problem}" if problem else None


def _heads(descriptor: int) -> list[bytes]:
    return [os.pread(descriptor, 16 + _META.size, page * PAGE) for page in (0, 1)]


@dataclass(frozen=True, slots=True)
class _Meta:
    """One of the two headers."""

    transaction: int
    last_page: int
    free: Tree
    main: Tree


def readable(descriptor: int) -> Callable[[str], Entries]:
    """What a damaged data file still says: the entries of a named database, as far as sound pages lead to them from the
    newest header that is one; from the one before where that leads to none. None of it is sure to be true.
    """
    heads = _heads(descriptor)
    sound = [_meta(head) for page, head in enumerate(heads) if _not_a_header(page, head) is None]
    pages = Pages(descriptor, os.fstat(descriptor).st_size // PAGE - 1)
    states = [
        {tree.name: tree for tree in pages.trees(meta.main)}
        for meta in sorted(sound, key=lambda meta: meta.transaction, reverse=True)
    ]

    def read(name: str) -> Entries:
        found: Entries = {}
        for state in states:
            found = found or (dict(pages.entries(state[name])) if name in state else found)
        return found

    return read


def free_pages(descriptor: int, transaction: int) -> tuple[list[tuple[int, Numbers]], int]:
    """The list of free pages as of that transaction, which nobody changes meanwhile, and the last page in use.

    Raises `PageError` where the file is of another one, or the list does not add up (`Pages.unused`).
    """
    heads = _heads(descriptor)
    if problem := _header_problem(descriptor, heads):
        raise PageError(problem)
    meta = max(map(_meta, heads), key=lambda meta: meta.transaction)
    if meta.transaction != transaction:
        raise PageError(f"the file is of transaction {meta.transaction}, LMDB is at {transaction}")
    return Pages(descriptor, meta.last_page).unused(meta.main, meta.free), meta.last_page


def _meta(head: bytes) -> _Meta:
    _, _, _, _, free, main, last_page, transaction = _META.unpack_from(head, 16)
    return _Meta(transaction, last_page, Tree.unpacked("of free pages", free), Tree.unpacked("of databases", main))


def _header_problem(descriptor: int, heads: list[bytes]) -> str | None:
    for page, head in enumerate(heads):
        if problem := _not_a_header(page, head):
            return problem
    newest = max(map(_meta, heads), key=lambda meta: meta.transaction)
    size, needed = os.fstat(descriptor).st_size, (newest.last_page + 1) * PAGE
    if size >= needed:
        return None
    # Pages at the end that a transaction took and gave back are never written: then nothing lies behind the end.
    try:
        needed = Pages(descriptor, newest.last_page).end(newest.main, newest.free) * PAGE
    except PageError as found:
        return f"it was cut to {size} bytes: {found}"
    return f"it was cut to {size} bytes, {needed} are in use" if size < needed else None


def _not_a_header(page: int, head: bytes) -> str | None:
    if len(head) < 16 + _META.size:
        return f"{page * PAGE + len(head)} bytes are too few for an environment"
    number, _, flags = struct.unpack_from("=QHH", head)
    magic, version, _, _, free, *_ = _META.unpack_from(head, 16)
    if (number, magic, version) != (page, _MAGIC, _VERSION) or not flags & _META_FLAG:
        return f"page {page} is not the header of an LMDB 0.9 environment"
    return None if int.from_bytes(free[:4], sys.byteorder) == PAGE else f"its pages are not of {PAGE} bytes"


def _tree_problem(descriptor: int, heads: list[bytes], *, values: bool, most: int | None) -> str | None:
    metas = [_meta(head) for head in heads]
    newest = max(metas, key=lambda meta: meta.transaction)
    if abs(metas[0].transaction - metas[1].transaction) > 1 or newest != metas[newest.transaction & 1]:
        return "its two headers are not of two transactions that follow each other"
    pages = Pages(descriptor, newest.last_page)
    if most is not None and sum(tree.branches + tree.leaves for tree in pages.trees(newest.main)) > most:
        return None
    try:
        pages.check(newest.main, newest.free, values=values)
    except PageError as found:
        return str(found)
    return None
