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
from torch import Tensor

from holdfast.engines.mesh import Mesh
from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder
from holdfast.model.layers import Attention, Mixture


def positions_of(mesh: Mesh, rank: int, length: int) -> Tensor:
    """The positions [T] that a rank has of sequences of `length` tokens: all without context parallelism."""
    place, chunks = mesh.context_rank(rank), torch.arange(length).chunk(2 * mesh.context)
    return torch.cat((chunks[place], chunks[-1 - place]))


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every sequence: chunk `rank` of 2 x `ranks` from its beginning, and the same from its end."""

    rank: int
    ranks: int
    positions: Tensor  # [T]
    group: dist.ProcessGroup
    length: int  # of a whole sequence

    @classmethod
    def of(cls, mesh: Mesh, rank: int, length: int, device: torch.device) -> SequenceShard | None:
        """The part of sequences of `length` tokens, a multiple of twice the ranks. None without context parallelism.
        A collective call of all ranks."""
        if mesh.context == 1:
            return None
        group, _ = dist.new_subgroups_by_enumeration(mesh.context_groups())
        positions = positions_of(mesh, rank, length).to(device)
        return cls(mesh.context_rank(rank), mesh.context, positions, group, length)

    def of_each(self, rows_BS: Tensor) -> Tensor:
        """This rank's part of each row."""
        return rows_BS[:, self.positions]

    def whole(self, own_BT: Tensor) -> Tensor:
        """Values of all positions, from those of each rank. Each rank computes the same loss from them, and gets the
        gradient of its positions. A collective call of the ranks that share sequences."""
        whole_BS: Tensor = _Whole.apply(own_BT, self)
        return whole_BS

    def local_segments(self, segments: Segments) -> tuple[Segments, Segments]:
        """The segments of this rank's two chunks, of those of whole sequences."""
        return self._of_chunk(segments, self.rank), self._of_chunk(segments, 2 * self.ranks - 1 - self.rank)

    def _of_chunk(self, segments: Segments, chunk: int) -> Segments:
        """The queries of one chunk of every sequence, with all keys. A segment without queries has keys that this chunk
        does not see."""
        size = self.length // (2 * self.ranks)
        first, last = chunk * size, (chunk + 1) * size
        queries, keys = [0], [0]
        for start, count, _, _ in segments.each():
            row, begin = divmod(start, self.length)
            own = min(begin + count, last) - max(begin, first)
            if own > 0:
                if start > keys[-1]:
                    queries.append(queries[-1])
                    keys.append(start)
                queries.append(queries[-1] + own)
                keys.append(row * self.length + min(begin + count, last))
        if keys[-1] < segments.keys[-1]:
            queries.append(queries[-1])
            keys.append(segments.keys[-1])
        return Segments(tuple(queries), tuple(keys))

    def add_up(self, counts: Tensor) -> Tensor:
        """Sum counts over all parts of the sequences. A collective call of their ranks."""
        counts = counts.clone()
        dist.all_reduce(counts, group=self.group)
        return counts


def apply_context_parallel(decoder: Decoder, sequence_shard: SequenceShard) -> None:
    """Make a decoder, or a stage of it, compute this part of every sequence. Each rank keeps all weights."""
    decoder.positions_T, decoder.add_up = sequence_shard.positions, sequence_shard.add_up
    decoder.local_segments = sequence_shard.local_segments
    for layer in decoder.model.layers:
        if layer is not None:
            attention: Any = layer.self_attn
            attention.attend = _Attention(sequence_shard, attention)
            if isinstance(layer.mlp, Mixture):
                layer.mlp.gate.cut(sequence_shard.ranks, sequence_shard.add_up)


class _Attention:
    """Attention of this rank's queries over the keys and values of whole sequences."""

    def __init__(self, sequence_shard: SequenceShard, attention: Attention) -> None:
        self._shard, self._attention = sequence_shard, attention

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, segments: tuple[Segments, Segments]) -> Tensor:
        """See `Attention.attend`. `segments` are those of `SequenceShard.local_segments`."""
        layer, widths = self._attention, (k_BGTK.shape[-1], v_BGTV.shape[-1])
        k_BGSK, v_BGSV = self._whole(torch.cat((k_BGTK, v_BGTV), dim=-1)).split(widths, dim=-1)
        outputs = [
            packed_attention(q_part, k_BGSK, v_BGSV, part, layer.window, layer.local_sinks, layer.scale)
            for q_part, part in zip(q_BHTK.chunk(2, dim=2), segments, strict=True)
        ]
        return torch.cat(outputs, dim=2)

    def _whole(self, own: Tensor) -> Tensor:
        """Gather [..., T, K] of all ranks, in sequence order: [..., S, K]."""
        chunks = _Gathered.apply(own.unflatten(-2, (2, -1)), self._shard.group)  # [ranks, ..., 2, T/2, K]
        first, mirrored = chunks.select(-3, 0), chunks.select(-3, 1).flip(0)
        return torch.cat((first, mirrored)).movedim(0, -3).flatten(-3, -2)


class _Whole(torch.autograd.Function):
    """See `SequenceShard.whole`."""

    @staticmethod
    def forward(ctx: Any, own_BT: Tensor, shard: SequenceShard) -> Tensor:
        """Gather."""
        ctx.shard = shard
        parts = own_BT.new_empty(shard.ranks, *own_BT.shape)
        dist.all_gather_single(parts.view(-1), own_BT.reshape(-1), group=shard.group)
        first, mirrored = parts.chunk(2, dim=2)
        return torch.cat((*first.unbind(), *mirrored.flip(0).unbind()), dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of this rank's positions."""
        return ctx.shard.of_each(gradients[0]), None


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
