"""Layout of a step over accelerators: what each stores, and what it recomputes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
# What the ranks of a data-parallel group shard: nothing, the optimizer's state, or everything.
Sharding = Literal["none", "optimizer", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
# What host memory holds: nothing, the optimizer's state, also weights and gradients, or weights on a disk.
Offload = Literal["none", "optimizer", "parameters", "parameters_on_disk"]


@dataclass(frozen=True)
class State:
    """Bytes per parameter in training."""

    weights: int = 4
    gradients: int = 4
    optimizer: int = 8


HOLDFAST = State()  # of the engines here: fp32 weights, gradients and two moments
MEGATRON = State(weights=2, gradients=4, optimizer=12)  # bf16 weights, and fp32 weights, gradients and moments


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the handling of micro-batches on a rank.

    Expert-parallel ranks are ranks of one stage that all see different tokens; they hold different experts.
    """

    data: int = 1  # ranks with different samples, sharded or not
    shard: int = 1  # how many of them share one copy of what `sharding` names
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    sharding: Sharding = "none"
    checkpointing: Checkpointing = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1  # model chunks per stage in the interleaved schedule
    offload: Offload = "none"
    on_disk: bool = False  # offloaded optimizer state is on a disk of the node, not in host memory

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights stay after forward, because both halves of a backward pass need them."""
        return self.sharding == "full" and self.schedule == "zero_bubble"

    @property
    def ranks(self) -> int:
        """The number of accelerators."""
        return self.data * self.tensor * self.pipeline * self.context

    def expert_shards(self, whole: int) -> int:
        """Ranks that share one copy of their experts, if `whole` ranks share one copy of the rest.

        Ranks of a tensor-parallel group share it too, because experts are not split. Ranks with other experts do not.
        """
        return max(1, whole * self.tensor // self.expert)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a rank per step."""
        return max(1, global_batch // (self.data * self.micro_batch))

    def with_(self, **changes: object) -> Layout:
        """A copy with some fields changed."""
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
