"""Who holds what of a block when an engine spreads a model over ranks: shards as views of the canonical block.

A block is stored as if there were one rank. Each rank writes and reads its own part of it, a strided view without a
copy, so the parts of four ranks are one block, and two ranks, or one, read it. Nothing here moves bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.layout import BlockLayout

__all__ = ["Shards"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The parts of one KV-cache group's block that `ranks` ranks hold.

    - `tensor`: tensor-parallel size. The axis `head` is split evenly; with fewer heads than ranks each head is held by
      `replicas` consecutive ranks. A layout with an axis `latent` and no heads (MLA) is held whole by all of them.
    - `stages`: the group's layers per pipeline stage, in order; empty for one stage. A stage may have none.

    Ranks are numbered as in vLLM, stage by stage: rank = stage * tensor + tensor rank. So is the rule for heads
    (vLLM, `QKVParallelLinear`): `heads` divides `tensor`, or `tensor` divides `heads`.

    Raises `ValueError` when the layout cannot be split like that. An engine whose layout is opaque to kvstore gives
    each rank a namespace of its own (topology and rank in `Namespace.extra`): a shard must not pass for the whole.
    """

    layout: BlockLayout
    tensor: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise ValueError(f"a tensor-parallel size of {self.tensor}: there is at least one rank")
        heads = self._extent("head")
        if heads and heads % self.tensor and self.tensor % heads:
            raise ValueError(f"{heads} KV heads cannot be spread over {self.tensor} ranks: neither divides the other")
        if self.tensor > 1 and not heads and not self._extent("latent"):
            raise ValueError(
                f"a block of axes {self.layout.axes} has neither heads to split nor a latent that every rank holds:"
                " give each rank a namespace of its own"
            )
        if self.stages and (min(self.stages) < 0 or sum(self.stages) != self._extent("layer")):
            raise ValueError(
                f"stages of {self.stages} layers do not add up to the {self._extent('layer')} layers of the block"
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are: tensor-parallel size times pipeline stages."""
        return self.tensor * max(1, len(self.stages))

    @property
    def replicas(self) -> int:
        """How many ranks of a stage hold the same part."""
        heads = self._extent("head")
        return max(1, self.tensor // heads) if heads else self.tensor

    @property
    def writers(self) -> frozenset[int]:
        """The ranks that write: the first of each set of replicas. Together their parts are the block, each byte once.

        The others must not write: what they computed may differ in the last bit, and the block may be on its way
        to a tier by then.
        """
        return frozenset(
            rank
            for rank in range(self.ranks)
            if rank % self.tensor % self.replicas == 0 and (not self.stages or self.stages[rank // self.tensor])
        )

    def index(self, rank: int) -> tuple[slice, ...]:
        """Where `rank`'s part stands in an array or tensor of the layout's shape: one slice per axis."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank}: there are ranks 0 to {self.ranks - 1}")
        stage, tensor_rank = divmod(rank, self.tensor)
        parts = {"head": self._heads(tensor_rank), "layer": self._layers(stage)}
        return tuple(
            parts.get(axis, slice(0, extent)) for axis, extent in zip(self.layout.axes, self.layout.shape, strict=True)
        )

    def to_numpy(self, block: Buffer, rank: int) -> NDArray[Any]:
        """`rank`'s part of `block`, sharing its memory; writable if the buffer is. Errors as `BlockLayout.to_numpy`."""
        return self.layout.to_numpy(block)[self.index(rank)]

    def to_torch(self, block: Buffer, rank: int) -> torch.Tensor:
        """`rank`'s part of `block` as a CPU tensor that shares its memory. Errors as `BlockLayout.to_torch`."""
        return self.layout.to_torch(block)[self.index(rank)]

    def _heads(self, tensor_rank: int) -> slice:
        width = max(1, self._extent("head") // self.tensor)
        first = tensor_rank // self.replicas * width
        return slice(first, first + width)

    def _layers(self, stage: int) -> slice:
        first = sum(self.stages[:stage])
        return slice(first, first + self.stages[stage]) if self.stages else slice(0, self._extent("layer"))

    def _extent(self, axis: str) -> int:
        """Elements along `axis`; 0 where the layout has no such axis."""
        return dict(zip(self.layout.axes, self.layout.shape, strict=True)).get(axis, 0)
