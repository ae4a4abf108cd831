"""Who is compared: vLLM by itself, its own filesystem tier, and kvstore, each in a folder of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONTESTANTS", "KVSTORE_FILE", "KVSTORE_LMDB", "NO_OFFLOADING", "VLLM_FS", "kvstore", "tiers_in"]

NO_OFFLOADING, VLLM_FS = "no offloading", "vLLM fs"
KVSTORE_FILE, KVSTORE_LMDB = "kvstore file", "kvstore lmdb"
CONTESTANTS = (NO_OFFLOADING, VLLM_FS, KVSTORE_FILE, KVSTORE_LMDB)


def tiers_in(folder: Path, contestant: str) -> list[dict[str, Any]] | None:
    """`secondary_tiers` of an engine whose blocks go below `folder`; None where nothing is offloaded."""
    return {
        NO_OFFLOADING: None,
        VLLM_FS: [{"type": "fs", "root_dir": str(folder)}],
        KVSTORE_FILE: [kvstore(f"file://{folder}/file")],
        KVSTORE_LMDB: [kvstore(f"lmdb://{folder}/lmdb")],
    }[contestant]


def kvstore(url: str, **options: Any) -> dict[str, Any]:
    """A kvstore tier as vLLM's configuration has it; by module, which needs no entry point."""
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": url, **options}
