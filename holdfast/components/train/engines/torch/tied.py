"""Tied embeddings in a pipeline: the first stage looks tokens up in the matrix that the last one has as its head.

Each of the two holds a copy, cut alike, and has a gradient of its own use of it. Their sum is that of the one matrix:
made before anything reads it, on both alike, so that two equal copies stay equal (as in Megatron-LM, Narayanan et al.
2021). Two numbers have one sum in any order. To checkpoints, digests and the norm of gradients they are copies like
those of replicas: one of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from holdfast.components.train.engines.layout import TensorLayout, local
from holdfast.components.train.mesh import Mesh

TIED = "model.embed_tokens.weight"  # its canonical name in both stages


class TiedEnds:
    """What a rank of the first or the last stage has in common with the rank at its place in the other one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @classmethod
    def of(cls, mesh: Mesh, rank: int, tied: bool) -> TiedEnds | None:
        """That of `rank`; None in stages between, and where head and embedding are two matrices or in one stage. A
        collective call of all ranks."""
        if mesh.pipeline == 1 or not tied or not dist.is_initialized():
            return None
        group, _ = dist.new_subgroups_by_enumeration(mesh.ends())
        return cls(group) if mesh.place(rank) in (0, mesh.pipeline - 1) else None

    def add_up(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give both copies the sum of their gradients. A collective call of the two ranks."""
        for name, parameter in named:
            if name == TIED:
                assert parameter.grad is not None
                dist.all_reduce(local(parameter.grad), group=self._group)

    def layout_of(self, lying: TensorLayout) -> TensorLayout:
        """Where a tensor lies, of which a layout knows only its own stage."""
        return lying.copied_over(2, self._group.rank()) if self.has(lying.name) else lying

    @staticmethod
    def has(name: str) -> bool:
        """Whether both stages hold a tensor: the matrix, or what the optimizer keeps for it."""
        return name.endswith(TIED)
