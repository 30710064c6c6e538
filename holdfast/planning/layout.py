"""A layout: how one step is spread over accelerators, and what is stored and computed again on each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
# What the ranks of a data-parallel group hold one part of each: nothing, the optimizer's state, or everything.
Sharding = Literal["none", "optimizer", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
# What lies in the host's memory: nothing, the optimizer's state, weights and gradients as well; or weights on a disk.
Offload = Literal["none", "optimizer", "parameters", "parameters_on_disk"]


@dataclass(frozen=True)
class State:
    """Bytes that a parameter takes in training."""

    weights: int = 4
    gradients: int = 4
    optimizer: int = 8


HOLDFAST = State()  # what the engines here keep: fp32 weights, gradients and two moments
MEGATRON = State(weights=2, gradients=4, optimizer=12)  # bf16 weights beside fp32 ones, gradients and moments


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and how a rank goes about its micro-batches. Expert-parallel ranks are those of a stage,
    all of which see other tokens: they hold other experts."""

    data: int = 1  # ranks that see other samples, sharded or not
    shard: int = 1  # of those, how many share one copy of what `sharding` says
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    sharding: Sharding = "none"
    checkpointing: Checkpointing = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1  # model chunks on a stage, of the interleaved schedule
    offload: Offload = "none"
    on_disk: bool = False  # what the optimizer keeps of it lies on a disk of the node, and not in the host's memory

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights that were gathered for a forward pass are kept: halves of a backward pass both need them."""
        return self.sharding == "full" and self.schedule == "zero_bubble"

    @property
    def ranks(self) -> int:
        """Accelerators."""
        return self.data * self.tensor * self.pipeline * self.context

    def expert_shards(self, whole: int) -> int:
        """Ranks that share one copy of their experts, where `whole` share one of the rest: those of a tensor-parallel
        group do as well, as experts are not cut, and those that have other experts do not."""
        return max(1, whole * self.tensor // self.expert)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a rank in one step."""
        return max(1, global_batch // (self.data * self.micro_batch))

    def with_(self, **changes: object) -> Layout:
        """The same with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sharded = {"none": "data", "optimizer": "zero1", "full": "fsdp"}[self.sharding]
        parts = [f"{sharded} {self.data}"]
        if self.sharding != "none" and self.shard != self.data:
            parts[0] += f" (by {self.shard})"
        for name in ("tensor", "pipeline", "context", "expert"):
            if (degree := getattr(self, name)) > 1:
                parts.append(f"{name} {degree}")
        if self.pipeline > 1:
            parts.append(f"{self.schedule}{f' x{self.chunks}' if self.chunks > 1 else ''}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.offload != "none":
            parts.append("offload" if self.offload == "optimizer" else "offload of all")
        if self.on_disk:
            parts.append("optimizer to disk" if self.offload == "parameters" else "to disk")
        return ", ".join(parts)
