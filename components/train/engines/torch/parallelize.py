"""How a model is spread over the ranks: the order of the transforms, on one screen.

The decoder comes on the meta device, so that nothing is allocated before it is cut; it leaves on this rank's device,
its weights undefined and only this rank's part of them there.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.components.model.decoder import Decoder
from holdfast.components.spec.training import Training


def parallelize(decoder: Decoder, training: Training, device: torch.device, *, sharded: bool, world: int) -> nn.Module:
    """What computes the loss of one rank's micro-batch; gradients of `decoder` are averaged over the ranks behind it.

    1. Tensor parallelism would cut the matrices first, because all that follows must see the cut ones (refused yet).
    2. Activation checkpointing wraps a layer before it is compiled, so that the compiler sees what is computed twice
       (refused yet).
    3. Compilation goes layer by layer, before sharding, so that no gathering of weights falls inside a graph; one layer
       compiled serves all of them.
    4. FSDP2 shards layer by layer and then the rest, on the meta device: each is gathered to be computed.
    5. Only now memory is allocated: this rank's part. 6. DDP copies what is whole on every rank.
    """
    if training.compile:
        for layer in decoder.model.layers:
            layer.compile()
    if sharded:
        bf16 = torch.bfloat16 if training.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)  # gradients are summed in fp32
        for layer in decoder.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(decoder, mp_policy=policy)
    decoder.to_empty(device=device)
    decoder.reset_buffers()
    if world > 1 and not sharded:
        return DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    return decoder
