"""Where no vLLM is installed, its engines' keys are derived all the same: digests of vLLM 0.33, written down."""

from __future__ import annotations

import json

import pytest

from kvstore import BlockKey, BlockLayout, Namespace
from kvstore.vllm.keys import block_keys, seed_digest

PROMPT = [*range(32), *range(99_000, 99_032), 5]

OF_VLLM = {
    "sha256": (
        "vllm-none-hash",
        "6cdbd1cfd246733dec7f521cc850a1bfd4b4e01b6f69e5dd4ae573942d06f53a",
        "64cefc829b967997893da2cd8644b7899feefc0c618e5e4a029288d376bba6dc",
    ),
    "sha256_cbor": (
        "vllm-none-hash",
        "e309c5d68c94765f1d1a398ea9877fb6a8b980e10087add6e6f595a2437577e2",
        "6ddb1663c100cfeff34a39c65241c8e1a911161434199ade360ae2bad97b6339",
    ),
    "xxhash": ("7", "e143192fce035be36c3ae1da4ef73eea", "d38f251f11b3bcf387fe47371b0aed4f"),
    "xxhash_cbor": ("7", "7a98727f5484d97a6c50b7a68aa33294", "f79e853618679b257282f824f3ae1a5d"),
}


@pytest.mark.parametrize("algorithm", OF_VLLM)
def test_keys_of_a_salted_prompt_are_those_of_vllm(algorithm: str) -> None:
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash")
    seed, *digests = OF_VLLM[algorithm]
    space = Namespace(
        "m",
        "r",
        (BlockLayout.opaque(4096),),
        block_tokens=32,
        key_scheme=f"vllm-{algorithm}",
        digest_bytes=len(digests[0]) // 2,
        extra={
            "engine": "vllm",
            "hash_seed": seed_digest(seed),
            "salts": "named",
            "tokens_per_hash": "32",
            "blocks_per_chunk": "1",
            "groups": json.dumps([{"id": 0, "tokens_per_block": 32}]),
        },
    )
    assert block_keys(space, PROMPT, salt="acme") == [BlockKey(bytes.fromhex(digest)) for digest in digests]
