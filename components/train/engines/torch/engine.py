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
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.components.checkpoint import TensorBox
from holdfast.components.model.decoder import Decoder
from holdfast.components.spec.training import Optimizer
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.device import local_device
from holdfast.components.train.engine import StepOutput
from holdfast.components.train.engines.layout import TensorLayout, share_out
from holdfast.components.train.engines.loss import counted_tokens, micro_batches
from holdfast.components.train.engines.torch.parallelize import parallelize
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
        self._autocast_bf16 = spec.training.precision == "bf16" and not self._sharded  # FSDP2 casts by its own policy

        with torch.device("meta"):
            self._decoder = Decoder(spec.model, vocabulary)
        self._forward = parallelize(
            self._decoder, spec.training, self._device, sharded=self._sharded, world=self._world
        )
        self._optimizer = _adamw(self._decoder, spec.training.optimizer)
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
        return StepOutput(loss, norm)

    def boxes(self) -> list[TensorBox]:
        """See Engine: the living weights and moments themselves."""
        boxes = []
        for name, parameter in self._decoder.named_parameters():
            lying, state = TensorLayout.of(name, parameter), self._optimizer.state[parameter]
            boxes.append(lying.box(parameter))
            boxes += [lying.named(prefix).box(state[key]) for key, prefix in MOMENTS.items()]
        return boxes

    def restored(self, step: int) -> None:
        """See Engine."""
        for state in self._optimizer.state.values():
            state["step"].fill_(float(step))

    def saved(self) -> Sequence[TensorBox]:
        """See Engine."""
        return self.boxes() if self._sharded else share_out(self.boxes(), self._rank, self._world)

    def replicas(self) -> Sequence[TensorBox]:
        """See Engine."""
        return [] if self._sharded or self._world == 1 else self.boxes()

    def _forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over all counted tokens of the global batch; that loss."""
        rows = rows.to(self._device, non_blocking=True)
        counted = counted_tokens(rows)
        share = self._world / counted  # what averages gradients over the ranks divides by their number again
        total = torch.zeros((), device=self._device)
        left = -(-len(rows) // self._spec.training.micro_batch)
        for tokens, targets, documents in micro_batches(rows, self._spec.training.micro_batch, self._end_of_text):
            left -= 1
            with self._synchronised(last=left == 0):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast_bf16):
                    loss = self._forward(tokens, targets, documents, reduction="sum")
                (loss * share).backward()
            total += loss.detach()
        if self._world > 1:
            dist.all_reduce(total)
        return total / counted

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """DDP holds whole gradients anyway, and reduces them over the ranks once, in the last micro-batch. FSDP2 adds
        each micro-batch to its own shard of the gradient: it never holds more of it than a layer."""
        if isinstance(self._forward, DistributedDataParallel) and not last:
            return self._forward.no_sync()
        return nullcontext()

    def _clip(self) -> torch.Tensor:
        limit = self._spec.training.clip_norm
        norm = nn.utils.clip_grad_norm_(self._decoder.parameters(), float("inf") if limit is None else limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

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


def _adamw(decoder: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, its state there from the start so that a checkpoint always has every name."""
    optimizer = torch.optim.AdamW(
        decay_groups(decoder, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in decoder.parameters():
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | {
            key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS
        }
    return optimizer


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, norms do not."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
