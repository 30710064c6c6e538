"""Parallelization of a model over the ranks: all transforms, in order.

The decoder arrives on the meta device, so nothing is allocated before it is split. Afterwards this rank's part of it is
on this rank's device, with undefined weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.engines.grid import Grid
from holdfast.engines.mesh import Mesh
from holdfast.engines.recompute import recompute
from holdfast.engines.torch.context import SequenceShard, apply_context_parallel
from holdfast.engines.torch.elastic import TreeReduceScatter
from holdfast.engines.torch.expert import apply_expert_parallel
from holdfast.engines.torch.fp8 import convert_to_fp8
from holdfast.engines.torch.tensor import apply_tensor_parallel
from holdfast.model.decoder import Decoder
from holdfast.spec.parallel import Parallel
from holdfast.spec.training import Training

# What forward and backward compute in, if not fp32.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The mesh as torch's DeviceMesh. A collective call."""
    return init_device_mesh(device.type, tuple(mesh.spread.values()), mesh_dim_names=tuple(mesh.spread))


def build_expert_mesh(mesh: Mesh, device: torch.device, experts: int) -> DeviceMesh | None:
    """The mesh of experts, which are spread over other groups of ranks than the rest of their layers. None if the
    model has no such experts. A collective call."""
    if experts == 1 or mesh.expert * mesh.tensor == 1:
        return None
    return init_device_mesh(device.type, tuple(mesh.of_experts.values()), mesh_dim_names=tuple(mesh.of_experts))


@dataclass(frozen=True)
class Topology:
    """The ranks that a model is spread over, and the device of this one."""

    mesh: Mesh
    device: torch.device
    ranks: DeviceMesh | None = None  # see `device_mesh`; None: every rank holds the whole model
    experts: DeviceMesh | None = None  # see `build_expert_mesh`


def parallelize(
    decoder: Decoder,
    training: Training,
    parallel: Parallel,
    topology: Topology,
    *,
    grid: Callable[[], Grid] | None,
    sequence_shard: SequenceShard | None = None,
) -> nn.Module:
    """Spread `decoder` over the ranks. Returns the module that computes the loss of one rank's micro-batch, or a stage
    of it.

    Gradients are averaged over the ranks with other samples. These are the ranks of `topology.ranks` that hold parts,
    or all whole replicas if it is None. With `grid`, the grid of the current step, they are summed as elastic
    determinism requires. `sequence_shard` is this rank's part of every row.

    0. fp8 linear layers replace others and take their parameters.
    1. Tensor parallelism splits the matrices first, and expert parallelism distributes the experts. All later
       transforms must see the resulting parts. Context parallelism changes how attention finds keys, and no weight.
    2. Activation checkpointing wraps a layer before compilation, so that the compiler sees the recomputation.
    3. Compilation is per layer and before sharding, so no gathering of weights falls inside a graph. One compiled layer
       serves all layers.
    4. FSDP2 shards layer by layer and then the rest, on the meta device. Each is gathered to be computed. Distributed
       experts are shared by fewer ranks than the rest of their layer, and come before it.
    5. Only now is memory allocated: this rank's part, permanently on the host with offload. Tables are on the device.
    6. DDP averages over plain, whole replicas.
    """
    mesh, device, ranks = topology.mesh, topology.device, topology.ranks
    offloaded = parallel.offload != "none"
    convert_to_fp8(decoder, training.precision)
    if ranks is not None and mesh.tensor > 1:
        apply_tensor_parallel(decoder, ranks["tensor"])
    if sequence_shard is not None:
        apply_context_parallel(decoder, sequence_shard)
    layers = [layer for layer in decoder.model.layers if layer is not None]  # a pipeline stage has only some layers
    for layer in layers:
        recompute(layer, training.activation_checkpointing)
        if training.compile:
            layer.compile()
    if ranks is not None:
        narrow = NARROW.get(training.precision)
        if topology.experts is not None:
            _shard_experts(decoder, parallel, mesh, topology.experts, narrow)
        settings: dict[str, Any] = {
            "mesh": ranks["replicas", "shards"] if mesh.replicas > 1 else ranks["shards"],
            "reshard_after_forward": _reshard(parallel)
            if mesh.shards > 1 or grid or offloaded
            else False,  # nothing to free
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
        # Every rank fills its state, and tables follow from the model. A difference is a bug that the comparison of
        # ranks must find. So nothing is broadcast, neither now nor at each forward pass.
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
    """Distribute experts over ranks, and shard each rank's experts over the ranks that hold the same ones."""
    sizes = mesh.of_experts
    for experts in apply_expert_parallel(decoder, ranks["expert"], mesh.tensor):
        fully_shard(
            experts,
            mesh=ranks["replicas", "shards"] if sizes["replicas"] > 1 else ranks["shards"],
            reshard_after_forward=_reshard(parallel) if sizes["shards"] > 1 else False,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        )


def _reshard(parallel: Parallel) -> bool | None:
    """The `reshard_after_forward` of FSDP2. None reshards all but the last computed layers, which come first in the
    backward pass."""
    return None if parallel.reshard == "always" else False
