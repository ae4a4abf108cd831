"""Every error kvstore raises, in one tree, grouped by what a caller would do about it. Those of one room alone stand
there, under the same roots (`kvstore.archive`, `kvstore.vllm`, `kvstore.objects`).

::

    KVStoreError
    ├── ConfigurationError (ValueError)      mend the URL or the options
    │   ├── InvalidURLError
    │   ├── UnknownSchemeError
    │   ├── UnknownOptionError
    │   ├── InvalidOptionError
    │   └── MissingDependencyError (ImportError)
    ├── StoreOpenError (OSError)             the location cannot be used as it is; nothing was changed
    │   ├── StoreNotFoundError               nothing is there, and it was opened read-only
    │   ├── NotAStoreError                   something else is there
    │   ├── NewerFormatError                 written by a later kvstore
    │   ├── OlderFormatError                 written before format version 1, the first that later ones read
    │   ├── CapacityMismatchError            the tier already has another cap
    │   ├── StoreAccessError                 permissions, a read-only or an unsuitable file system
    │   ├── StoreFullError                   no space is left to open the tier in
    │   ├── StoreDamagedError                the tier's own records cannot be trusted; says how to repair
    │   ├── StoreSealedError                 it is encrypted and was opened without its key, or the other way round
    │   └── KeyringError                     the keyring of an encrypted tier is missing, damaged or of another key
    ├── InvalidBlockError (ValueError)       the caller's block does not fit the namespace
    ├── NotStoredError (LookupError)         no such namespace, block or prefix to look at, or several: it lists them
    ├── DamagedBlockError (ValueError)       the stored block that was to be looked at fails its checks
    ├── TierUnavailable (ConnectionError)    the store cannot tell now; the tier answers with misses meanwhile
    ├── StoreClosedError (RuntimeError)      used after `close`, or in a forked child
    └── ShutdownTimeout (TimeoutError)       transfers still hold memory that the caller must keep mapped

To a store a missing or a damaged block is none of these but a value (`GetOutcome.MISS`, `GetOutcome.CORRUPT`); to who
looks at that one block (`kvstore.inspect`) it is.
"""

from __future__ import annotations

__all__ = [
    "CapacityMismatchError",
    "ConfigurationError",
    "DamagedBlockError",
    "InvalidBlockError",
    "InvalidOptionError",
    "InvalidURLError",
    "KVStoreError",
    "KeyringError",
    "MissingDependencyError",
    "NewerFormatError",
    "NotAStoreError",
    "NotStoredError",
    "OlderFormatError",
    "ShutdownTimeout",
    "StoreAccessError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreFullError",
    "StoreNotFoundError",
    "StoreOpenError",
    "StoreSealedError",
    "TierUnavailable",
    "UnknownOptionError",
    "UnknownSchemeError",
]


class KVStoreError(Exception):
    """The root: whatever kvstore raises of its own is one of these."""


class ConfigurationError(KVStoreError, ValueError):
    """A URL or an option is wrong. The message names what is known and what to write instead."""


class InvalidURLError(ConfigurationError):
    """The text is not a tier URL, or its location makes no sense for its scheme."""


class UnknownSchemeError(ConfigurationError):
    """No backend answers to the URL's scheme."""


class UnknownOptionError(ConfigurationError):
    """The backend does not have an option of that name."""


class InvalidOptionError(ConfigurationError):
    """An option's value cannot be understood or is out of range."""


class MissingDependencyError(ConfigurationError, ImportError):
    """A backend needs a package that is not installed. The message has the `pip install` line."""


class StoreOpenError(KVStoreError, OSError):
    """The location cannot be used as a tier as it is. Nothing there was changed."""


class StoreNotFoundError(StoreOpenError):
    """Nothing is stored at the location, and it was opened read-only."""


class NotAStoreError(StoreOpenError):
    """The location holds something that kvstore did not write, and will not touch."""


class NewerFormatError(StoreOpenError):
    """The location was written in a format that this version of kvstore does not know."""


class OlderFormatError(StoreOpenError):
    """The location was written in a format from before version 1, which is not read any more: remove it."""


class CapacityMismatchError(StoreOpenError):
    """The tier has a capacity already and it is not the one that was asked for."""


class StoreAccessError(StoreOpenError):
    """Permissions, a read-only mount, or a file system that this backend cannot use."""


class StoreFullError(StoreOpenError):
    """Too little space, on the device or under the capacity, to hold even an empty tier."""


class StoreDamagedError(StoreOpenError):
    """The tier's own records are damaged beyond what opening may repair by itself."""


class StoreSealedError(StoreOpenError):
    """The tier is encrypted and was opened without a key or with another keyring, or it is not and was opened with."""


class KeyringError(StoreOpenError):
    """The keyring cannot be used: it is missing, damaged, wrapped by another operator's key, or cannot be written."""


class InvalidBlockError(KVStoreError, ValueError):
    """A block's size, digest length or group does not fit the namespace it is meant for."""


class NotStoredError(KVStoreError, LookupError):
    """What was to be looked at is not stored, or its name stands for several. The message lists what there is."""


class DamagedBlockError(KVStoreError, ValueError):
    """A stored block that was to be looked at fails its checks. It was left as it is."""


class TierUnavailable(KVStoreError, ConnectionError):  # noqa: N818 - a state of the tier, not a fault of the call
    """The store cannot tell at the moment: server down, time-out, device error."""


class StoreClosedError(KVStoreError, RuntimeError):
    """The store was closed, or belongs to the process that this one was forked from."""


class ShutdownTimeout(KVStoreError, TimeoutError):  # noqa: N818 - names what ended, as TimeoutError does
    """Transfers did not end in time and may still touch the primary tier: keep its memory mapped."""
