"""The `training`, `parallel` and `checkpoint` sections: what a run computes, its layout, and how it is saved."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from holdfast.spec.section import Section, plan_field, runtime_field


class Optimizer(Section):
    """AdamW or LAMB. Weight decay applies to matrices, not to norms."""

    kind: Literal["adamw", "lamb"] = Field(
        "adamw", description="`lamb`: each tensor's update is scaled to its norm, for very large batches."
    )
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
    scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="How the learning rate follows the batch of each step: not, in proportion to it, or to its root.",
    )
    base_batch: int | None = Field(
        None, ge=1, le=10**9, description="With `scaling`: the global batch that `learning_rate` is meant for."
    )


class BatchRamp(Section):
    """A global batch that grows over the first steps, in equal increments. See docs/numerics.md."""

    start: int | None = Field(None, ge=1, le=10**9, description="The first global batch. None: there is no ramp.")
    increment: int | None = Field(None, ge=1, le=10**9, description="By how many sequences it grows each time.")
    steps: int = Field(
        1, ge=1, le=10**9, description="The step from which on it is `global_batch`; increments are equally far apart."
    )


class Anomalies(Section):
    """What is done about a step whose loss or gradient norm is not finite, or far above what is usual. See
    docs/numerics.md."""

    action: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="`stop` ends the run; `skip` does not apply the update and goes on; `rewind` goes back to the "
        "newest multiple of `rewind_steps` and passes over the batches since.",
    )
    deviations: float | None = Field(
        None,
        gt=0,
        description="A step is an anomaly, too, when its loss or gradient norm lies so many standard deviations above "
        "its running mean. None: only when one of them is not finite.",
    )
    window: int = Field(
        128,
        ge=2,
        le=10**6,
        description="Steps that the running mean and deviation look back; before so many have been seen, none is "
        "called a spike.",
    )
    rewind_steps: int = Field(
        100,
        ge=1,
        le=10**9,
        description="With `rewind`: how far apart the steps are that it goes back to. All are saved.",
    )
    max_consecutive: int = runtime_field(
        10,
        "With `skip` and `rewind`: so many anomalies in a row end the run; rewinds to one step count as in a row.",
        ge=1,
    )


class LossScale(Section):
    """With `precision: fp16`: the dynamic scale of the loss (that of torch.amp.GradScaler). See docs/numerics.md."""

    initial_power: int = Field(16, ge=0, le=24, description="The first scale, as a power of two.")
    growth_interval: int = Field(
        2000, ge=1, le=10**9, description="Steps without an overflow after which the scale is doubled."
    )


Adapted = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters to frozen weights (LoRA), those of `model.init_from`: only the adapters are trained and saved.
    See docs/fine-tuning.md."""

    rank: int | None = Field(
        None, ge=1, le=65_536, description="Rank of each adapter. None trains the weights themselves."
    )
    alpha: float = Field(16.0, gt=0, description="An adapter is scaled by `alpha` / `rank`.")
    rslora: bool = Field(False, description="Scale by `alpha` / sqrt(`rank`) instead (rsLoRA).")
    targets: tuple[Adapted, ...] = Field(
        get_args(Adapted), min_length=1, description="The matrices of every layer that have an adapter."
    )


class Preference(Section):
    """Direct preference optimisation (data.kind: preferences): the model learns to prefer what was chosen, measured
    against the frozen weights of `model.init_from`. See docs/fine-tuning.md."""

    beta: float = Field(0.1, gt=0, description="How much a preference weighs against staying near those weights.")


class Training(Section):
    """What is computed at every step."""

    steps: int = Field(300, ge=1, le=10**9, description="Optimizer steps.")
    global_batch: int = Field(32, ge=1, le=10**9, description="Sequences of one optimizer step, over all ranks.")
    batch_ramp: BatchRamp = Field(default_factory=BatchRamp, description="How the global batch grows at first.")
    micro_batch: int = plan_field(
        8,
        "Sequences that one rank computes at once. With determinism: elastic, part of the run id: the grain of sums.",
        ge=1,
        le=10**6,
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32",
        description="Arithmetic of forward and backward. Master weights and optimizer state stay fp32. `fp8` is bf16 "
        "but for the products of linear layers, on accelerators that have it.",
    )
    loss_scale: LossScale = Field(default_factory=LossScale, description="How fp16 keeps small gradients.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="How gradients move weights.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning-rate schedule.")
    lora: Lora = Field(default_factory=Lora, description="Adapters instead of the weights themselves.")
    preference: Preference = Field(default_factory=Preference, description="How preferences are learned.")
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd", "topk"] = Field(
        "none",
        description="With `ddp`: what ranks send of gradients, in half as many bits, as thin matrices, or their "
        "largest elements.",
    )
    powersgd_rank: int = Field(
        4, ge=1, le=1024, description="With `gradient_compression: powersgd`: columns of the thin matrices."
    )
    topk_fraction: float = runtime_field(
        0.01,
        "With `gradient_compression: topk`, and then part of the run id: what of each gradient's elements is sent.",
        gt=0,
        le=1,
    )
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global gradient norm; none does not clip.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of initialisation, shuffling and everything random.")
    determinism: Literal["off", "exact", "elastic"] = Field(
        "exact",
        description="`exact`: the same bits under the same plan (layout, hardware, software). `elastic`: at any "
        "data-parallel size. `off`: fastest.",
    )
    anomalies: Anomalies = Field(default_factory=Anomalies, description="What is done about a step that went wrong.")
    activation_checkpointing: Literal["none", "full", "selective"] = plan_field(
        "none",
        "Compute activations again in the backward pass instead of keeping them: all of a layer (`full`), or all but "
        "the results of matrix products and attention (`selective`). The bits are those of `none`.",
    )
    compile: bool = plan_field(False, "Compile the model with torch.compile.")
    log_every: int = runtime_field(10, "Steps between two progress lines.", ge=1)


KEEPING = ("powersgd", "topk")  # kinds of gradient compression that keep what they left out, as part of the state
AUTO = "auto"  # in the place of the section: the planner chooses


class Parallel(Section):
    """The layout: how one step is spread over processes. It decides the order of sums, and so the last bits."""

    auto: bool = runtime_field(
        False,
        "Take the fastest layout that the planner finds for `processes`, `cluster.nodes` and the accelerator, instead "
        "of the fields below, `training.micro_batch` and `training.activation_checkpointing`. `parallel: auto` says "
        "the same. See docs/planner.md.",
    )
    processes: int = plan_field(1, "Processes on each node: one an accelerator, or some on CPU cores.", ge=1, le=1024)
    threads: int = plan_field(1, "CPU threads of each process: sums are ordered by it on a CPU.", ge=1, le=1024)
    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = plan_field(
        "ddp", "`ddp` and `fsdp` (FSDP2) train with the torch engine, `zero1`-`zero3` with DeepSpeed."
    )
    bucket_mib: float = plan_field(
        25.0, "With `ddp`: MiB of gradients that are reduced together, while others are still computed.", gt=0, le=4096
    )
    replicas: int = plan_field(
        1,
        "With `fsdp`: copies of the model, each of them sharded over its own ranks (HSDP). 1 shards over all ranks.",
        ge=1,
        le=1_000_000,
    )
    reshard: Literal["always", "never"] = plan_field(
        "always",
        "With `fsdp`: whether a layer that was gathered for its forward pass is given up until its backward pass "
        "(`always`), or kept (`never`: more memory, less traffic).",
    )
    offload: Literal["none", "optimizer", "parameters", "parameters_on_disk"] = plan_field(
        "none",
        "With `zero1`-`zero3`: master weights and moments lie in the host's memory, and the optimizer steps there "
        "(`optimizer`); with `zero3` and `fsdp` weights as well, until they are gathered (`parameters`); with `zero3` "
        "and `offload_path` weights lie on the disk too, and are read for each use (`parameters_on_disk`).",
    )
    offload_path: str | None = plan_field(
        None,
        "With `zero3` and `offload`: a folder on a fast local disk of each node (NVMe), as an absolute path, in which "
        "master weights and moments lie, passing through the host's memory a group at a time. Each rank has a folder "
        "of its own in it, which is removed at the end. None: they lie in the host's memory. That there is one is part "
        "of the plan; where it is is not.",
    )
    tensor: int = plan_field(
        1,
        "Ranks that together compute one micro-batch, with the matrices, the vocabulary and the sequence cut among "
        "them (tensor and sequence parallelism). They talk within every layer: keep them on one node.",
        ge=1,
        le=1024,
    )
    pipeline: int = plan_field(
        1, "Stages that the layers are dealt to, each on ranks of its own (pipeline parallelism).", ge=1, le=1024
    )
    stages: tuple[int, ...] | None = plan_field(
        None,
        "With `pipeline`: how many layers each stage has, in the order of the model, such as `[3, 5]`; with "
        "`interleaved` twice as many, of which each rank has those a round apart. None: even, with the head counted.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = plan_field(
        "1f1b",
        "With `pipeline`: the order of micro-batches. `gpipe` goes forward with all, then backward; `1f1b` in turn, "
        "which keeps fewer activations; `interleaved` deals two stages to each rank, which idles less and sends more; "
        "`zero_bubble` is `1f1b` in which gradients of weights are computed where a rank would idle.",
    )
    context: int = plan_field(
        1,
        "Ranks that each sequence is cut among, so that a long one fits (context parallelism). Attention sees all of "
        "it: keys and values are gathered in every layer.",
        ge=1,
        le=1024,
    )
    expert: int = plan_field(
        1,
        "Ranks of a stage, all of which see other tokens, among which the experts of each layer are dealt; tokens are "
        "sent to whoever has their experts (expert parallelism).",
        ge=1,
        le=1024,
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_is_a_word(cls, value: object) -> object:
        return {"auto": True} if value == AUTO else value

    @property
    def engine(self) -> Literal["torch", "deepspeed"]:
        """The engine that implements `strategy`."""
        return "deepspeed" if self.strategy.startswith("zero") else "torch"


class MemoryTier(Section):
    """Copies of the state in the memory of its node (`/dev/shm`, up to three of them), so that a launch that follows on
    that node goes on from there. See docs/checkpoints-tiers.md."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. None: there are none.", ge=1)
    peers: int = runtime_field(0, "Other nodes that keep a copy of this node's copy in their memory.", ge=0, le=1)


class DiskTier(Section):
    """Copies of the state on a disk of its node (up to three of them), so that a launch that follows on that node goes
    on from there."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. None: there are none.", ge=1)
    path: str | None = runtime_field(
        None, "A folder on a disk of the node: an absolute path. Each run has its own place in it."
    )


class Checkpoint(Section):
    """When the state is saved and what is kept. None of it can change the weights."""

    every: Literal["steps", "auto"] = runtime_field(
        "steps",
        "`steps` saves at multiples of `every_steps`; `auto` as often as pays, from what a save is seen to cost and "
        "how often the run fails.",
    )
    every_steps: int = runtime_field(
        50, "Steps between two checkpoints; with `auto`, at most so many. The last step is always saved.", ge=1
    )
    every_minutes: float | None = runtime_field(
        None, "Save as well when so many minutes have passed since the last time, by the clock of rank 0.", gt=0
    )
    max_lag_steps: int | None = runtime_field(
        None,
        "How far training may run ahead of the newest checkpoint while the store takes none, in steps; then the gang "
        "ends, to be started again. None: three times `every_steps`.",
        ge=1,
    )
    digest_every: int | None = runtime_field(
        None,
        "Steps between two state digests in the history; replicas compare theirs then, and at every save. None: only "
        "at saves.",
        ge=1,
    )
    keep_last: int = runtime_field(3, "Newest checkpoints to keep.", ge=1)
    keep_every: int | None = runtime_field(
        None, "Also keep, of every so many steps, the first checkpoint: that of the multiple, or the next one.", ge=1
    )
    keep_days: float | None = runtime_field(
        None, "Also keep every checkpoint that was written in the last so many days.", gt=0, le=3650
    )
    upload_mib_per_second: float | None = runtime_field(
        None,
        "The most that the ranks of one host together upload for checkpoints, in MiB a second; the last save before an "
        "end that was asked for is not held back. None: as fast as the store takes it.",
        gt=0,
    )
    grace_seconds: float = runtime_field(25.0, "Time to save and leave after SIGTERM, in seconds.", gt=0, le=3600)
    compression: Literal["none", "lossless"] = runtime_field(
        "none",
        "`lossless`: compress tensor bytes where it pays, which is measured at every save: a fifth to a third less to "
        "write, for about 3 s of a core for each GB, and for a copy of the state in memory.",
    )

    memory: MemoryTier = Field(default_factory=MemoryTier, description="Copies in the memory of the nodes.")
    disk: DiskTier = Field(default_factory=DiskTier, description="Copies on the disks of the nodes.")

    @property
    def lag_steps(self) -> int:
        """`max_lag_steps`, with the default resolved."""
        return self.max_lag_steps or 3 * self.every_steps
