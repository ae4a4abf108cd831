"""Executes notebooks from top to bottom, each in a fresh kernel, and writes what came out into them: `make notebooks`.

python notebooks/execute.py [--quick] [NOTEBOOK …]

With `--quick` (`make test-notebooks`) documents are short, few things are measured, and nothing is written: it fails
with the first exception in a cell.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
import warnings
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300
QUICK = {
    r"\bparagraphs=\d+": "paragraphs=5",
    r"\bmax_new_tokens=\d\d\b": "max_new_tokens=4",
    r"^lengths = .*$": "lengths = [64, 128]",
    r"^block_sizes = .*$": "block_sizes = [16, 64]",
    r"^repeats = .*$": "repeats = 1",
}
"""What of a cell is written otherwise in a quick run."""


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(HERE.glob("[0-9]*.ipynb"))


def check_patterns() -> None:
    """Raises `SystemExit` for one of `QUICK` that stands in no notebook: a quick run would be a long one."""
    sources = [
        cell.source
        for path in notebooks()
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    for pattern in QUICK:
        if not any(re.search(pattern, source, flags=re.MULTILINE) for source in sources):
            raise SystemExit(f"no cell of any notebook matches {pattern!r}, which a quick run is to shorten")


def execute(path: Path, *, quick: bool = False) -> Any:
    """The notebook as a fresh kernel leaves it. Raises `nbclient.exceptions.CellExecutionError` if a cell does."""
    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = shortened(cell.source) if quick else cell.source
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the machinery around kernels; a cell's own are in its outputs
        asyncio.run(client.async_execute())
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def shortened(source: str) -> str:
    """A cell's source as a quick run has it."""
    for pattern, instead in QUICK.items():
        source = re.sub(pattern, instead, source, flags=re.MULTILINE)
    return source


def main() -> None:
    """All of them, or those given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short documents; nothing is written")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    given = parser.parse_args()
    if given.quick:
        check_patterns()
    for path in given.notebooks or notebooks():
        began = time.perf_counter()
        executed = execute(path, quick=given.quick)
        if not given.quick:
            nbformat.write(executed, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
