"""From tokens to the keys under which an engine looks for their blocks: by the scheme that its namespace names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigurationError
from kvstore.keys import KEY_SCHEME, KeyExtras, chain_digests
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.namespace import Namespace

__all__ = ["keys_of_tokens"]


def keys_of_tokens(
    namespace: Namespace, token_ids: Sequence[int], *, extras: KeyExtras | None = None, salt: str = ""
) -> list[BlockKey]:
    """The keys of every whole block of `token_ids`, in order; of each position, one for each KV-cache group.

    `extras` (adapter, media, salt; for kvstore's own scheme) and `salt` are what the engine put into its keys besides
    tokens. Raises `ConfigurationError` for a scheme that cannot be derived here, `ValueError` for what are no token
    ids.
    """
    groups = range(len(namespace.layouts))
    if namespace.key_scheme == KEY_SCHEME:
        digests = chain_digests(
            token_ids, namespace.block_tokens, _extras(extras, salt), digest_bytes=namespace.digest_bytes
        )
        return [BlockKey(digest, group) for digest in digests for group in groups]
    if namespace.key_scheme.startswith("vllm-"):
        if extras is not None:
            raise ConfigurationError("vLLM's keys take no extras: pass the request's cache salt as salt")
        vllm_keys: Any = importlib.import_module("kvstore.vllm.keys")
        derived: list[BlockKey] = vllm_keys.block_keys(namespace, token_ids, salt=salt or None)
        return derived
    raise ConfigurationError(
        f"namespace {namespace.name} ({namespace.model}) has keys of scheme {namespace.key_scheme!r}, which cannot be"
        " derived from tokens here: select blocks by their label (--label) or by their keys (--keys)"
    )


def _extras(extras: KeyExtras | None, salt: str) -> KeyExtras | None:
    if extras is not None and salt:
        raise ValueError("give the salt once: in extras, or as salt")
    return extras if extras is not None else KeyExtras(salt=salt)
