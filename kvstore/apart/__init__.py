"""A store in a process of its own: what moves its bytes wants no GIL of the process that asks for them.

A scheduler is one thread of Python that wants the GIL all the time. Transfer threads beside it want it at each of their
steps: the scheduler's step is kept waiting, and so are they. Here both have a process, and meet in a message for each
call and in memory that both have mapped; no payload goes through a socket.

Where to look:

    store.py     `StoreApart`: a `BlockStore` whose verbs are messages
    link.py      its owner: it is started, asked, listened to, started again
    process.py   the process itself
    serving.py   what runs in it
    messages.py  what goes to and fro
    memory.py    memory that two processes can have mapped, and where it lies in each

`kvstore.tiering.pool_apart` hands it the jobs of a tier without a thread for each.
"""

from kvstore.apart.memory import is_shareable, shared_memory
from kvstore.apart.store import StoreApart

__all__ = ["StoreApart", "is_shareable", "shared_memory"]
