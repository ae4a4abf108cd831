"""Keys: the same tokens give the same key anywhere, and nothing else does."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import KeyExtras, Media, block_keys, chain_digests
from kvstore.keys import KEY_SCHEME

TOKENS = list(range(64))


def test_a_digest_names_the_whole_prefix_up_to_its_blocks_end() -> None:
    digests = chain_digests(TOKENS, 16)
    assert len(set(digests)) == 4
    assert chain_digests(TOKENS[:40], 16) == digests[:2]
    assert chain_digests([99, *TOKENS[1:]], 16)[3] != digests[3]


def test_the_chain_is_the_documented_one() -> None:
    # Written down once, from the formula in the module's docstring; it must never change.
    assert chain_digests([1, 2], 2)[0].hex() == "d4e8ae0083094a163fad593e503ad5d450656e1d81bc8a9fca7357c77aba6cf5"


def test_media_stands_in_the_chain_with_its_offset_in_the_block_its_kind_and_its_hash() -> None:
    def field(tag: bytes, value: bytes) -> bytes:
        return struct.pack("<Q", len(tag)) + tag + struct.pack("<Q", len(value)) + value

    def tokens(*ids: int) -> bytes:
        return field(b"tokens", struct.pack(f"<{len(ids)}Q", *ids))

    root = sha256(KEY_SCHEME.encode() + field(b"model", b"m") + field(b"adapter", b"") + field(b"salt", b"s")).digest()
    first = sha256(root + tokens(1, 2)).digest()
    media = field(b"offset", struct.pack("<Q", 1)) + field(b"kind", b"sound") + field(b"hash", b"cat")
    second = sha256(first + tokens(3, 4) + field(b"media", media)).digest()
    extras = KeyExtras("m", salt="s", media=(Media(3, b"cat", "sound"),))
    assert chain_digests([1, 2, 3, 4], 2, extras) == [first, second]


def test_every_process_derives_the_same_keys() -> None:
    code = "from kvstore import chain_digests as c, KeyExtras as e; print(c(range(64), 16, e('m','a','s'))[3].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert seen == {chain_digests(TOKENS, 16, KeyExtras("m", "a", "s"))[3].hex().encode() + b"\n"}


words = st.text(max_size=4)


@given(st.lists(st.tuples(words, words, words), min_size=2, max_size=8, unique=True))
def test_different_model_adapter_or_salt_never_share(extras: list[tuple[str, str, str]]) -> None:
    digests = [chain_digests(TOKENS, 16, KeyExtras(*fields))[0] for fields in extras]
    assert len(set(digests)) == len(extras)


def test_media_enters_the_block_it_stands_in_and_all_after() -> None:
    plain = chain_digests(TOKENS, 16)
    image = chain_digests(TOKENS, 16, KeyExtras(media=(Media(20, b"cat"),)))
    other = chain_digests(TOKENS, 16, KeyExtras(media=(Media(20, b"dog"),)))
    assert image[0] == plain[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[1:], image[1:], other[1:], strict=True))


@pytest.mark.parametrize(
    ("tokens", "match"), [([-1], "not negative"), ([1.5], "integers"), ([[1], [2]], "one sequence")]
)
def test_what_is_not_a_token_is_refused(tokens: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        block_keys(tokens, 1)
