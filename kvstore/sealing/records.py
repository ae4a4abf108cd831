"""What a local tier's catalogue says of how its blocks are sealed: `seal` in `info`, the keyring's id (16 bytes)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import StoreSealedError
from kvstore.sealing.sealer import PLAIN

if TYPE_CHECKING:
    from kvstore.environment import Environment

__all__ = ["record_seal", "recorded_seals"]

_NAME = b"seal"


def recorded_seals(environment: Environment) -> set[str]:
    """With which keyring the blocks are sealed, or `PLAIN`; nothing where none was ever put and nothing is said."""
    databases = environment.databases
    with environment.read() as txn:
        stored = txn.get(_NAME, db=databases["info"])
        if stored is not None:
            return {bytes(stored).hex()}
        return {PLAIN} if txn.stat(databases["namespaces"])["entries"] else set()


def record_seal(environment: Environment, seal: str, *, alone: bool) -> None:
    """See that the catalogue says `seal`. Call it once, in `Presence.opening`.

    Raises `StoreSealedError` where it says another, or others have the tier open who do not seal.
    """
    found = recorded_seals(environment)
    if found == {seal} or (not found and seal == PLAIN):
        return
    directory = environment.directory
    if found:
        raise StoreSealedError(
            f"{directory}: blocks there are {_how(found.pop())}, and those of the tier that was opened are {_how(seal)}"
        )
    if environment.readonly:
        return
    if not alone:
        raise StoreSealedError(
            f"{directory} is open elsewhere without encryption=: give it everywhere, or use another location"
        )
    with environment.write() as txn:
        txn.put(_NAME, bytes.fromhex(seal), db=environment.databases["info"])


def _how(seal: str) -> str:
    return f"encrypted with keyring {seal}" if seal else "not encrypted"
