"""vLLM's plugin: what it makes known, what it captures, and that it never stands in anybody's way."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from importlib.metadata import entry_points
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

import pytest
import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as connector
from engines import build, make_model
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvstore.vllm
from kvstore.vllm import KVStoreTier, facts, plugin

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(plugin, "_captured", {})
    plugin.register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


def test_vllm_finds_it_by_its_entry_point() -> None:
    (found,) = {point.value for point in entry_points(group="vllm.general_plugins") if point.name == "kvstore"}
    assert found == "kvstore.vllm.plugin:register"


def test_the_names_a_module_declares_exist() -> None:
    names = [module.name for module in walk_packages(kvstore.vllm.__path__, "kvstore.vllm.")]
    assert "kvstore.vllm.demo.engine" in names
    for module in map(importlib.import_module, (name for name in names if "__main__" not in name)):
        assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


def test_the_type_kvstore_is_the_tier() -> None:
    assert SecondaryTierFactory.get_tier_class({"type": "kvstore", "url": "memory://x"}) is KVStoreTier


def test_registering_again_changes_nothing() -> None:
    before = connector.build_offloading_config
    plugin.register()
    plugin.register()
    assert connector.build_offloading_config is before


def test_an_engine_is_remembered_under_its_id_wherever_the_builder_was_imported_to(model: Path) -> None:
    """The connector had imported the builder before the plugin was called."""
    config, kv_cache = build(model)
    built = connector.build_offloading_config(config, kv_cache)
    found = plugin.captured(built.engine_id)
    assert isinstance(found, facts.EngineFacts)
    assert found.sources[0].model == str(model)
    assert plugin.captured("somebody else") is None


def test_a_module_that_has_the_builder_by_name_gets_the_one_that_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(*_: Any) -> Any: ...

    home, user = types.ModuleType(plugin.BUILDER_MODULE), types.ModuleType("vllm.made_for_this_test")
    home.__dict__[plugin.BUILDER] = user.__dict__[plugin.BUILDER] = original
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    assert user.__dict__[plugin.BUILDER] is home.__dict__[plugin.BUILDER] is not original


def test_nothing_of_vllm_is_kept_alive(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the facts, nor by the frames of an error."""
    for _ in range(2):
        config, kv_cache = build(model)
        built = connector.build_offloading_config(config, kv_cache)
        assert plugin.captured(built.engine_id) is not None
        watched = weakref.ref(config)
        del config, kv_cache, built
        gc.collect()
        assert watched() is None
        monkeypatch.setattr(facts, "_values", lambda *_: 1 / 0)


def test_a_configuration_that_cannot_be_read_stops_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_values", lambda *_: 1 / 0)
    built = connector.build_offloading_config(*build(model))
    assert isinstance(plugin.captured(built.engine_id), ZeroDivisionError)


@pytest.mark.parametrize("missing", ["FACTORY", "BUILDER_MODULE"])
def test_a_vllm_without_these_modules_starts_all_the_same(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, missing, "vllm.no_such_module")
    plugin.register()
    assert "does not work with this vLLM" in caplog.text


def test_only_the_latest_engines_are_remembered(model: Path) -> None:
    config, kv_cache = build(model)
    for number in range(plugin.KEPT + 3):
        config.kv_transfer_config.engine_id = f"engine {number}"
        connector.build_offloading_config(config, kv_cache)
    assert plugin.captured("engine 2") is None
    assert plugin.captured("engine 3") is not None
    assert plugin.captured(f"engine {plugin.KEPT + 2}") is not None
