"""How fast is `s3://` beside bare obstore and s3fs? Against a server in memory, whose own ceiling is measured first.

    python benchmarks/object_stores.py [arguments of `kvstore bench`]

The ceiling is what plain sockets move between this process and the server: four threads, whole objects, nothing looked
at. A client that comes near it would measure the server; none does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from busy_thread import compare
from memory_s3 import compiler, environment, memory_s3

THREADS = 4
OBJECT = 8 << 20
REQUESTS = 32
BESIDE_A_BUSY_THREAD = [(2 << 20, 4), (2 << 20, 8), (2 << 20, 16), (8 << 20, 4), (32 << 20, 4)]
"""Bytes of a block, and threads; 16 are what a tier has in vLLM unless it is told otherwise."""


def put(port: int, number: int) -> None:
    """PUT one object, `REQUESTS` times, over one connection."""
    head = f"PUT /bench/{number} HTTP/1.1\r\nContent-Length: {OBJECT}\r\n\r\n".encode()
    body = bytes(OBJECT)
    with socket.create_connection(("127.0.0.1", port)) as wire:
        for _ in range(REQUESTS):
            wire.sendall(head)
            wire.sendall(body)
            wire.recv(4096)


def get(port: int, number: int) -> None:
    """GET it as often."""
    request = f"GET /bench/{number} HTTP/1.1\r\n\r\n".encode()
    into = memoryview(bytearray(OBJECT + 4096))
    with socket.create_connection(("127.0.0.1", port)) as wire:
        for _ in range(REQUESTS):
            wire.sendall(request)
            came = wire.recv_into(into)
            head = bytes(into[:came]).index(b"\r\n\r\n") + 4
            while came < head + OBJECT:
                came += wire.recv_into(into[came:])


def ceiling(port: int) -> None:
    """Print what plain sockets move."""
    with ThreadPoolExecutor(THREADS) as pool:
        for name, work in (("PUT", put), ("GET", get)):
            began = time.perf_counter()
            list(pool.map(work, [port] * THREADS, range(THREADS)))
            gb = THREADS * REQUESTS * OBJECT / 1e9
            print(f"ceiling of the server, {name}: {gb / (time.perf_counter() - began):.2f} GB/s", flush=True)


def main(arguments: list[str]) -> int:
    """Exit code of the benchmark; 0 where it cannot run."""
    if compiler() is None:
        print("skipped: no C compiler here (the server is memory_s3.c)")
        return 0
    with memory_s3() as port:
        ceiling(port)
        command = [str(Path(sys.executable).with_name("kvstore")), "bench", "s3://bench/kv", "--against", "client"]
        sizes = ["--block-bytes", "2MiB", "--block-bytes", "8MiB", "--block-bytes", "32MiB"]
        code = subprocess.run([*command, *sizes, *arguments], env={**os.environ, **environment(port)}).returncode
        os.environ.update(environment(port))
        for nbytes, threads in BESIDE_A_BUSY_THREAD:
            compare("s3://bench/busy", nbytes, threads)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
