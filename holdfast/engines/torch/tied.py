"""Tied embeddings in a pipeline: the first stage looks tokens up in the matrix that is the last stage's head.

Both stages hold a copy with equal layout, and each computes the gradient of its use. The sum is the gradient of the one
matrix. It is computed before anything reads it, alike on both, so that equal copies stay equal (as in Megatron-LM,
Narayanan et al. 2021). Two numbers have the same sum in any order. For checkpoints, digests and the gradient norm they
are copies, like those of replicas: one of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from holdfast.engines.layout import TensorLayout, local
from holdfast.engines.mesh import Mesh

TIED = "model.embed_tokens.weight"  # its canonical name in both stages


class TiedEnds:
    """The link between a rank of the first or last stage and the rank at its position in the other one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @classmethod
    def of(cls, mesh: Mesh, rank: int, tied: bool) -> TiedEnds | None:
        """The link of `rank`. None in middle stages, and if head and embedding are two matrices or in one stage. A
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
        """The layout of a tensor over both stages, from its layout in its own stage."""
        return lying.copied_over(2, self._group.rank()) if self.has(lying.name) else lying

    @staticmethod
    def has(name: str) -> bool:
        """Whether both stages hold a tensor: the matrix, or its optimizer state."""
        return name.endswith(TIED)
