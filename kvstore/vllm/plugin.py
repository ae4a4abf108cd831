"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`).

It makes the tier type `kvstore` known, and sees to it that `identity` can tell which engines may share blocks: the
configuration that vLLM hands to its tiers has a model's name but no revision, no quantisation, no overrides. Where the
connector translates the whole configuration (`build_offloading_config`), its facts are read and kept by engine id.

Nothing in here may fail in a process that does not use kvstore: whatever goes wrong is kept until a tier asks.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.vllm.facts import EngineFacts

__all__ = ["TIER_TYPE", "captured", "register"]

log = logging.getLogger(__name__)

TIER_TYPE = "kvstore"
TIER_MODULE, TIER_CLASS = "kvstore.vllm", "KVStoreTier"
FACTORY = "vllm.v1.kv_offload.tiering.factory"
BUILDER_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config"
BUILDER = "build_offloading_config"
KEPT = 64
"""Engines remembered in one process, the latest: facts are a few kilobytes each."""

_captured: dict[str, EngineFacts | Exception] = {}
_lock = threading.Lock()


def register() -> None:
    """Called by vLLM, any number of times. Never raises: what does not work with this vLLM is logged."""
    for step in (_register_type, _capture_configurations):
        try:
            step()
        except Exception as error:  # an older or a much newer vLLM must start all the same
            log.warning("kvstore: %s does not work with this vLLM: %r", step.__name__.strip("_"), error)


def captured(engine_id: str) -> EngineFacts | Exception | None:
    """What is known of an engine of this process: the error, if reading its configuration failed; None if nothing."""
    with _lock:
        return _captured.get(engine_id)


def _register_type() -> None:
    factory: Any = importlib.import_module(FACTORY).SecondaryTierFactory
    try:
        factory.register_tier(TIER_TYPE, TIER_MODULE, TIER_CLASS)
    except ValueError:  # registered already, by an earlier call: vLLM offers no way to ask
        log.debug("kvstore: the tier type %r is registered already", TIER_TYPE)


def _capture_configurations() -> None:
    """Put a wrapper in place of `build_offloading_config`, under every name that vLLM's modules have it by."""
    original: Callable[..., Any] = getattr(importlib.import_module(BUILDER_MODULE), BUILDER)
    if getattr(original, "kvstore", False):
        return

    @functools.wraps(original)
    def build_offloading_config(vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        built = original(vllm_config, kv_cache_config, *args, **kwargs)
        _remember(str(built.engine_id), vllm_config, kv_cache_config)
        return built

    build_offloading_config.__dict__["kvstore"] = True
    for name, module in list(sys.modules.items()):
        # Not getattr: some of vLLM's modules import others when they are asked for a name.
        if name.startswith("vllm.") and getattr(module, "__dict__", {}).get(BUILDER) is original:
            setattr(module, BUILDER, build_offloading_config)


def _remember(engine_id: str, vllm_config: Any, kv_cache_config: Any) -> None:
    """The last call counts: a worker in the same process builds the connector too, with the same facts."""
    facts: EngineFacts | Exception
    try:
        from kvstore.vllm.facts import read_facts

        facts = read_facts(vllm_config, kv_cache_config)
    except Exception as error:  # a tier of another kind may be all that is used; ours will refuse and say why
        facts = error.with_traceback(None)  # frames would keep the whole configuration alive
    with _lock:
        _captured.pop(engine_id, None)
        _captured[engine_id] = facts
        while len(_captured) > KEPT:
            del _captured[next(iter(_captured))]
