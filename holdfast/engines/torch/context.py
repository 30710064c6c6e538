"""Context parallelism: each sequence is split over the ranks of a group, so that a long one fits.

Everything but attention processes one token at a time. In attention a rank has its queries and gathers the keys and
values of all ranks, which are few under grouped-query attention. Llama 3 was trained this way (Dubey et al. 2024,
section 3.3.2). Any mask works, and the sums of a query are those of one process. Gradients of keys and values are added
over the ranks in fp32.

A causal query costs as much as the keys before it, so a rank has one chunk of the sequence and its mirror image. Of
four chunks over two ranks, one rank has the first and the last, the other the second and the third.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case, as in the decoder
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from holdfast.engines.mesh import Mesh
from holdfast.model.decoder import Decoder, Mixture


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every sequence: chunk `rank` of 2 x `ranks` from its beginning, and the same from its end."""

    rank: int
    ranks: int
    positions: Tensor  # [T]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: Mesh, rank: int, length: int, device: torch.device) -> SequenceShard | None:
        """The part of sequences of `length` tokens, a multiple of twice the ranks. None without context parallelism.
        A collective call of all ranks."""
        if mesh.context == 1:
            return None
        group, _ = dist.new_subgroups_by_enumeration(mesh.context_groups())
        place = mesh.context_rank(rank)
        chunks = torch.arange(length, device=device).chunk(2 * mesh.context)
        return cls(place, mesh.context, torch.cat((chunks[place], chunks[-1 - place])), group)

    def of_each(self, rows_BS: Tensor) -> Tensor:
        """This rank's part of each row."""
        return rows_BS[:, self.positions]

    def add_up(self, counts: Tensor) -> Tensor:
        """Sum counts over all parts of the sequences. A collective call of their ranks."""
        counts = counts.clone()
        dist.all_reduce(counts, group=self.group)
        return counts


def apply_context_parallel(decoder: Decoder, sequence_shard: SequenceShard) -> None:
    """Make a decoder, or a stage of it, compute this part of every sequence. Each rank keeps all weights."""
    decoder.positions_T, decoder.add_up = sequence_shard.positions, sequence_shard.add_up
    for layer in decoder.model.layers:
        if layer is not None:
            attention: Any = layer.self_attn
            attention.attend = _Attention(sequence_shard, attention.grouped)
            if isinstance(layer.mlp, Mixture):
                layer.mlp.gate.cut(sequence_shard.ranks, sequence_shard.add_up)


class _Attention:
    """Attention of this rank's queries over the keys and values of whole sequences."""

    def __init__(self, sequence_shard: SequenceShard, grouped: bool) -> None:
        self._shard, self._grouped = sequence_shard, grouped

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
        """See `Attention.attend`."""
        sequence_shard = self._shard
        k_BGSK, v_BGSK = self._whole(torch.stack((k_BGTK, v_BGTK))).unbind()
        size = q_BHTK.shape[2] // 2
        outputs = []
        for index, chunk in enumerate((sequence_shard.rank, 2 * sequence_shard.ranks - 1 - sequence_shard.rank)):
            own, end = slice(index * size, (index + 1) * size), (chunk + 1) * size  # keys beyond `end` are masked
            if mask_B1TS is not None:
                mask = mask_B1TS[:, :, own, :end]
            elif q_BHTK.is_cuda:
                mask = causal_lower_right(size, end)  # for flash kernels, which take no mask
            else:
                mask = torch.ones(size, end, dtype=torch.bool, device=q_BHTK.device).tril(end - size)
            arguments = q_BHTK[:, :, own], k_BGSK[:, :, :end], v_BGSK[:, :, :end]
            outputs.append(F.scaled_dot_product_attention(*arguments, attn_mask=mask, enable_gqa=self._grouped))
        return torch.cat(outputs, dim=2)

    def _whole(self, own: Tensor) -> Tensor:
        """Gather [..., T, K] of all ranks, in sequence order: [..., S, K]."""
        chunks = _Gathered.apply(own.unflatten(-2, (2, -1)), self._shard.group)  # [ranks, ..., 2, T/2, K]
        first, mirrored = chunks.select(-3, 0), chunks.select(-3, 1).flip(0)
        return torch.cat((first, mirrored)).movedim(0, -3).flatten(-3, -2)


class _Gathered(torch.autograd.Function):
    """Gathers a tensor from every rank of a group along a new first dimension. Every rank contributes to the
    gradient of each rank's tensor."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather."""
        ctx.group = group
        gathered = own.new_empty(group.size(), *own.shape)
        dist.all_gather_single(gathered.view(-1), own.reshape(-1), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum over ranks, and give each rank its part."""
        (gradient,) = gradients
        precise = torch.promote_types(gradient.dtype, torch.float32)
        own = torch.empty(gradient.shape[1:], dtype=precise, device=gradient.device)
        dist.reduce_scatter_single(own.view(-1), gradient.to(precise).reshape(-1), group=ctx.group)
        return own.to(gradient.dtype), None
