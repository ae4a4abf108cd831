"""From a prompt's tokens to the keys under which vLLM's engines store its blocks, on a machine without vLLM.

    digest[-1] = hash(seed)                                    vLLM's NONE_HASH
    digest[i]  = hash((digest[i-1], tokens of the step, extras))
    key        = the digest at the end of each block of a KV-cache group, with the group's number

where a step is `tokens_per_hash` tokens, a block several of them, and the extras are None, or in the first step of a
prompt with a salt a tuple that has it (`vllm/v1/core/kv_cache_utils.py`, `hash_block_tokens`). All that this takes
stands in the namespace's manifest, the seed as a digest: it is looked for among those that are in use.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import operator
import os
import pickle
import struct
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigurationError, MissingDependencyError
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.namespace import Namespace

__all__ = ["NAMED_SALT", "PLAIN_SALT", "SALTS", "SEED_VARIABLE", "block_keys", "seed_digest"]

KEY_SCHEMES = "vllm-"
"""What the `key_scheme` of a vLLM engine's namespace begins with; its hash's name follows."""
SALTS = "salts"
"""Where in `Namespace.extra` it stands how a prompt's `cache_salt` is hashed."""
NAMED_SALT, PLAIN_SALT = "named", "plain"
"""From 0.31 on a salt is hashed as a pair with its name, before as it is."""
SEED_VARIABLE = "PYTHONHASHSEED"
USUAL_SEED = "vllm-none-hash"
"""vLLM's, from 0.30 on, for cryptographic hashes when nobody sets another."""
GUESSED_SEEDS = 100_000
"""Numbers from 0 on that are tried as the seed; the variable has 32 bits, people take small ones. 0.1 s if none is."""
INSTEAD = "Blocks can be named by a label that requests gave them instead (--label)."


def block_keys(
    namespace: Namespace, token_ids: Sequence[int], *, salt: str | None = None, seed: str | None = None
) -> list[BlockKey]:
    """The keys of a prompt's blocks in the tiers of vLLM engines with this namespace.

    In the order of the prompt: by where a block ends, and of several KV-cache groups' blocks that end there by group.
    Only full blocks have keys. Whether an engine stored them is another question: of a group with a sliding window,
    for one, only the last blocks are.

    `salt` is the request's `cache_salt`, None or empty for none. `seed` is the PYTHONHASHSEED of the engines, where it
    is neither a small number nor that of this process. The prompt is one of text, for the model itself: what stands for
    an image, and whatever an adapter computed, has other keys that cannot be derived from tokens.

    Raises `ConfigurationError` with the reason where keys cannot be derived, `ValueError` for what are no token ids.
    """
    hashed = _hash_of(namespace)
    step, ends = _whole(namespace, "tokens_per_hash"), _ends(namespace, len(token_ids))
    digests = list(_digests(hashed, _seed(namespace, seed), _tokens(token_ids), step, _extras(namespace, salt)))
    return [BlockKey(digests[end // step - 1], group) for end, group in ends]


def seed_digest(seed: str) -> str:
    """How a seed stands in a manifest: for hashes that are not cryptographic ones it is a secret."""
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def _ends(namespace: Namespace, tokens: int) -> list[tuple[int, int]]:
    """Where each block ends, in tokens, and its group."""
    step, per_chunk = _whole(namespace, "tokens_per_hash"), _whole(namespace, "blocks_per_chunk")
    found: list[tuple[int, int]] = []
    for group in _recorded_groups(namespace):
        block = int(group["tokens_per_block"]) * per_chunk
        if block < 1 or block % step:
            raise _underivable(namespace, f"its blocks of {block} tokens are no multiple of {step} tokens per hash")
        found += [(end, int(group["id"])) for end in range(block, tokens + 1, block)]
    return sorted(found)


def _recorded_groups(namespace: Namespace) -> list[dict[str, Any]]:
    try:
        groups: list[dict[str, Any]] = json.loads(namespace.extra["groups"])
    except (KeyError, ValueError) as error:
        raise _underivable(namespace, f"its manifest does not say how blocks are cut ({error!r})") from None
    return groups


def _whole(namespace: Namespace, name: str) -> int:
    text = namespace.extra.get(name, "")
    if not text.isdecimal() or not int(text):
        raise _underivable(namespace, f"its manifest has {name}={text or 'nothing'!r}, not a number above 0")
    return int(text)


def _digests(
    hashed: Callable[[Any], bytes], seed: str, tokens: tuple[int, ...], step: int, extras: tuple[Any, ...] | None
) -> Iterator[bytes]:
    digest = hashed(seed)
    for start in range(0, len(tokens) - step + 1, step):
        digest = hashed((digest, tokens[start : start + step], None if start else extras))
        yield digest


def _tokens(token_ids: Iterable[Any]) -> tuple[int, ...]:
    """Python's own integers: another type of integer is hashed as something else."""
    try:
        tokens = tuple(map(operator.index, token_ids))
    except TypeError as error:
        raise ValueError(f"token ids are whole numbers: {error}") from None
    if tokens and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)} is negative")
    return tokens


def _extras(namespace: Namespace, salt: str | None) -> tuple[Any, ...] | None:
    if not salt:
        return None
    form = namespace.extra.get(SALTS)
    if form not in (NAMED_SALT, PLAIN_SALT):
        raise _underivable(namespace, f"its manifest does not say how vLLM hashes a salt ({SALTS} is {form!r})")
    return (("cache_salt", salt),) if form == NAMED_SALT else (salt,)


def _seed(namespace: Namespace, given: str | None) -> str:
    """The seed whose digest stands in the manifest."""
    recorded = namespace.extra.get("hash_seed", "None")
    if recorded == "None":
        raise _underivable(namespace, "the seed of its hashes was random in each process")
    if given is not None and seed_digest(given) != recorded:
        raise _underivable(namespace, f"its engines had another {SEED_VARIABLE} than {given!r}")
    likely = [given] if given is not None else [USUAL_SEED, os.environ.get(SEED_VARIABLE), "random"]
    for seed in chain(likely, map(str, range(GUESSED_SEEDS))):
        if seed is not None and seed_digest(seed) == recorded:
            return seed
    raise _underivable(
        namespace,
        f"the seed of its hashes is no small number: run this with the {SEED_VARIABLE} that the engines have",
    )


def _hash_of(namespace: Namespace) -> Callable[[Any], bytes]:
    """The hash, by the name that the namespace has it under (`vllm/utils/hashing.py`)."""
    if namespace.extra.get("engine") != "vllm" or not namespace.key_scheme.startswith(KEY_SCHEMES):
        raise _underivable(namespace, f"no vLLM wrote it: its keys are made as {namespace.key_scheme!r} says")
    name = namespace.key_scheme.removeprefix(KEY_SCHEMES)
    if name == "unknown":
        raise _underivable(
            namespace,
            "which hash its engines use is not known, because they were given a `namespace` and did not load kvstore's"
            " plugin",
        )
    digest = {"sha256": _sha256, "xxhash": _xxhash}.get(name.removesuffix("_cbor"))
    if digest is None:
        raise _underivable(namespace, f"its engines name blocks by {name!r}, which this kvstore does not know")
    encoded = _cbor if name.endswith("_cbor") else _pickled
    found = digest
    return lambda value: found(encoded(value))


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)  # the highest of every Python that vLLM runs on


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxhash(data: bytes) -> bytes:
    try:
        module: Any = importlib.import_module("xxhash")
    except ImportError:
        raise MissingDependencyError(
            "these engines name blocks by xxhash, which is not installed here: pip install xxhash"
        ) from None
    digest: bytes = module.xxh3_128_digest(data)
    return digest


def _cbor(value: bytes | str | int | tuple[Any, ...] | None) -> bytes:
    """Canonical CBOR (RFC 8949) of what vLLM hashes: None, whole numbers from 0 on, bytes, text, tuples of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0x00, value)
    if isinstance(value, bytes):
        return _head(0x40, len(value)) + value
    if isinstance(value, str):
        return _head(0x60, len(value.encode())) + value.encode()
    return _head(0x80, len(value)) + b"".join(map(_cbor, value))


def _head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes([kind | number])
    for code, form in ((24, ">BB"), (25, ">BH"), (26, ">BI")):
        if number < 1 << 8 * (1 << code - 24):
            return struct.pack(form, kind | code, number)
    return struct.pack(">BQ", kind | 27, number)


def _underivable(namespace: Namespace, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the keys of a prompt in namespace {namespace.name[:12]} ({namespace.model}) cannot be derived: {why}."
        f" {INSTEAD}"
    )
