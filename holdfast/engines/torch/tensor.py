"""Tensor parallelism: the decoder's matrices are split over a group of ranks that compute one batch together.

Outside the matrices, the residual stream is split along the sequence (sequence parallelism), so a group computes norms
once and keeps activations once. The vocabulary is split too, in the embedding, the head and the loss. No rank ever
holds the logits of the whole vocabulary. See Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022).

Experts stay whole. Each rank sends the tokens of its sequence shard to them, and the ranks of a group share them as
shards (`expert`). Experts have few columns, and one rank's columns would not be a run of the matrix's rows.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast.model.decoder import Decoder
from holdfast.model.experts import Router
from holdfast.model.layers import LatentAttention, Layer, Mixture, WholeNorm
from holdfast.model.lora import FrozenLinear, frozen_product
from holdfast.model.token_logprobs import Likeliest, likeliest_tokens, token_logprobs

SEQUENCE = Shard(1)  # of [B, T, D]


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Split every matrix over `mesh`, which has one dimension. Every parameter becomes a DTensor on it. The loss is
    the same on all ranks."""
    for layer in decoder.model.layers:
        if layer is not None:
            assert isinstance(layer, Layer)
            mixture = layer.mlp if isinstance(layer.mlp, Mixture) else None
            plan = _attention_plan(layer)
            plan |= _feed_forward_plan("mlp") if mixture is None else _mixture_plan(mixture)
            _cut(layer, mesh, plan)
            sinks = layer.self_attn.sinks
            if sinks is not None:  # of this rank's heads
                own = distribute_tensor(sinks, mesh, [Shard(0)], src_data_rank=None)
                layer.self_attn.sinks = nn.Parameter(own, requires_grad=sinks.requires_grad)
            if isinstance(layer.self_attn, LatentAttention):
                layer.self_attn.share = lambda keys: _Share.apply(keys, mesh)
            if mixture is not None:
                mixture.gate.cut(mesh.size(), lambda counts: _added_up(counts, mesh))
    decoder.logprobs = partial(_shard_logprobs, decoder, mesh)  # type: ignore[method-assign]
    decoder.likeliest = partial(_shard_likeliest, decoder, mesh)  # type: ignore[method-assign]
    if decoder.score is not None:
        _distribute(decoder.score, mesh, Replicate())
        decoder.rewards = partial(_whole_rewards, decoder)  # type: ignore[method-assign]
    # Rows are vocabulary tokens in both, so that one matrix can serve as both. The head reads whole sequences.
    trunk = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": _WholeSequence(),
    }
    _cut(
        decoder.model, mesh, {name: style for name, style in trunk.items() if getattr(decoder.model, name) is not None}
    )
    if decoder.lm_head is not None:
        _cut(decoder, mesh, {"lm_head": ColwiseParallel(use_local_output=False)})


def _attention_plan(layer: Layer) -> dict[str, ParallelStyle]:
    """Attention receives whole sequences. Each rank computes its own heads, and their sums are scattered along the
    sequence."""
    replicated = Replicate()
    latent = isinstance(layer.self_attn, LatentAttention)
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(SEQUENCE, None, None, None, None),
            desired_input_layouts=(replicated, None, None, None, None),
            use_local_output=latent,
        ),
        "self_attn.o_proj": _ByColumns(output_layouts=SEQUENCE),
    }
    split = ("q_proj", "q_b_proj", "kv_b_proj") if latent else ("q_proj", "k_proj", "v_proj")
    alike = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    for name, _ in layer.self_attn.named_children():
        if name in split:
            plan[f"self_attn.{name}"] = _ByRows()
        elif name in alike:
            plan[f"self_attn.{name}"] = _Alike()
    norms = [name for name, part in layer.named_children() if isinstance(part, nn.RMSNorm)]
    after = layer.post_feedforward_layernorm is not None  # then these two are added to the residual stream
    local = ("post_attention_layernorm", "post_feedforward_layernorm") if after else ()
    plan |= {name: SequenceParallel(use_local_output=name in local) for name in norms}
    norm = layer.self_attn.q_norm
    if norm is not None:  # queries and keys, each head separately, [B, T, H, K], or the whole width, [B, T, D]
        own_heads = _OfWholeWidth if isinstance(norm, WholeNorm) else _of_own_heads
        plan |= {f"self_attn.{norm}": own_heads() for norm in ("q_norm", "k_norm")}
    return plan


def _feed_forward_plan(name: str) -> dict[str, ParallelStyle]:
    """A plan that splits a feed-forward layer's columns over ranks."""
    return {
        name: PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        f"{name}.gate_proj": _ByRows(),
        f"{name}.up_proj": _ByRows(),
        f"{name}.down_proj": _ByColumns(output_layouts=SEQUENCE),
    }


def _mixture_plan(mixture: Mixture) -> dict[str, ParallelStyle]:
    """Each rank routes the tokens of its sequence shard. Shared experts are split like a feed-forward layer."""
    parts = PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(SEQUENCE,), use_local_output=True)
    plan: dict[str, ParallelStyle] = {"mlp": parts, "mlp.gate": _OfParts()}
    for name in ("shared_experts", "shared_expert"):
        if getattr(mixture, name) is not None:
            plan |= _feed_forward_plan(f"mlp.{name}")
    if mixture.shared_expert_gate is not None:
        plan["mlp.shared_expert_gate"] = _OfParts()
    return plan


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Spread the own parameters of a module over `mesh`, and the codes and scales of a matrix in NF4. Nothing is sent:
    the modules are on meta."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = Replicate() if name == "bias" and placement == Shard(1) else placement
        spread = distribute_tensor(parameter, mesh, [whole], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    if isinstance(module, FrozenLinear) and module.stored == "nf4":
        for name, buffer in list(module.named_buffers(recurse=False)):
            spread = distribute_tensor(buffer, mesh, [placement], src_data_rank=None)
            module.register_buffer(name, spread, persistent=False)
        module.product = partial(_product_of_part, mesh, placement)


def _product_of_part(mesh: DeviceMesh, placement: Placement, x: Tensor, *stored: Tensor) -> Tensor:
    """See `frozen_product`, for the rows or columns of a matrix on this rank. Their borders are borders of blocks."""
    assert isinstance(x, DTensor)
    of_rows = placement == Shard(0)
    columns = Shard(x.dim() - 1)
    part = x.to_local(grad_placements=[Partial() if of_rows else columns])
    result = frozen_product(part, *map(_local, stored))
    return DTensor.from_local(result, mesh, [columns if of_rows else Partial()], run_check=False)


class _ByRows(ColwiseParallel):
    """A matrix of which each rank has some rows, so it computes some columns of the result. Of an adapter every rank
    has the first matrix whole, and some rows of the second."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, Replicate() if name == "lora_A" else Shard(0))


class _ByColumns(RowwiseParallel):
    """A matrix of which each rank has some columns, so the results of the ranks are added up. Of an adapter each rank
    has some columns of the first matrix, and the second one whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, Replicate() if name == "lora_B" else Shard(1))


class _OfParts(ParallelStyle):
    """A matrix that every rank holds whole and applies to its sequence shard, as plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before = module.get_parameter("weight")
        weight = distribute_tensor(before, device_mesh, [Replicate()], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=before.requires_grad))
        if isinstance(module, Router):
            module.project = _project
            if module.bias is not None:
                bias = distribute_tensor(module.bias, device_mesh, [Replicate()], src_data_rank=None)
                module.register_parameter("bias", nn.Parameter(bias, requires_grad=module.bias.requires_grad))
                module.whole = _of_own_tokens
        else:
            module.forward = lambda x: _project(x, module.get_parameter("weight"))
        return module


class _Alike(ParallelStyle):
    """A matrix or norm of latents, which every rank computes alike for whole sequences. `ColwiseParallel` adds up the
    gradients of its result, so the gradient of its weights is whole on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, FrozenLinear) and module.stored == "nf4":
            return module  # codes and scales are plain tensors
        before = module.get_parameter("weight")
        weight = distribute_tensor(before, device_mesh, [Replicate()], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=before.requires_grad))
        if isinstance(module, nn.RMSNorm):
            shape, eps = module.normalized_shape, module.eps
            module.forward = lambda x: F.rms_norm(x, shape, _local(module.get_parameter("weight")), eps)  # type: ignore[method-assign]
        else:
            module.forward = lambda x: F.linear(x, _local(module.get_parameter("weight")).to(x.dtype))
        return module


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class _Share(torch.autograd.Function):
    """A value that all ranks have and each uses for its heads. Its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """The same values."""
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients."""
        return _added_up(gradients[0], ctx.mesh), None


def _project(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, _of_own_tokens(weight))


def _of_own_tokens(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Partial()])  # each rank's tokens give a part of its gradient


def _shard_logprobs(decoder: Decoder, mesh: DeviceMesh, x: Tensor, targets: Tensor) -> Tensor:
    """See `Decoder.logprobs`."""
    first = _first_token(decoder, mesh)
    inputs = _local(x), _local(decoder.head_weight)
    return token_logprobs(*inputs, targets, chunk=decoder.loss_chunk, group=mesh.get_group(), first_token=first)


def _shard_likeliest(decoder: Decoder, mesh: DeviceMesh, x: Tensor, count: int) -> Likeliest:
    """See `Decoder.likeliest`."""
    first = _first_token(decoder, mesh)
    inputs = _local(x), _local(decoder.head_weight)
    return likeliest_tokens(*inputs, count, decoder.loss_chunk, group=mesh.get_group(), first_token=first)


def _first_token(decoder: Decoder, mesh: DeviceMesh) -> int:
    """The first row of the head on this rank. Each rank has consecutive rows, and all of them have equal numbers of
    rows but the last one."""
    return mesh.get_local_rank() * -(-len(decoder.head_weight) // mesh.size())


def _whole_rewards(decoder: Decoder, x: Tensor) -> Tensor:
    """See `Decoder.rewards`. Every rank computes all of them."""
    assert decoder.score is not None
    return F.linear(_local(x), _local(decoder.score.weight))[..., 0].float().clone()


def _added_up(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    counts = counts.clone()
    dist.all_reduce(counts, group=mesh.get_group())
    return counts


def _of_own_heads() -> ParallelStyle:
    """A norm with its weights on every rank. Each rank applies it to its own heads."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


class _OfWholeWidth(ParallelStyle):
    """A norm over the whole width. Each rank has the weights of its part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, WholeNorm)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=module.weight.requires_grad))
        module.add_up = lambda part: _Sum.apply(part, device_mesh)
        return module


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank uses it for its own part of the width, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        """Add up."""
        ctx.mesh = mesh
        return _added_up(part, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients."""
        return _added_up(gradients[0], ctx.mesh), None


class _WholeSequence(SequenceParallel):
    """A norm that is computed on sequence shards. Its result is gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        style = PrepareModuleOutput(
            output_layouts=(SEQUENCE,), desired_output_layouts=(Replicate(),), use_local_output=False
        )
        return style._apply(module, device_mesh)


def _cut(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    parallelize_module(module, mesh, plan, src_data_rank=None)  # on meta: nothing to scatter
    for name, parameter in module.named_parameters():
        if name in frozen:  # torch's styles make trained parameters
            parameter.requires_grad_(False)
