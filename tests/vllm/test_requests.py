"""What a request says of itself is said of its blocks: of those that the tier has, and of those that it is to have."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from driver import Driver, keys

from kvstore import Mark, open_store
from kvstore.vllm.requests import said

if TYPE_CHECKING:
    from pathlib import Path


def tier(scheme: str, folder: Path, **options: Any) -> dict[str, Any]:
    url = f"{scheme}://{folder}/{scheme}"
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": url, "namespace": "requests", **options}


def marks_in(url: str) -> dict[bytes, tuple[Mark, ...]]:
    """Of each block in the tier, by digest."""
    with open_store(url) as store:
        return {info.key.digest: info.marks for space in store.namespaces() for info in store.scan(space)}


def serve(engine: Driver, names: list[bytes], params: dict[str, Any]) -> None:
    """A request whose blocks are somewhere: it computes what is nowhere."""
    request = engine.arrive(names, params)
    touch = not hasattr(request.context, "set_offload_key_position")
    written = engine.prepare_store(request)
    if touch:
        engine.call("touch", names, request.context)
    engine.step()
    engine.complete_store(request, written or [])
    engine.finish(request)


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_blocks_that_are_stored_already_and_those_stored_later_have_what_the_request_says(
    scheme: str, tmp_path: Path
) -> None:
    prefix = keys(12, "handbook")
    with Driver([tier(scheme, tmp_path)], rows=32) as engine:
        engine.store(prefix[:8])
        serve(engine, prefix, {"kvstore": {"label": "handbook", "pin": True, "tenant": "acme"}, "other": 1})
        serve(engine, prefix[:2], {"kvstore": {"label": "front"}})
        engine.settle()
    expected = {key[:-4]: (Mark("handbook", pinned=True, tenant="acme"),) for key in prefix}
    for key in prefix[:2]:
        expected[key[:-4]] = (Mark("front"), Mark("handbook", pinned=True, tenant="acme"))
    assert marks_in(f"{scheme}://{tmp_path}/{scheme}") == expected


def test_stores_that_end_after_their_request_are_marked(tmp_path: Path) -> None:
    """The device is slower than the request: its last blocks are written when nobody remembers it."""
    names = keys(16, "late")
    with Driver([tier("file", tmp_path)], rows=32, row_bytes=1 << 20) as engine:
        request = engine.arrive(names, {"kvstore": {"label": "late"}})
        written = engine.prepare_store(request)
        assert written is not None
        engine.complete_store(request, written)
        engine.finish(request)
        engine.settle()
    assert set(marks_in(f"file://{tmp_path}/file").values()) == {(Mark("late"),)}


def test_what_a_request_loads_has_what_it_says(tmp_path: Path) -> None:
    names = keys(8, "loaded")
    with Driver([tier("lmdb", tmp_path)], rows=16) as engine:
        engine.store(names)
        engine.evict_all()
        request = engine.arrive(names, {"kvstore": {"tenant": "acme"}})
        engine.until(lambda: engine.final(request))
        if not hasattr(request.context, "set_offload_key_position"):
            engine.call("touch", names, request.context)
        engine.finish(request)
        engine.settle()
    assert marks_in(f"lmdb://{tmp_path}/lmdb") == {key[:-4]: (Mark(tenant="acme"),) for key in names}


def test_a_pinned_prefix_survives_what_turns_the_tier_over(tmp_path: Path) -> None:
    prefix = keys(8, "pinned")
    options = tier("file", tmp_path)
    options["url"] += "?capacity=6MB"
    with Driver([options], rows=32, row_bytes=64 << 10) as engine:
        engine.store(prefix, params={"kvstore": {"label": "system", "pin": True}})
        for number in range(40):
            engine.store(keys(8, f"novel {number}"))
        engine.evict_all()
        assert engine.load(prefix) == 8
        assert engine.load(keys(8, "novel 0")) == 0


def test_two_tiers_both_know_it(tmp_path: Path) -> None:
    names = keys(4, "both")
    with Driver([tier("file", tmp_path), tier("lmdb", tmp_path)], rows=16) as engine:
        engine.store(names, params={"kvstore": {"label": "a"}})
    for scheme in ("file", "lmdb"):
        assert marks_in(f"{scheme}://{tmp_path}/{scheme}") == {key[:-4]: (Mark("a"),) for key in names}


BAD: list[Any] = [
    "a text",
    ["a list"],
    {"label": 7},
    {"pin": True},
    {"label": "a", "pin": "yes"},
    {"label": "a\nb"},
    {"label": "a", "tenant": "x" * 200},
    {"label": "\ud800"},
    {"labels": "a"},
    {7: "a"},
    {"label": None},
]


@pytest.mark.parametrize("params", BAD, ids=repr)
def test_what_cannot_be_understood_is_an_error_that_says_what(params: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        said({"kvstore": params})


@pytest.mark.parametrize("params", [None, {}, {"other": {}}, "x", 7, {"kvstore": None}, {"kvstore": {}}], ids=repr)
def test_a_request_may_say_nothing(params: Any) -> None:
    assert said(params) is None


def test_bad_parameters_are_one_warning_counted_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Driver([tier("file", tmp_path)], rows=16) as engine, caplog.at_level(logging.WARNING, "kvstore"):
        for number, params in enumerate(BAD):
            assert engine.store(keys(1, f"bad {number}"), params={"kvstore": params}) == 1
        assert engine.tiers[0]._requests.refused == len(BAD)
        assert engine.tiers[0]._requests._open == {}
        told = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(told) == 1
    assert '{"label": "…", "pin": true, "tenant": "…"}' in told[0]
    assert "'a text'" in told[0]
    assert set(marks_in(f"file://{tmp_path}/file").values()) == {()}


def test_where_pins_are_the_operators_a_request_keeps_its_label_and_pins_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Driver([tier("file", tmp_path, allow_pins=False)], rows=16) as engine,
        caplog.at_level(logging.WARNING, "kvstore"),
    ):
        engine.store(keys(2), params={"kvstore": {"label": "handbook", "pin": True, "tenant": "acme"}})
        assert engine.tiers[0]._requests.refused == 1
    assert "pins nothing: the tier's option allow_pins is false" in caplog.text
    assert set(marks_in(f"file://{tmp_path}/file").values()) == {(Mark("handbook", tenant="acme"),)}
