"""For those who build a backend, a policy, or something above them: what each has to pass, and stores that misbehave.

- `StoreTests`: the contract of a backend. Subclass it (`backends/README.md` shows how).
- `PolicyTests`: the contract of an eviction policy.
- `AgainstADictionary`: the state machine that `StoreTests` runs, for longer runs of one's own.
- `kvstore.testing.faults`: a store around a store, slow, failing, hanging, lying, flapping or truncating on order.
- `kvstore.testing.servers`: real servers for tests, from PyPI: S3 with conditional writes, and S3 without.
- `kvstore.testing.proxy`: a bad network in front of a real server: slow, cut, silent, reset or wrong on order.
- `kvstore.testing.clock`: the time by which blocks are dated and expire, moved on order.
- `kvstore.testing.supply`: keys, and blocks that belong to them.
- `kvstore.testing.patience`: waiting, and time-outs that a busy machine does not meet.

Needs pytest and hypothesis: `pip install "kvstore-tiers[test]"`. Nothing else in kvstore imports it.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in ("blocks", "damage", "facts", "lifetime", "marks", "model", "policy", "purge", "retention")
    )
)

from kvstore.testing.model import AgainstADictionary, run_against_a_dictionary  # noqa: E402
from kvstore.testing.policy import PolicyTests  # noqa: E402
from kvstore.testing.store import StoreTests  # noqa: E402

__all__ = ["AgainstADictionary", "PolicyTests", "StoreTests", "run_against_a_dictionary"]
