"""The torch engine: one process, DDP or FSDP2, with AdamW, all in torch's own parts.

Master weights and moments are fp32 at every precision. Sums are in a fixed order for a fixed layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from holdfast.components.checkpoint import TensorBox
from holdfast.components.model.decoder import Decoder, document_ids
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.device import local_device
from holdfast.components.train.engine import Fill, StepOutput
from holdfast.components.train.weights import MOMENTS


class TorchEngine:
    """See `Engine`."""

    def __init__(self, spec: Assignment, vocabulary: int, end_of_text: int) -> None:
        self._spec = spec
        self._device = local_device(spec.accelerator)
        self._end_of_text = end_of_text if spec.document_masks else None
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._sharded = spec.parallel.strategy == "fsdp" and self._world > 1
        self._bf16 = spec.training.precision == "bf16"

        self._decoder = Decoder.empty(spec.model, vocabulary, self._device)
        self._forward: nn.Module = self._decoder
        if self._sharded:
            _shard(self._decoder, self._bf16)
        if spec.training.compile:
            self._decoder.compile()
        if self._world > 1 and not self._sharded:
            self._forward = DistributedDataParallel(self._decoder, gradient_as_bucket_view=True)
        self._optimizer = _adamw(self._decoder, spec)
        self._warm_up(vocabulary)

    @property
    def layout(self) -> dict[str, Any]:
        """See Engine."""
        return {"engine": "torch", "strategy": self._spec.parallel.strategy, "world_size": self._world}

    def step(self, rows: torch.Tensor, learning_rate: float) -> StepOutput:
        """See Engine."""
        loss = self._forward_backward(rows)
        norm = self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._world > 1:
            dist.all_reduce(loss)
            loss /= self._world
        return StepOutput(loss, norm)

    def load(self, fill: Fill) -> None:
        """See Engine."""
        step = fill(self._boxes())
        for state in self._optimizer.state.values():
            state["step"].fill_(float(step))

    def saved(self) -> Sequence[TensorBox]:
        """See Engine."""
        boxes = self._boxes()
        return boxes if self._sharded else share_out(boxes, self._rank, self._world)

    def _forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over all micro-batches; this rank's mean loss."""
        micro_batches = rows.to(self._device, non_blocking=True).split(self._spec.training.micro_batch)
        total = torch.zeros((), device=self._device)
        for index, micro_batch in enumerate(micro_batches):
            tokens, targets = micro_batch[:, :-1], micro_batch[:, 1:]
            documents = None if self._end_of_text is None else document_ids(tokens, self._end_of_text)
            with self._synchronised(index == len(micro_batches) - 1):
                with self._autocast():
                    loss = self._forward(tokens, targets, documents) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        return total

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over the ranks in the last micro-batch only."""
        if isinstance(self._forward, DistributedDataParallel):
            return nullcontext() if last else self._forward.no_sync()
        if isinstance(self._decoder, FSDPModule):
            self._decoder.set_requires_gradient_sync(last)
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        if self._bf16 and not self._sharded:  # FSDP2 casts by its own policy
            return torch.autocast(self._device.type, torch.bfloat16)
        return nullcontext()

    def _clip(self) -> torch.Tensor:
        limit = self._spec.training.clip_norm
        norm = nn.utils.clip_grad_norm_(self._decoder.parameters(), float("inf") if limit is None else limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _boxes(self) -> list[TensorBox]:
        """This rank's part of every weight and moment, under its canonical name."""
        boxes = []
        for name, parameter in self._decoder.named_parameters():
            state = self._optimizer.state[parameter]
            boxes.append(_box(name, parameter))
            boxes += [_box(moment + name, state[moment.split(".")[1]]) for moment in MOMENTS]
        return boxes

    def _warm_up(self, vocabulary: int) -> None:
        """One forward and backward pass on made-up tokens: compile errors and lack of memory show now, and DDP settles
        its buckets, so that every attempt sums in the same order from its first step."""
        with torch.no_grad():
            for parameter in self._decoder.parameters():
                parameter.zero_()
        rows = torch.arange(self._spec.training.micro_batch * (self._spec.model.context + 1)) % vocabulary
        for _ in range(2 if self._world > 1 else 1):
            self._forward_backward(rows.view(self._spec.training.micro_batch, -1))
            self._optimizer.zero_grad(set_to_none=True)


def _shard(decoder: Decoder, bf16: bool) -> None:
    """FSDP2: each layer is gathered for its own computation; gradients are summed in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for layer in decoder.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(decoder, mp_policy=policy)


def _adamw(decoder: nn.Module, spec: Assignment) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, its state there from the start so that a checkpoint always has every name."""
    settings = spec.training.optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(decoder, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in decoder.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, norms do not."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def share_out(boxes: Sequence[TensorBox], rank: int, world: int) -> list[TensorBox]:
    """This rank's share of boxes that every rank holds whole: largest first, each to the rank with least to write."""
    loads = [0] * world
    mine = []
    for box in sorted(boxes, key=lambda box: (-box.data.numel(), box.name)):
        owner = loads.index(min(loads))
        loads[owner] += box.data.numel()
        if owner == rank:
            mine.append(box)
    return mine


def _box(name: str, tensor: torch.Tensor) -> TensorBox:
    if not isinstance(tensor, DTensor):
        return TensorBox.whole(name, tensor.detach())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorBox(name, tuple(tensor.shape), tuple(offset), tensor.to_local().detach())
