"""The golden fixtures as open stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from golden_contents import operator_key_in

from kvstore import BlockRead, BlockStore, Capabilities, GetOutcome, open_store
from kvstore.keyvalue import KeyValueStore
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from golden_contents import GoldenBlock

__all__ = ["GOLDEN", "KEYRING", "ValueStore", "encrypted", "got", "opened"]

GOLDEN = Path(__file__).parent / "v1"
KEYRING = "keyring.json"


class ValueStore(KeyValueStore):
    """Values in a dictionary: what a Redis server would hold."""

    capabilities = Capabilities(persistent=False, shared=False, can_hang=False, io="memory")

    def __init__(self, values: dict[str, bytes], **options: object) -> None:
        self.values = values
        super().__init__(TierURL.parse("values://golden", **options).validated(self.options))

    def connect(self) -> None:
        pass

    def write(self, name: str, parts: Sequence[memoryview]) -> bool:
        return self.values.setdefault(name, value := b"".join(parts)) is value

    def read(self, name: str, nbytes: int) -> bytes | None:
        value = self.values.get(name)
        return None if value is None else value[:nbytes]

    def remove(self, name: str) -> bool:
        return self.values.pop(name, None) is not None

    def names(self, prefix: str) -> Iterable[str]:
        return [name for name in self.values if name.startswith(prefix)]


def encrypted(root: Path, folder: Path) -> dict[str, str]:
    """The options of an encrypted tier whose keyring is in `root`; the operator's key is put into `folder`."""
    return {"encryption": f"file:{operator_key_in(folder)}", "keyring": str(root / KEYRING)}


def opened(name: str, root: Path, **options: Any) -> BlockStore:
    """The fixture of that name, below a copy."""
    if name.endswith("-sealed"):
        options |= encrypted(root, root.parent)
    if name.startswith("values"):
        values = {one: bytes.fromhex(text) for one, text in json.loads((root / f"{name}.json").read_text()).items()}
        return ValueStore(values, **options)
    if name == "objects":
        options["remote"] = True
    return open_store(f"{'lmdb' if name.startswith('lmdb') else 'file'}://{root}/{name}", **options)


def got(store: BlockStore, blocks: Sequence[GoldenBlock]) -> list[GetOutcome]:
    """Outcomes, once it is sure that what was found is what it should be."""
    outcomes: list[GetOutcome] = []
    for block in blocks:
        into = np.zeros(block.content.nbytes, np.uint8)
        outcomes += store.get_many_into(block.namespace, [BlockRead(block.key, into)])
        assert outcomes[-1] is not GetOutcome.HIT or into.tobytes() == block.content.tobytes()
    return outcomes
