"""Any store of names and values as a backend: a few hooks for one value each, and `KeyValueStore` is the rest.

A stranger's key-value store (a folder, SQLite, Redis, RocksDB) is subclassed from `KeyValueStore` in about 40 lines;
`backends/README.md` has one in full. The built-in backends are not: what they do for speed and capacity (direct I/O,
one transaction for a batch, an order of use over processes) needs the whole contract, `kvstore.abc`.

Where to look:

    hooks.py      what a subclass overrides, and what is asked through that in the same words whoever answers
    store.py      the verbs of the contract, on top of the hooks
    books.py      values that are of no block: version, seal, manifests
    heads.py      blocks by the first bytes of their values: what they are, whether they have expired
    purging.py    blocks that are not to come back, also those that no manifest names

What a name and a value look like is `kvstore.values`.
"""

from kvstore.keyvalue.store import KeyValueStore

__all__ = ["KeyValueStore"]
