"""What a tier needs of the process that opens it: descriptors, and address space for LMDB's map."""

from __future__ import annotations

import mmap
import resource
from typing import TYPE_CHECKING

from kvstore.doctor.finding import Finding, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["address_space", "open_files"]

FEW_FILES = 1024
TOO_FEW_FILES = 128
_PRIVATE_NO_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""With MAP_NORESERVE, which Python names from 3.13 on."""


def open_files() -> Iterator[Finding]:
    """`ulimit -n`: a tier holds some ten, each transfer thread a few more, an engine hundreds of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(65536, hard)} (systemd: LimitNOFILE)"
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        yield ok("open files", f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open (ulimit -n)")
    else:
        grade = warning if soft >= TOO_FEW_FILES else problem
        yield grade("open files", f"only {soft} may be open (ulimit -n)", remedy)


def address_space(nbytes: int) -> Iterator[Finding]:
    """Whether `nbytes` can be mapped, by mapping them without access: that takes no memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 30} GiB"
    wanted = f"{nbytes / (1 << 40):.1f} TiB" if nbytes >= 1 << 40 else f"{nbytes / (1 << 30):.1f} GiB"
    try:
        mmap.mmap(-1, nbytes, flags=_PRIVATE_NO_RESERVE, prot=0).close()
    except (OSError, ValueError) as error:
        yield problem(
            "address space",
            f"LMDB's map of {wanted} does not fit (ulimit -v: {shown}; {error}); it takes no memory, only addresses",
            "raise ulimit -v to unlimited"
            + ("" if nbytes < 1 << 44 else ", or, with lmdb://, give the tier a capacity"),
        )
    else:
        yield ok("address space", f"LMDB's map of {wanted} fits (ulimit -v: {shown})")
