"""Make sure that this environment has torch: use one that is there, and say the size before gigabytes are pulled."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from install import install
from share_packages import share

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
FIND = "import importlib.metadata as m; t = m.distribution('torch'); print(t.version, t.locate_file(''))"
LARGE = 1 << 30


def main() -> int:
    """Exit code 0 once torch can be imported here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python that may have torch already")
    parser.add_argument("--requirement", required=True, help="what to install otherwise, such as torch==2.13.0")
    parser.add_argument("--index", default="", help="where to take torch from, instead of PyPI")
    given = parser.parse_args()
    if (here := installed()) is not None:
        print(f"torch {here} is here already")
        return 0
    found = subprocess.run([given.python, "-c", FIND], capture_output=True, text=True)
    if found.returncode == 0:
        version, _, folder = found.stdout.strip().partition(" ")
        share(folder)
        print(f"using torch {version} of {given.python}")
        return 0
    if given.index:
        # torch alone from there, so that the index need not carry numpy and the rest.
        subprocess.run([*PIP, "--no-deps", "--index-url", given.index, given.requirement], check=True)
    else:
        say_the_size(given.requirement)
    install(sys.executable, given.requirement)
    return 0


def installed() -> str | None:
    """The version of torch in this environment."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def say_the_size(requirement: str) -> None:
    """Ask pip what it would fetch; where that is large, say so and how to avoid it, and wait for a Ctrl-C."""
    plan = subprocess.run([*PIP, "--quiet", "--dry-run", "--report", "-", requirement], capture_output=True, text=True)
    if plan.returncode:
        return  # the installation itself will say why
    urls = [item["download_info"]["url"] for item in json.loads(plan.stdout)["install"]]
    with ThreadPoolExecutor(8) as pool:
        nbytes = sum(pool.map(size_of, urls))
    if nbytes < LARGE:
        print(f"installing {requirement}: {nbytes / 1e9:.1f} GB to download")
        return
    print(
        f"\n{requirement} comes with CUDA here: {nbytes / 1e9:.1f} GB to download, about twice that on disk.\n"
        f"kvstore needs none of it. For the CPU build (about 0.2 GB) press Ctrl-C now and say\n\n"
        f"    make TORCH_INDEX={CPU_INDEX}\n\nContinuing in 10 seconds.\n",
        flush=True,
    )
    time.sleep(10)


def size_of(url: str) -> int:
    """Bytes behind a URL, 0 where it does not say; a file on this machine costs no download."""
    if not url.startswith("http"):
        return 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
