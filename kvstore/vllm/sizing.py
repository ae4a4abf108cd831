"""Whether vLLM's primary memory can hold one request: said once, when the tier is made.

All of a request's blocks must be in primary memory at the same time to be loaded. Where its longest request does not
fit, the tier serves the front of its prefix and the rest is computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.url import format_size
from kvstore.vllm._compat import chunk_tokens, longest_request, windows_of

if TYPE_CHECKING:
    from kvstore.vllm._compat import OffloadingSpec

__all__ = ["last_token", "rows_of_longest_request", "warn_if_small"]

log = logging.getLogger(__name__)


def rows_of_longest_request(spec: OffloadingSpec, max_model_len: int) -> int:
    """Rows that the blocks of `max_model_len` tokens take, over all KV-cache groups."""
    total = 0
    for tokens, window in zip(chunk_tokens(spec), windows_of(spec), strict=True):
        chunks = -(-max_model_len // tokens)
        total += chunks if window is None else min(chunks, window)
    return total


def last_token(spec: OffloadingSpec, rows: int) -> float:
    """How far into a prompt blocks can be loaded, in tokens; infinity where its groups do not all keep everything."""
    tokens, windows = chunk_tokens(spec), windows_of(spec)
    return float(rows * tokens[0]) if windows == [None] else float("inf")


def warn_if_small(spec: OffloadingSpec, rows: int, row_bytes: int) -> None:
    """Log a warning if the longest request needs more than `rows`; where its length is not known, nothing is said."""
    max_model_len = longest_request(spec)
    wanted = rows_of_longest_request(spec, max_model_len)
    if wanted > rows:
        log.warning(
            "cpu_bytes_to_use holds %d blocks, %s, but a request of max_model_len=%d tokens has %d: of longer prefixes"
            " only the front is loaded. Set cpu_bytes_to_use to %d or more (%s), times the requests that load at once",
            rows,
            format_size(rows * row_bytes),
            max_model_len,
            wanted,
            wanted * row_bytes,
            format_size(wanted * row_bytes),
        )
