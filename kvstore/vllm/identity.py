"""The namespace of an engine: two engines that can share blocks get the same, two that cannot never do.

    vLLM's configuration --plugin--> EngineFacts ┐
    the model's files ----weights--> one line    ├─> Namespace: its fingerprint is in every address and block
    the tier's OffloadingConfig ---------------- ┘

A block is a row of primary memory, opaque to kvstore; what it holds stands in the namespace's `extra`, so that a stored
manifest says how to read it. Rows can be read under another topology only where vLLM's bytes do not depend on it (see
`_any_topology`); otherwise the sizes of all axes of parallelism are part of the identity.

What cannot be found out is refused when the tier is made, unless the operator names the namespace: that name then
stands for the weights, and only for them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigurationError
from kvstore.layout import BlockLayout
from kvstore.namespace import Namespace
from kvstore.vllm.facts import (
    SEED_REMEDY,
    SHARDED,
    EngineFacts,
    KeyFacts,
    device_facts,
    engine_version,
    read_keys,
    vllm_module,
)
from kvstore.vllm.keys import SALTS
from kvstore.vllm.plugin import captured
from kvstore.vllm.weights import UnknownWeightsError, weights_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.vllm._compat import OffloadingSpec

__all__ = ["IdentityError", "namespace_of"]

REMEDY = (
    'Give the tier a name of your own for what may share blocks ("namespace": "llama-3-8b@2026-01" in its'
    " configuration), and change it whenever the weights change."
)
CANONICAL_MODULE = "distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping"
DIRECT_ROWS = (0, 30), (0, 33)
"""First and last version of vLLM that make a row of pages in the same way, as their sources were read."""
USUAL_HASH = "sha256"
"""vLLM's default for naming blocks."""

log = logging.getLogger(__name__)


class IdentityError(ConfigurationError):
    """Which engines may share this engine's blocks cannot be found out, or none ever could."""


def namespace_of(spec: OffloadingSpec, row_bytes: int, *, override: str | None = None) -> Namespace:
    """What this engine's blocks have in common with those of others.

    `row_bytes`: bytes of a row of primary memory, padding included. `override`: the operator's name for the weights.
    Where the engine was not seen into, digests are taken to be as long as those of `USUAL_HASH`.

    Reads the model's files (about 1.6 % of them) unless they are a snapshot of the hub or `override` is given. Raises
    `IdentityError`. Thread-safe.
    """
    config: Any = spec.config
    facts = _facts(config, override)
    keys = facts.keys if facts else _usual_keys()
    any_topology = _any_topology(config)
    extra = _extra(config, any_topology) | (_engine_extra(facts) if facts else _unknown_engine())
    extra |= {"hash_seed": str(keys.seed), SALTS: keys.salts, "groups": _json(_groups(config, facts, any_topology))}
    model, revision = _weights(facts, override)
    return Namespace(
        model=model,
        revision=revision,
        layouts=(BlockLayout.opaque(row_bytes),) * (1 + max(_group_ids(config))),
        block_tokens=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        key_scheme=f"vllm-{keys.algorithm}",
        digest_bytes=keys.digest_bytes,
        extra=extra,
    )


def _facts(config: Any, override: str | None) -> EngineFacts | None:
    """The engine's facts, or None if the operator vouches for it; raises if there is neither, or no hope."""
    found = captured(config.engine_id)
    if isinstance(found, EngineFacts):
        if found.unique:
            raise IdentityError(
                f"No other process could ever use the blocks of this engine: {'; '.join(found.unique)}."
            )
        if found.doubts and override is None:
            raise IdentityError(
                f"Blocks under equal keys may differ: {'; '.join(found.doubts)}. {REMEDY} Include the adapters in it."
            )
        return found
    if override is not None:
        return None
    if found is not None:
        raise IdentityError(
            f"kvstore cannot read the configuration of this vLLM ({found!r}), so it cannot tell which engines may share"
            f" blocks with it. {REMEDY}"
        )
    chosen = os.getenv("VLLM_PLUGINS")
    reason = (
        "vLLM did not load kvstore's plugin (install kvstore-tiers where vLLM is installed; vLLM 0.26 or later)"
        if chosen is None or "kvstore" in chosen.split(",")
        else f"VLLM_PLUGINS={chosen} leaves out kvstore's plugin (add kvstore to it)"
    )
    raise IdentityError(
        f"Which weights, overrides and kernels the engine {config.model.name!r} uses is not known: {reason}. {REMEDY}"
    )


def _usual_keys() -> KeyFacts:
    """Where nothing says which hash is used: digests of another hash have other values, so they are misses."""
    keys = read_keys(USUAL_HASH)
    if keys.seed is None:
        log.warning("kvstore: %s", SEED_REMEDY.format(keys.algorithm))
    return replace(keys, algorithm="unknown")


def _weights(facts: EngineFacts | None, override: str | None) -> tuple[str, str]:
    """Model and revision. A name of the operator's stands for both; a path is in neither."""
    if facts is None or override is not None:
        return str(override), f"as named: {override}"
    try:
        lines = [weights_identity(source) for source in facts.sources]
    except UnknownWeightsError as error:
        raise IdentityError(f"Which weights this engine uses cannot be found out: {error}. {REMEDY}") from error
    return facts.architecture, " + ".join(lines)


def _any_topology(config: Any) -> bool:
    """Whether a row has the same bytes under every topology, so that what TP=2 wrote TP=4 can read.

    vLLM's `is_parallelism_agnostic` promises it for all ranks' bytes one after another, which is how a row is made. For
    its canonical layout that holds; one copy of latents that all ranks share (`replicated_layout`) holds it as well.
    Rows of several ranks in the direct layout hold, rank by rank, all layers of that rank's heads: they are equal only
    where heads are the outermost axis of a block (BHLNC) and a row is one block.
    """
    parallel = config.parallel
    if getattr(config, "replicated_layout", False):
        return True
    if not parallel.is_parallelism_agnostic:
        return False
    if getattr(config, "canonical_layout", False):
        return True
    heads_first = getattr(config, "kv_cache_layout", None) == "BHLNC"
    return bool(heads_first and config.cache.blocks_per_chunk == 1 and parallel.pp_size == 1)


def _extra(config: Any, any_topology: bool) -> dict[str, str]:
    """What the tier's own configuration says."""
    parallel = config.parallel
    axes = {name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp", "world")}
    layout = getattr(config, "kv_cache_layout", None)
    return {
        "engine": "vllm",
        "kv_dtype": str(config.model.dtype),
        "kv_cache_layout": layout or f"{os.getenv('VLLM_KV_CACHE_LAYOUT', 'the default')} of vLLM {engine_version()}",
        "rows": _row_format(config, layout),
        "topology": "any" if any_topology else " ".join(f"{name}={size}" for name, size in axes.items()),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
    }


def _row_format(config: Any, layout: str | None) -> str:
    """`direct`: pages as the device has them, layer by layer; `canonical v1-nhd`: vLLM's format, by its own name."""
    if not getattr(config, "canonical_layout", False):
        numbers = re.match(r"(\d+)\.(\d+)", engine_version())
        known = numbers is not None and DIRECT_ROWS[0] <= (int(numbers[1]), int(numbers[2])) <= DIRECT_ROWS[1]
        return "direct" if known else f"direct, vLLM {engine_version()}"
    name: Any = vllm_module(CANONICAL_MODULE).canonical_format_id
    return f"canonical {name(layout) if layout else name()}"


def _engine_extra(facts: EngineFacts) -> dict[str, str]:
    return {"attention": facts.attention, "kv_heads": str(facts.kv_heads), **facts.values}


def _unknown_engine() -> dict[str, str]:
    """Engines that were not seen into share with their like only: of the same version, on the same kind of device."""
    return {"attention": f"unknown on {device_facts()}, vLLM {engine_version()}"}


def _groups(config: Any, facts: EngineFacts | None, any_topology: bool) -> list[Mapping[str, Any]]:
    """By group id: layers, tokens and what a block of each layer holds; of one rank, unless the topology is any."""
    found: list[Mapping[str, Any]] = []
    for group_id, group in zip(_group_ids(config), config.groups, strict=True):
        known = facts.groups[group_id] if facts else None
        fields = dict(known.fields) if known else {}
        if any_topology:
            fields = {name: value for name, value in fields.items() if name not in SHARDED}
        found.append(
            {
                "id": group_id,
                "kind": known.kind if known else "unknown",
                "layers": list(group.layer_names),
                "tokens_per_block": group.tokens_per_block,
                **fields,
            }
        )
    return found


def _group_ids(config: Any) -> list[int]:
    """As they stand in keys: a group's own id, where it has one."""
    return [getattr(group, "group_id", index) for index, group in enumerate(config.groups)]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
