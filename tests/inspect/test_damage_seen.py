"""A block that is damaged or gone is an error that names it, whoever asks for it, and it stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from inspect_helpers import KEYS, SPACE, looking, store_prompt

import kvstore.inspect
from kvstore import Mark, TierURL, open_store
from kvstore.cli import EXIT_NOT_INTACT, run
from kvstore.errors import DamagedBlockError, KVStoreError, NotStoredError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.inspect import BlockView


def file_of(url: str, number: int) -> Path:
    from kvstore_zarr.metadata import NamespaceTree

    return Path(TierURL.parse(url).location) / NamespaceTree(SPACE).block(KEYS[number])


def flip(url: str, number: int) -> None:
    file = file_of(url, number)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))


def swap(url: str, number: int) -> None:
    """Another block's file under this one's name: its checksum holds."""
    file_of(url, number).write_bytes(file_of(url, number + 1).read_bytes())


def remove(url: str, number: int) -> None:
    file_of(url, number).unlink()


WAYS: dict[str, Callable[[BlockView], object]] = {
    "bytes": lambda block: block.bytes(),
    "numpy": lambda block: block.numpy(),
    "xarray": lambda block: block.xarray().isel(layer=0).values,
    "zarr": lambda block: block.zarr()[0],
    "statistics": lambda block: block.statistics(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("harm", "error"), [(flip, DamagedBlockError), (swap, DamagedBlockError), (remove, NotStoredError)]
)
def test_whoever_asks_is_told_which_block_of_which_tier(
    harm: Callable[[str, int], None], error: type[KVStoreError], way: Callable[[BlockView], object], tmp_path: Path
) -> None:
    pytest.importorskip("xarray")
    url = f"file://{tmp_path}/kv"
    with looking(url, SPACE):
        pass
    harm(url, 4)
    there = file_of(url, 4).exists()
    with kvstore.inspect.open(url) as look:
        space = look.namespace()
        with pytest.raises(error) as told:
            way(space.block(KEYS[4].digest.hex()))
        assert KEYS[4].digest.hex() in str(told.value)
        assert str(told.value).startswith(url)
        way(space.block(KEYS[5].digest.hex()))
        assert len(space.infos()) == 10
    assert file_of(url, 4).exists() == there


def test_a_prefix_with_a_damaged_block_shows_the_others(tmp_path: Path) -> None:
    pytest.importorskip("xarray")
    url = f"file://{tmp_path}/kv"
    with looking(url, SPACE):
        pass
    flip(url, 4)
    with kvstore.inspect.open(url) as look:
        array = look.namespace().prefix(KEYS[-1].digest.hex()).xarray()
        assert array.sel(token=slice(0, 15)).values.shape[2] == 16
        assert array.sel(token=slice(20, None)).values.shape[2] == 20
        with pytest.raises(DamagedBlockError, match=KEYS[4].digest.hex()):
            _ = array.values


def test_a_block_that_went_since_is_not_there_any_more(tier: str) -> None:
    with open_store(tier) as store:
        store_prompt(store)
        with kvstore.inspect.open(store) as look:
            block = look.namespace().block(KEYS[1].digest.hex())
            store.delete_many(SPACE, KEYS[1:2])
            with pytest.raises(NotStoredError, match="not there any more"):
                block.numpy()


def test_the_command_says_so_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/kv"
    with looking(url, SPACE):
        pass
    flip(url, 4)
    assert run(["show", url, KEYS[4].digest.hex()]) == EXIT_NOT_INTACT
    shown = capsys.readouterr()
    assert ("absmax" in shown.out, KEYS[4].digest.hex() in shown.err) == (False, True)
    assert run(["show", url, KEYS[5].digest.hex()]) == 0


def test_one_damaged_block_does_not_hide_the_numbers_and_the_facts_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, told = f"file://{tmp_path}/kv", list[DamagedBlockError]()
    with looking(url, SPACE) as look:
        every = look.namespace().prefix(KEYS[-1].digest.hex()).statistics()
    flip(url, 4)
    with kvstore.inspect.open(url) as look:
        prefix = look.namespace().prefix(KEYS[-1].digest.hex())
        others = prefix.statistics(told.append)
        assert [KEYS[4].digest.hex() in str(error) for error in told] == [True]
        assert len(others) == len(every) > 0
        assert others != every
        assert prefix[5:].statistics()
    assert run(["show", url, KEYS[-1].digest.hex(), "--prefix"]) == EXIT_NOT_INTACT
    out, err = capsys.readouterr()
    assert KEYS[-1].digest.hex() in out
    assert "absmax" in out
    assert err.count(KEYS[4].digest.hex()) == 1
    assert run(["show", url, KEYS[4].digest.hex(), "--json"]) == EXIT_NOT_INTACT
    shown = json.loads(capsys.readouterr().out)
    assert (shown["digest"], shown["layers"], len(shown["damaged"])) == (KEYS[4].digest.hex(), [], 1)


def test_blocks_of_a_prefix_by_number_and_by_slice(tmp_path: Path) -> None:
    with looking(f"file://{tmp_path}/kv", SPACE) as look:
        space = look.namespace()
        prefix = space.prefix(KEYS[-1].digest.hex())
        assert prefix[1:3].keys == KEYS[1:3]
        assert prefix[-2:].digest == prefix.digest
        assert prefix[:3].complete
        assert not prefix[1:3].complete
        for which in (slice(0, 4, 2), slice(3, 3), slice(100, 200)):
            with pytest.raises(IndexError, match="name some of 0 to 9, in steps of 1"):
                _ = prefix[which]
        with pytest.raises(IndexError, match=r"PrefixView.*there is no block 1000: they are counted from 0 to 9"):
            _ = prefix[1000]


def test_who_asks_for_a_prefix_by_a_label_that_is_none_is_told_those_there_are(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    with looking(url, SPACE):
        pass
    with open_store(url) as store:
        store.mark_many(SPACE, KEYS[:2], Mark("handbook"))
    with (
        kvstore.inspect.open(url) as look,
        pytest.raises(NotStoredError, match=r"begins with 'handbok'.*Labels: handbook"),
    ):
        look.namespace().prefix("handbok")
