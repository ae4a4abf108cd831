"""One of several processes that share a bucket and sweep it: `python sweeper.py URL`, until its standard input closes.

Says `open` once, then what it has swept each time that changes.
"""

from __future__ import annotations

import os
import select
import sys

from kvstore import open_store

with open_store(sys.argv[1]) as store:
    sys.stdout.write(f"open {os.getpid()}\n")
    sys.stdout.flush()
    told = 0
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        counts = store.sweeps  # type: ignore[attr-defined]
        if counts.sweeps != told:
            told = counts.sweeps
            sys.stdout.write(f"swept {counts.sweeps} {counts.expired} {counts.failed}\n")
            sys.stdout.flush()
