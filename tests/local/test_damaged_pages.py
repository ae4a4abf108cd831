"""Bytes changed in every class of page and document of a cleanly closed tier: never a signal, never a wrong byte.

What comes after is the tier's own way: it opens, or says why not; `kvstore verify --repair` saves what can be saved.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest
from local_helpers import HIT, MISS, TINY, catalogue_of

from kvstore import BlockLayout, GetOutcome, Namespace, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, run
from kvstore.errors import StoreDamagedError, TierUnavailable
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor
    from pathlib import Path

PAGE = 4096
LARGE = Namespace("large", "revision-1", (BlockLayout.opaque(20_000),), block_tokens=1)
KINDS = {1: "branch", 2: "leaf", 4: "value", 8: "header"}


class Whole(NamedTuple):
    """A tier that was closed: what it is reached by, where it is, and with which options."""

    scheme: str
    path: Path
    options: str = ""


@pytest.fixture(scope="module", params=["file", "lmdb"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """One with every kind of page in its environment."""
    return made(Whole(request.param, tmp_path_factory.mktemp("whole") / "tier"))


@pytest.fixture(scope="module", params=["file", "lmdb"])
def sealed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The same, encrypted."""
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "operator.key").write_text(secrets.token_hex(32))
    options = f"?encryption=file:{folder}/operator.key&keyring={folder}/keyring.json"
    return made(Whole(request.param, folder / "tier", options))


def made(whole: Whole) -> Whole:
    with open_store(f"{whole.scheme}://{whole.path}{whole.options}") as store:
        store.put_many(TINY, writes(range(300), TINY))
        store.put_many(LARGE, writes(range(30), LARGE))
        store.delete_many(TINY, keys(range(100, 140)))
        store.delete_many(LARGE, keys(range(5)))
    return whole


def classes(raw: bytes) -> dict[str, list[int]]:
    """Page numbers by what stands there; `rest` is what is within a value, or free."""
    found: dict[str, list[int]] = {}
    for number in range(len(raw) // PAGE):
        stored, _, flags = struct.unpack_from("=QHH", raw, number * PAGE)
        found.setdefault(KINDS.get(flags, "rest") if stored == number else "rest", []).append(number)
    return found


def flipped(page: bytes, place: int, chance: random.Random) -> bytes:
    return page[:place] + bytes([page[place] ^ 1 << chance.randrange(8)]) + page[place + 1 :]


HARMS: dict[str, Callable[[bytes, bytes, random.Random], bytes]] = {
    "zeroed": lambda page, _, __: bytes(len(page)),
    "ones": lambda page, _, __: b"\xff" * len(page),
    "another page": lambda _, other, __: other,
    "a bit of its header": lambda page, _, chance: flipped(page, chance.randrange(16), chance),
    "a bit behind it": lambda page, _, chance: flipped(page, chance.randrange(16, 160), chance),
    "a bit of its end": lambda page, _, chance: flipped(page, chance.randrange(PAGE - 600, PAGE), chance),
    "half of it": lambda page, other, _: page[: PAGE // 2] + other[PAGE // 2 :],
}


def survey(url: str) -> str:
    """Use the tier in every way; `wrong` if a byte is, else how it went. In a process that may be ended by it."""
    try:
        store = open_store(url)
    except StoreDamagedError:
        return "damaged"
    told = "fine"
    seen: list[GetOutcome | str] = []
    verbs: list[Callable[[], object]] = [
        lambda: seen.extend(get(store, range(0, 300, 7), TINY) + get(store, range(30), LARGE)),
        lambda: [list(store.scan(space)) for space in store.namespaces()],
        lambda: store.put_many(TINY, writes(range(1000, 1040), TINY)),
        lambda: store.put_many(LARGE, writes(range(100, 110), LARGE)),
        lambda: store.delete_many(TINY, keys(range(0, 300, 9))),
        lambda: store.delete_many(LARGE, keys(range(5, 10))),
        lambda: seen.extend(get(store, range(1040), TINY) + get(store, range(110), LARGE)),
        store.close,
    ]
    for verb in verbs:
        try:
            verb()
        except TierUnavailable:
            told = "unavailable"
    return "wrong" if "wrong bytes" in seen else told


def looks(urls: Iterable[str]) -> list[GetOutcome | str]:
    """What gets and scans find in each tier, past what they are told is damaged."""
    seen: list[GetOutcome | str] = []
    for url in urls:
        with open_store(url) as store, suppress(TierUnavailable):
            for space in store.namespaces():
                list(store.scan(space))
            seen += get(store, range(0, 300, 3), TINY)
    return seen


def surveys(urls: Iterable[str]) -> list[str]:
    """Two of each tier, one after the other: the second one meets what the first has left."""
    return [survey(url) for url in urls for _ in range(2)]


def check_damage(whole: Whole, root: Path, child: Executor, kind: str, chance: random.Random) -> None:
    """Do each harm to some page of that kind, each in a copy, and let another process use them all."""
    scheme, path, options = whole
    raw = catalogue_of(path).read_bytes()
    numbers = classes(raw).get(kind, [])
    copies = [root / str(place) for place in range(len(HARMS) if numbers else 0)]
    for copy, harm in zip(copies, HARMS.values(), strict=False):
        number, other = chance.choice(numbers), chance.randrange(len(raw) // PAGE)
        shutil.copytree(path, copy)
        with catalogue_of(copy).open("r+b") as file:
            os.pwrite(
                file.fileno(), harm(raw[number * PAGE :][:PAGE], raw[other * PAGE :][:PAGE], chance), number * PAGE
            )
    told = child.submit(surveys, [f"{scheme}://{copy}{options}" for copy in copies]).result()
    assert set(told[::2]) <= ({"fine"} if scheme == "file" else {"fine", "unavailable"})
    assert set(told[1::2]) <= {"fine"}


@pytest.mark.parametrize("kind", ["header", "branch", "leaf", "value", "rest"])
def test_no_page_of_lmdb_ends_the_process_or_serves_a_wrong_byte(
    whole: Whole, root: Path, fresh_process: Executor, kind: str
) -> None:
    check_damage(whole, root, fresh_process, kind, random.Random(f"{whole[0]} {kind}"))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "leaf" else pytest.mark.soak) for kind in (*KINDS.values(), "rest")]
)
def test_nor_does_any_where_blocks_are_encrypted(sealed: Whole, root: Path, fresh_process: Executor, kind: str) -> None:
    check_damage(sealed, root, fresh_process, kind, random.Random(f"sealed {sealed.scheme} {kind}"))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_whichever_inner_page_is_zeroed_nobody_is_ended_by_it(
    whole: Whole, root: Path, fresh_process: Executor
) -> None:
    """LMDB alone ends a process at one in ten of them, when a cursor comes by. That each is seen: `test_lmdb_pages`."""
    scheme, path, options = whole
    found = classes(catalogue_of(path).read_bytes())
    copies: list[str] = []
    for number in found["leaf"] + found["branch"]:
        copy = root / str(number)
        shutil.copytree(path, copy)
        with catalogue_of(copy).open("r+b") as file:
            os.pwrite(file.fileno(), bytes(PAGE), number * PAGE)
        copies.append(f"{scheme}://{copy}{options}")
    assert set(fresh_process.submit(looks, copies).result()) <= {HIT, MISS}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["header", "branch", "leaf", "value", "rest"])
def test_nor_does_any_of_many_pages(whole: Whole, root: Path, fresh_process: Executor, kind: str) -> None:
    chance = random.Random()
    for _ in range(40):
        check_damage(whole, root, fresh_process, kind, chance)
        shutil.rmtree(root, ignore_errors=True)


def test_a_damaged_value_page_costs_its_block_alone_once_it_is_repaired(
    whole: Whole, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme, path, _ = whole
    if scheme == "file":
        pytest.skip("its blocks are files")
    shutil.copytree(path, root)
    raw = catalogue_of(root).read_bytes()
    for number in classes(raw)["value"]:
        with catalogue_of(root).open("r+b") as file:
            file.seek(number * PAGE + 12)
            file.write(b"\xff\xff\xff\xff")
        if run(["verify", f"lmdb://{root}"]) == EXIT_NOT_INTACT:
            break
        catalogue_of(root).write_bytes(raw)  # a page that was free
    assert "is not the beginning of a value" in capsys.readouterr().out
    assert run(["verify", f"lmdb://{root}", "--repair"]) == EXIT_NOT_INTACT
    assert "lost: 1 block that" in capsys.readouterr().out
    assert run(["verify", f"lmdb://{root}"]) == EXIT_OK
    with open_store(f"lmdb://{root}") as store:
        outcomes = get(store, range(5, 30), LARGE)
        assert (outcomes.count(HIT), outcomes.count(MISS)) == (24, 1)
        assert get(store, range(300), TINY).count(HIT) == 260


def test_any_byte_of_a_manifest_sets_its_namespace_aside_until_it_is_repaired(root: Path) -> None:
    url = f"file://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(4)))
        store.put_many(TINY, writes(range(4), TINY))
    manifest = root / SPACE.name / "zarr.json"
    text, chance = manifest.read_bytes(), random.Random(5)
    for _ in range(12):
        manifest.write_bytes(flipped(text, chance.randrange(len(text)), chance))
        with open_store(url) as store:
            assert set(get(store, range(4))) <= {HIT, MISS}
            assert get(store, range(4), TINY) == [HIT] * 4
        assert run(["verify", url, "--repair"]) == EXIT_OK
        assert manifest.read_bytes() == text
        with open_store(url) as store:
            assert get(store, range(4)) == [HIT] * 4


def test_whatever_stands_in_the_files_of_locks_the_tier_opens_and_serves_no_wrong_byte(
    scheme: str, root: Path, fresh_process: Executor
) -> None:
    whole = root / "whole"
    with open_store(f"{scheme}://{whole}", scrub="1MB/s") as store:
        store.put_many(TINY, writes(range(300), TINY))
    for name in ("state", "gate", "users", "scrub", "lock.mdb"):
        for number, data in enumerate((b"", b"\xff" * 64, b"dirty 0\n")):
            shutil.copytree(whole, root / f"{name} {number}")
            path = next((root / f"{name} {number}").rglob(name))
            path.write_bytes(data.ljust(path.stat().st_size, b"\xff"))
    copies = [f"{scheme}://{copy}" for copy in root.iterdir() if copy != whole]
    assert set(fresh_process.submit(surveys, copies).result()) == {"fine"}
