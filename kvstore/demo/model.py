"""The demo's model as a folder that vLLM and notebooks read: converted once from its package, and kept.

python -P -m kvstore.demo.model < job.json     the conversion, in a process of its own
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvstore.demo import run, stock
from kvstore.demo.worker import run_worker
from kvstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["model_folder", "tokenize"]


def model_folder(say: Callable[[str], None], dtype: str = "bfloat16") -> Path:
    """Where it lies, below the user's cache folder (`XDG_CACHE_HOME`), made on the first call: 260 MB, float32 520 MB.

    `dtype` is that of the weights as they are kept; what an engine computes in is its own choice.
    Raises `MissingDependencyError` if the package is not installed, and `WorkerFailed`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    folder = cache / f"{run.SMOLLM2}-{dtype}"
    if folder.is_dir():
        return folder
    job: dict[str, Any] = {**run.model_of(run.Settings()), "dtype": dtype}
    say(f"converting {job['gguf']} once, into {folder}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="converting-") as scratch:
        made = Path(scratch, "model")
        run_worker(["-m", "kvstore.demo.model"], job | {"save_to": str(made)}, Path(scratch), say)
        try:
            made.rename(folder)
        except OSError:  # another process was first, which is as good
            if not folder.is_dir():
                raise
    return folder


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """Weights and tokenizer, from the GGUF file to what transformers saves."""
    from transformers import AutoTokenizer

    stock.load_model(job)
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(job["model"], gguf_file=job["gguf"])
    tokenizer.save_pretrained(job["save_to"])
    return {}


def tokenize(folder: Path, text: str) -> list[int]:
    """Token ids of a text, as the model's tokenizer has them."""
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(
            "the demo needs tokenizers, which comes with vLLM: pip install tokenizers"
        ) from None
    loaded: Any = cast("Any", tokenizers).Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(loaded.encode(text).ids)


if __name__ == "__main__":
    stock.main(convert)
