"""Tensor parallelism: the matrices of the decoder cut over the ranks of a group, which compute one batch together.

Where no matrix is, the residual stream is cut along the sequence (sequence parallelism), so that a group computes norms
once, and keeps activations once. The vocabulary is cut as well, in the embedding, the head and the loss: no rank ever
holds the logits of the whole vocabulary. See Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast.components.model.decoder import Decoder

SEQUENCE = Shard(1)  # of [B, T, D]


def cut_matrices(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Cut every matrix over `mesh`, of one dimension; every parameter becomes a DTensor on it. The loss comes out as a
    DTensor, the same on all ranks."""
    normed = decoder.shape.query_key_norm
    for layer in decoder.model.layers:
        if layer is not None:
            _cut(layer, mesh, _layer_plan(normed))
    # Rows are tokens of the vocabulary in both, so that one matrix may be both. The head reads whole sequences.
    trunk = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": _WholeSequence(),
    }
    _cut(
        decoder.model, mesh, {name: style for name, style in trunk.items() if getattr(decoder.model, name) is not None}
    )
    if decoder.lm_head is not None:
        _cut(decoder, mesh, {"lm_head": ColwiseParallel(use_local_output=False)})


def _layer_plan(normed: bool) -> dict[str, ParallelStyle]:
    """Whole sequences go into attention and feed-forward. Each rank computes its own heads and its own columns of the
    feed-forward layer, and their sums are scattered along the sequence."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(SEQUENCE, None, None, None, None), desired_input_layouts=(whole, None, None, None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=SEQUENCE),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=SEQUENCE),
    }
    if normed:  # queries and keys, each head by itself: [B, T, H, K]
        plan |= {f"self_attn.{norm}": _of_own_heads() for norm in ("q_norm", "k_norm")}
    return plan


def _of_own_heads() -> ParallelStyle:
    """A norm whose weights are on every rank, and which each applies to its own heads."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


class _WholeSequence(SequenceParallel):
    """A norm computed in parts of the sequence, whose result is gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        gathered = PrepareModuleOutput(
            output_layouts=(SEQUENCE,), desired_output_layouts=(Replicate(),), use_local_output=False
        )
        return gathered._apply(module, device_mesh)


def _cut(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)  # on meta: there is nothing to scatter
