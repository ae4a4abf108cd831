"""Backends as a third party ships them, installed by pip: that of `backends/README.md`, and one on SQLite."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

README = Path(__file__).parent.parent / "backends" / "README.md"


def code(language: str, number: int = 0) -> str:
    """One of the code blocks in that language: of Python, the store and then its tests."""
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) > number, f"{README} shows {len(found)} blocks of {language}"
    block: str = found[number]
    return block


def code_lines(source: str) -> int:
    """Lines that are neither empty nor imports."""
    return sum(bool(line.strip()) and not line.startswith(("import ", "from ")) for line in source.splitlines())


def install(folder: Path) -> Path:
    """Build the wheel that the README describes and `pip install` it; returns the folder to put on the path."""
    project = tomllib.loads(code("toml"))["project"]
    return install_wheel(
        folder,
        project["name"],
        {"kvstore_dir.py": code("python")},
        project["entry-points"]["kvstore.backends"],
        project["version"],
    )


def install_sqlite(folder: Path) -> Path:
    """The same for `kvstore_sqlite.py`, which is beside this file."""
    source = (Path(__file__).parent / "kvstore_sqlite.py").read_text()
    return install_wheel(
        folder, "kvstore-sqlite", {"kvstore_sqlite.py": source}, {"sqlite": "kvstore_sqlite:SQLiteStore"}
    )


def install_wheel(
    folder: Path, name: str, modules: dict[str, str], backends: dict[str, str], version: str = "1.0"
) -> Path:
    """A pure-Python distribution with these modules and entry points, installed into a folder of its own."""
    target = folder / f"site-{name}"
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    files = modules | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": "[kvstore.backends]\n"
        + "".join(f"{scheme} = {path}\n" for scheme, path in backends.items()),
    }
    record = "".join(f"{path},,\n" for path in files) + f"{stem}.dist-info/RECORD,,\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{stem}.dist-info/RECORD": record}).items():
            archive.writestr(path, text)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel],
        check=True,
        capture_output=True,
    )
    return target
