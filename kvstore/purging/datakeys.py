"""The data keys of purged blocks: whose blocks are under which, whether they are destroyed, what they still open.

A destroyed key takes with it every copy of what was sealed with it, backups and earlier versions of objects included.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvstore.registry import backend_class
from kvstore.sealing import Keyring, check_options
from kvstore.types import Residue
from kvstore.url import TierURL

if TYPE_CHECKING:
    from kvstore.purging.receipt import TierReceipt
    from kvstore.purging.request import Request

__all__ = ["Keys", "beside_keys", "data_keys_of", "destroy_keys"]


class Keys(enum.Enum):
    """What becomes of the data keys of an encrypted tier."""

    AUTO = "auto"
    """Those of a tenant that is purged as a whole are destroyed, no others."""
    DESTROY = "destroy"
    """The tenant's, or with `Request.all` all in the keyring, other tiers' that share it included. Only where nothing
    else narrows the purge down: a key opens all that was sealed with it.
    """
    KEEP = "keep"


def data_keys_of(url: TierURL | str, tenant: str) -> frozenset[bytes]:
    """Ids of the tenant's data keys, and of all that are no more: what is under those is nobody's. Raises a
    `KVStoreError`.
    """
    keyring = _keyring(url)
    if keyring is None:
        return frozenset()
    with keyring:
        ring = keyring.ring()
    return ring.destroyed | {key_id for key_id, whose in ring.tenants.items() if whose == tenant}


def destroy_keys(url: TierURL | str, asked: Request, keys: Keys) -> bool:
    """Destroy the data keys of those whose blocks go, if that is asked; whether they are. Raises a `KVStoreError`."""
    wanted = asked.is_whole and not asked.all if keys is Keys.AUTO else keys is Keys.DESTROY
    keyring = _keyring(url) if wanted else None
    if keyring is None:
        return False
    with keyring:
        for tenant in [asked.tenant] if asked.tenant else keyring.tenants():
            keyring.destroy(tenant)
    return True


def _keyring(url: TierURL | str) -> Keyring | None:
    """That of the tier; None where it is not encrypted."""
    tier = TierURL.parse(url) if isinstance(url, str) else url
    found = check_options(tier.validated(backend_class(tier).options))
    if found is None:
        return None
    operator_key, path = found
    return Keyring.open(path, operator_key, create=False)


def beside_keys(tier: TierReceipt, asked: Request, *, marks: bool) -> list[Residue]:
    """What no destroyed key takes with it; or that none was destroyed. `marks`: the store keeps them."""
    if not tier.erasable:
        remedy = "purge with --keys destroy" if asked.is_whole else ""
        return [Residue("data keys that open every copy of the removed blocks", None, remedy)]
    found = [Residue("copies of the keyring that somebody kept, beside the operator's key", None, "erase them as well")]
    if asked.tenant and not marks:
        found.append(Residue("blocks that others had stored before the tenant used them: they are under others' keys"))
    shared = sum(space.shared for space in tier.spaces)
    if shared:
        found.append(Residue(f"{shared} blocks of other tenants too: some may be sealed under their keys"))
    return found
