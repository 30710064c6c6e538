"""How a model is spread over the ranks: the order of the transforms, on one screen.

The decoder comes on the meta device, so that nothing is allocated before it is cut; it leaves on this rank's device,
its weights undefined and only this rank's part of them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.components.train.engines.recompute import recompute
from holdfast.components.train.engines.torch.context import SequenceShard, apply_context_parallel
from holdfast.components.train.engines.torch.elastic import TreeReduceScatter
from holdfast.components.train.engines.torch.expert import apply_expert_parallel
from holdfast.components.train.engines.torch.fp8 import convert_to_fp8
from holdfast.components.train.engines.torch.tensor import apply_tensor_parallel
from holdfast.components.train.grid import Grid
from holdfast.components.train.mesh import Mesh
from holdfast.model.decoder import Decoder
from holdfast.spec.training import Parallel, Training

# What forward and backward compute in, where it is not fp32.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The mesh as torch has it. A collective call."""
    return init_device_mesh(device.type, tuple(mesh.spread.values()), mesh_dim_names=tuple(mesh.spread))


def build_expert_mesh(mesh: Mesh, device: torch.device, experts: int) -> DeviceMesh | None:
    """That of experts which other ranks share than share the rest of their layers; None where there are none. A
    collective call."""
    if experts == 1 or mesh.expert * mesh.tensor == 1:
        return None
    return init_device_mesh(device.type, tuple(mesh.of_experts.values()), mesh_dim_names=tuple(mesh.of_experts))


def parallelize(
    decoder: Decoder,
    training: Training,
    parallel: Parallel,
    device: torch.device,
    mesh: Mesh,
    ranks: DeviceMesh | None,
    *,
    grid: Callable[[], Grid] | None,
    sequence_shard: SequenceShard | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """What computes the loss of one rank's micro-batch, or a stage of it; gradients of `decoder` are averaged over the
    ranks behind it that see other samples: those of `ranks` (see `device_mesh`) that hold parts of it, or without one
    all, which are whole replicas. On a `grid`, of the step that is computed, they are summed as elastic determinism
    wants it. `sequence_shard`: of every row. `expert_mesh`: see `build_expert_mesh`.

    0. Linear layers that multiply in fp8 take the places of others, and their parameters.
    1. Tensor parallelism cuts the matrices first, and expert parallelism deals the experts: all that follows must see
       what is left of them. Context parallelism changes how attention finds keys, and no weight.
    2. Activation checkpointing wraps a layer before it is compiled, so that the compiler sees what is computed twice.
    3. Compilation goes layer by layer, before sharding, so that no gathering of weights falls inside a graph; one layer
       compiled serves all of them.
    4. FSDP2 shards layer by layer and then the rest, on the meta device: each is gathered to be computed. Experts that
       were dealt are shared by fewer ranks than the rest of their layer, and come before it.
    5. Only now memory is allocated: this rank's part, where it lies with the host for good; tables are the device's.
    6. DDP averages over replicas that are plain and whole.
    """
    offloaded = parallel.offload != "none"
    convert_to_fp8(decoder, training.precision)
    if ranks is not None and mesh.tensor > 1:
        apply_tensor_parallel(decoder, ranks["tensor"])
    if sequence_shard is not None:
        apply_context_parallel(decoder, sequence_shard)
    layers = [layer for layer in decoder.model.layers if layer is not None]  # a stage of a pipeline has some
    for layer in layers:
        recompute(layer, training.activation_checkpointing)
        if training.compile:
            layer.compile()
    if ranks is not None:
        narrow = NARROW.get(training.precision)
        if expert_mesh is not None:
            _shard_experts(decoder, parallel, mesh, expert_mesh, narrow)
        settings: dict[str, Any] = {
            "mesh": ranks["replicas", "shards"] if mesh.replicas > 1 else ranks["shards"],
            "reshard_after_forward": _reshard(parallel)
            if mesh.shards > 1 or grid or offloaded
            else False,  # there is nothing to free
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=narrow, reduce_dtype=torch.float32
            ),  # sums of gradients: fp32
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if offloaded else OffloadPolicy(),
        }
        for layer in layers:
            fully_shard(layer, **settings)
        fully_shard(decoder, **settings)
        for module in decoder.modules():
            if grid and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(TreeReduceScatter(grid))  # type: ignore[arg-type]
    decoder.to_empty(device="cpu" if offloaded else device)
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    decoder.reset_buffers()
    if ranks is None and grid is None and mesh.replicas > 1:
        # The state is filled on every rank, and tables follow from the model: what differs is a mistake that a
        # comparison of the ranks is to find, so nothing is sent around, neither now nor at each forward pass.
        return DistributedDataParallel(
            decoder,
            bucket_cap_mb=parallel.bucket_mib,
            gradient_as_bucket_view=True,
            init_sync=False,
            forward_sync_buffers=False,
        )
    return decoder


def _shard_experts(
    decoder: Decoder, parallel: Parallel, mesh: Mesh, ranks: DeviceMesh, dtype: torch.dtype | None
) -> None:
    """Deal experts to ranks, and shard each rank's over those that have the same."""
    sizes = mesh.of_experts
    for experts in apply_expert_parallel(decoder, ranks["expert"], mesh.tensor):
        fully_shard(
            experts,
            mesh=ranks["replicas", "shards"] if sizes["replicas"] > 1 else ranks["shards"],
            reshard_after_forward=_reshard(parallel) if sizes["shards"] > 1 else False,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        )


def _reshard(parallel: Parallel) -> bool | None:
    """In FSDP2's words. None: all but what was computed last, which comes first in the backward pass."""
    return None if parallel.reshard == "always" else False
