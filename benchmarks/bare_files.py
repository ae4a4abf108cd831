"""What the file system charges for a block's file, without kvstore: five ways for threads to make one.

A draft that is renamed (all drafts in one folder, in one folder for each thread, beside the block), or the block's own
name from the start (in its folder, or all of them in one). Each file is opened new, written once with O_DIRECT and
closed; a call is 8 MiB, as a tier's is, and its renames come last. The ways take turns, and each round begins with the
files of the last one removed: on an ext4 without a journal that is what most of the time goes into from the second
round on.

    python benchmarks/bare_files.py [FOLDER] [--block-bytes 512KiB] [--total 1GiB] [--threads 16] [--rounds 5]

FOLDER must not exist; it is made, and removed at the end. Prints GB/s and CPU seconds for a gigabyte: the median, and
every round.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.url import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALL = 8 << 20
FOLDERS = 256

PATHS: dict[str, Callable[[int, str], tuple[str, str]]] = {
    "drafts in one folder": lambda _thread, name: (f"drafts/0/{name[3:]}", name),
    "drafts by thread": lambda thread, name: (f"drafts/{thread}/{name[3:]}", name),
    "drafts beside": lambda _thread, name: (f"{name[:3]}draft-{name[3:]}", name),
    "no draft": lambda _thread, name: (name, name),
    "no draft, one folder": lambda _thread, name: (f"drafts/0/{name[3:]}", f"drafts/0/{name[3:]}"),
}
"""What a file is made as, and what it is called in the end, by the thread that makes it; names are `ff/digest`."""


def fill(root: Path, way: str, names: list[str], payload: mmap.mmap, threads: int) -> tuple[float, float]:
    """Make all files of one round; seconds, and CPU seconds."""
    waiting, taking = iter(names), threading.Lock()

    def work(thread: int) -> None:
        while names_of_call := _next_call(waiting, taking, len(payload)):
            paths = [PATHS[way](thread, name) for name in names_of_call]
            for made, _ in paths:
                file = os.open(root / made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
                os.pwrite(file, payload, 0)
                os.close(file)
            for made, called in paths:
                if made != called:
                    (root / made).rename(root / called)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin, time.process_time() - cpu


def _next_call(waiting: Iterator[str], taking: threading.Lock, nbytes: int) -> list[str]:
    with taking:
        return list(islice(waiting, max(1, CALL // nbytes)))


def make_folders(root: Path, threads: int) -> None:
    for number in range(FOLDERS):
        (root / f"{number:02x}").mkdir(parents=True, exist_ok=True)
    for number in range(threads):
        (root / "drafts" / str(number)).mkdir(parents=True, exist_ok=True)


def remove_files(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.unlink()


def digest(number: int) -> str:
    name = hashlib.sha256(number.to_bytes(8)).hexdigest()
    return f"{name[:2]}/{name[2:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--block-bytes", type=parse_size, default=512 << 10)
    parser.add_argument("--total", type=parse_size, default=1 << 30)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    root: Path = args.folder or Path(tempfile.mkdtemp(prefix="kvstore-bare-"))
    root.mkdir(parents=True, exist_ok=args.folder is None)
    names = [digest(number) for number in range(max(1, args.total // args.block_bytes))]
    gigabytes = len(names) * args.block_bytes / 1e9
    payload = mmap.mmap(-1, args.block_bytes)
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in PATHS}
    try:
        for _ in range(args.rounds):
            for way, results in rounds.items():
                make_folders(root / way, args.threads)
                results.append(fill(root / way, way, names, payload, args.threads))
                remove_files(root / way)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(names)} files of {args.block_bytes >> 10} KiB from {args.threads} threads")
    for way, results in rounds.items():
        speeds = [gigabytes / seconds for seconds, _ in results]
        cpu = [seconds / gigabytes for _, seconds in results]
        print(f"{way:22}{_row(speeds)} GB/s   {_row(cpu)} CPU s/GB")


def _row(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({' '.join(f'{value:.2f}' for value in values)})"


if __name__ == "__main__":
    main()
