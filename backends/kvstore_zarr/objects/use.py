"""Around each verb of an object store: it is open, and what a request says of the whole store says of which one."""

from __future__ import annotations

from kvstore.errors import TierUnavailable
from kvstore.inuse import InUse
from kvstore.objects.faults import RequestFailed

__all__ = ["AtWork"]


class AtWork(InUse):
    """A `with` block is one verb, in whichever thread; `what` is the tier's URL. Raises `TierUnavailable`, too."""

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        error = raised[1]
        if isinstance(error, RequestFailed):
            raise TierUnavailable(f"{self.what}: {error}") from error
