"""Purge: blocks that are to be gone for good, with a receipt of what was removed and of what no removal reaches.

    survey: scan_marked / scan_ages ──► purge_many, in batches ──► what is left? ──► finish_purge ──► TierReceipt

`kvstore purge` is this with a command line around it. A tier that cannot be opened, or fails half-way, is in the
receipt with what was done; the others are purged all the same. Interrupted, it has removed a part, and the same call
removes the rest.

Where to look:

    run.py         `purge`: the tiers one after another, each opened, its keys destroyed, its blocks removed
    request.py     which blocks are to go
    removing.py    the survey and the removal, in one open store
    datakeys.py    the keys that an encrypted tier's blocks are under, and what they still open
    receipt.py     what was done, and what remains
"""

from kvstore.purging.datakeys import Keys
from kvstore.purging.receipt import Receipt, SpaceReceipt, TierReceipt
from kvstore.purging.request import Request
from kvstore.purging.run import purge

__all__ = ["Keys", "Receipt", "Request", "SpaceReceipt", "TierReceipt", "purge"]
