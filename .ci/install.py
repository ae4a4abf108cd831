"""Install packages into an environment, quickly: `python install.py PYTHON ARGUMENT…`, the latter as of pip install.

By uv where the development environment has it, in a quarter of pip's time; by pip where it does not, or where uv
fails: pip then has its own say. uv reads none of pip's configuration, so it is told what pip knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UV = Path(os.environ.get("VENV") or Path(__file__).parent.parent / ".venv").absolute() / "bin" / "uv"
PASSED_ON = {name: f"--{name}" for name in ("index-url", "extra-index-url", "find-links", "constraint")}


def install(python: str, *arguments: str) -> None:
    """Raises `subprocess.CalledProcessError` where pip fails."""
    if UV.exists() and by_uv(python, *arguments):
        return
    command = [helper(python), "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([*command, "--python", python, "install", *arguments], check=True, stdout=sys.stderr)


def by_uv(python: str, *arguments: str) -> bool:
    """Whether it worked."""
    settings, environment = pip_settings(), os.environ | {"UV_LINK_MODE": "hardlink"}
    places = [word for name, flag in PASSED_ON.items() for place in settings.get(name, ()) for word in (flag, place)]
    if certificates := settings.get("cert"):
        environment.setdefault("SSL_CERT_FILE", certificates[0])
    # Compiled now: who imports it may be told to write no bytecode, and would compile it every time.
    command = [str(UV), "pip", "install", "--quiet", "--python", python, "--compile-bytecode"]
    command += ["--index-strategy", "unsafe-best-match", *places, *arguments]
    return subprocess.run(command, env=environment, check=False, stdout=sys.stderr).returncode == 0


def pip_settings() -> dict[str, list[str]]:
    """What pip is told by files and the environment, the latter before the former."""
    done = subprocess.run(
        [str(UV.parent / "python"), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found: dict[str, list[str]] = {}
    for line in sorted(done.stdout.splitlines()):  # ":env:" sorts first
        name, _, value = line.partition("=")
        found.setdefault(name.rpartition(".")[2], value.strip("'\"").split())
    return found


def helper(python: str) -> str:
    """A Python with a pip that can install into `python`'s environment."""
    has_pip = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    return python if has_pip else sys.executable


if __name__ == "__main__":
    try:
        install(*sys.argv[1:])
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)
