"""A block that is damaged or gone is an error that names it, whoever asks for it, and it stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from inspect_helpers import KEYS, SPACE, looking, store_prompt

import kvstore.inspect
from kvstore import TierURL, open_store
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
    assert (shown.out, KEYS[4].digest.hex() in shown.err) == ("", True)
    assert run(["show", url, KEYS[5].digest.hex()]) == 0
