"""The `training`, `parallel` and `checkpoint` sections: what a run computes, its layout, and how it is saved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.components.spec.section import Section, knob, plan_field


class Optimizer(Section):
    """AdamW. Weight decay applies to matrices, not to norms."""

    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")


class Schedule(Section):
    """Learning rate over steps: linear warm-up, then a decay to `final_ratio` of the peak."""

    kind: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay.")
    warmup_steps: int = Field(0, ge=0, lt=10**9, description="Steps of linear warm-up.")
    final_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the last step, as a share of the peak.")


class Training(Section):
    """What is computed at every step."""

    steps: int = Field(300, ge=1, le=10**9, description="Optimizer steps.")
    global_batch: int = Field(32, ge=1, le=10**9, description="Sequences of one optimizer step, over all ranks.")
    micro_batch: int = plan_field(
        8,
        "Sequences that one rank computes at once. With determinism: elastic, part of the run id: the grain of sums.",
        ge=1,
        le=10**6,
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32", description="Arithmetic of forward and backward. Master weights and optimizer state stay fp32."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="AdamW's settings.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning-rate schedule.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global gradient norm; none does not clip.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of initialisation, shuffling and everything random.")
    determinism: Literal["off", "exact", "elastic"] = Field(
        "exact",
        description="`exact`: the same bits under the same plan (layout, hardware, software). `elastic`: at any "
        "data-parallel size. `off`: fastest.",
    )
    on_divergence: Literal["stop", "skip", "rollback"] = Field(
        "stop", description="What to do when the loss or the gradient norm is not finite."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = plan_field(
        "none", "Recompute activations in the backward pass to save memory."
    )
    compile: bool = plan_field(False, "Compile the model with torch.compile.")
    log_every: int = knob(10, "Steps between two progress lines.", ge=1)


class Parallel(Section):
    """The layout: how one step is spread over processes. It decides the order of sums, and so the last bits."""

    processes: int = plan_field(1, "Processes on each node: one an accelerator, or some on CPU cores.", ge=1, le=1024)
    threads: int = plan_field(1, "CPU threads of each process: sums are ordered by it on a CPU.", ge=1, le=1024)
    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = plan_field(
        "ddp", "`ddp` and `fsdp` (FSDP2) train with the torch engine, `zero1`-`zero3` with DeepSpeed."
    )
    tensor: int = plan_field(1, "Tensor-parallel degree.", ge=1, le=1024)
    pipeline: int = plan_field(1, "Pipeline-parallel degree.", ge=1, le=1024)
    context: int = plan_field(1, "Context-parallel degree.", ge=1, le=1024)
    expert: int = plan_field(1, "Expert-parallel degree.", ge=1, le=1024)

    @property
    def engine(self) -> Literal["torch", "deepspeed"]:
        """The engine that implements `strategy`."""
        return "deepspeed" if self.strategy.startswith("zero") else "torch"


class Checkpoint(Section):
    """When the state is saved and what is kept. None of it can change the weights."""

    every_steps: int = knob(50, "Steps between two checkpoints. The last step is always saved.", ge=1)
    max_lag_steps: int | None = knob(
        None,
        "How far training may run ahead of the newest checkpoint while the store takes none, in steps; then the gang "
        "ends, to be started again. None: three times `every_steps`.",
        ge=1,
    )
    digest_every: int | None = knob(
        None,
        "Steps between two state digests in the history; replicas compare theirs then, and at every save. None: only "
        "at saves.",
        ge=1,
    )
    keep_last: int = knob(3, "Newest checkpoints to keep.", ge=1)
    keep_every: int | None = knob(None, "Also keep every checkpoint whose step is a multiple of this.", ge=1)
    grace_seconds: float = knob(25.0, "Time to save and leave after SIGTERM, in seconds.", gt=0, le=3600)
    compression: Literal["none", "lossless"] = knob("none", "Lossless compression of tensor bytes.")

    @property
    def lag_steps(self) -> int:
        """`max_lag_steps`, with the default resolved."""
        return self.max_lag_steps or 3 * self.every_steps
