"""Whether vLLM's primary memory can hold one request: said once, when the tier is made.

All of a request's blocks must be in primary memory at the same time to be loaded. Where its longest request does not
fit, the tier serves the front of its prefix and the rest is computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvstore.url import format_size

if TYPE_CHECKING:
    from kvstore.vllm._compat import OffloadingSpec

__all__ = ["last_token", "rows_of_longest_request", "warn_if_small"]

log = logging.getLogger(__name__)


def rows_of_longest_request(config: Any, max_model_len: int) -> int:
    """Rows that the blocks of `max_model_len` tokens take, over all KV-cache groups; `config` is vLLM's."""
    total = 0
    for group in config.groups:
        chunks = -(-max_model_len // (group.tokens_per_block * config.cache.blocks_per_chunk))
        window = getattr(group, "sliding_window_size_in_chunks", None)
        total += chunks if window is None else min(chunks, window)
    return total


def last_token(config: Any, rows: int) -> float:
    """How far into a prompt blocks can be loaded, in tokens; infinity where its groups do not all keep everything."""
    if len(config.groups) > 1 or getattr(config.groups[0], "sliding_window_size_in_chunks", None) is not None:
        return float("inf")
    return float(rows * config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)


def warn_if_small(spec: OffloadingSpec, rows: int, row_bytes: int, max_model_len: int) -> None:
    """Log a warning if the longest request needs more than `rows`; `max_model_len` of 0: not known, nothing is said."""
    wanted = rows_of_longest_request(spec.config, max_model_len)
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
