"""Executes notebooks from top to bottom, each in a fresh kernel, and writes what came out into them: `make notebooks`.

python notebooks/execute.py [NOTEBOOK …]
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(HERE.glob("[0-9]*.ipynb"))


def execute(path: Path) -> Any:
    """The notebook as a fresh kernel leaves it. Raises `nbclient.exceptions.CellExecutionError` if a cell does."""
    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the machinery around kernels; a cell's own are in its outputs
        asyncio.run(client.async_execute())
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main(given: list[str]) -> None:
    """All of them, or those given."""
    for path in [Path(name) for name in given] or notebooks():
        print(f"executing {path.name}", flush=True)
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
