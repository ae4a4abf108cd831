"""A process that makes, restores or removes an archive and is killed: `python interrupted.py TASK KILL_AT FOLDER`.

It kills itself (SIGKILL) before the request to the archive (create), or the batch to the tier (restore), that is number
KILL_AT. Without as many it ends by itself, with exit code 0.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from archive_helpers import IDS, KEYS, LABEL, SPACE

from kvstore import open_store
from kvstore.archive import create, packing, remove, restore
from kvstore.archive.local import LocalClient


def main(task: str, kill_at: int, folder: str) -> None:
    """Do it."""
    packing.SHARD_BYTES = 3 * 2048  # as in the fixture
    left = kill_at

    def die_in_turn() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def counted(call: Any, *, after: bool = False) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            if after:
                found = call(*args, **kwargs)
                die_in_turn()
                return found
            die_in_turn()
            return call(*args, **kwargs)

        return inner

    url = f"file://{folder}/archives/one"
    if task in ("create", "remove"):
        client: Any = LocalClient
        client._put, client._delete = counted(client._put), counted(client._delete)
        client._write = counted(client._write, after=True)  # a draft that has no name yet
        if task == "remove":
            remove(url)
            return
        with open_store(f"file://{folder}/source?readonly=true") as store:
            create(url, store, SPACE, KEYS, label=LABEL, tokens=IDS)
    else:
        with open_store(f"file://{folder}/target") as store:
            tier: Any = store
            for name in ("put_many", "mark_many"):
                setattr(tier, name, counted(getattr(tier, name)))
            restore(url, store)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
