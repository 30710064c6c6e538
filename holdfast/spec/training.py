"""The `training`, `parallel` and `checkpoint` sections: what a run computes, its layout, and how it is saved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

from pydantic import Field, model_validator

from holdfast.spec.functions import USE, Function
from holdfast.spec.section import Section, plan_field, runtime_field

LOSS_CHUNK = 1024  # tokens


class Optimizer(Section):
    """AdamW or LAMB. Weight decay applies to matrices, not to norms."""

    kind: Literal["adamw", "lamb"] = Field(
        "adamw", description="`lamb` scales each tensor's update to the norm of the tensor, for very large batches."
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")


class Schedule(Section):
    """Learning rate by step: linear warm-up, then a decay to `final_ratio` of the peak."""

    factor: Function | None = Field(
        None,
        description="Your own schedule, instead of warm-up and decay: a function of the step (from 0) and the number "
        "of steps that returns a factor of the peak learning rate.",
    )
    kind: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay.")
    warmup_steps: int = Field(0, ge=0, lt=10**9, description="Steps of linear warm-up.")
    final_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the last step, as a fraction of the peak."
    )
    scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Scaling of the learning rate with the batch of each step: none, linear, or by its square root.",
    )
    base_batch: int | None = Field(
        None, ge=1, le=10**9, description="With `scaling`: the global batch for which `learning_rate` is set."
    )


class BatchRamp(Section):
    """A global batch that grows over the first steps, in equal increments. See docs/numerics.md."""

    start: int | None = Field(None, ge=1, le=10**9, description="The first global batch. Default: no ramp.")
    increment: int | None = Field(None, ge=1, le=10**9, description="Sequences added by each increment.")
    steps: int = Field(
        1, ge=1, le=10**9, description="The step from which the batch is `global_batch`. Increments are evenly spaced."
    )


class Anomalies(Section):
    """What happens after a step whose loss or gradient norm is not finite, or far above normal. See
    docs/numerics.md."""

    action: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="`stop` ends the run. `skip` discards the update and continues. `rewind` returns to the newest "
        "multiple of `rewind_steps` and skips the batches since then.",
    )
    deviations: float | None = Field(
        None,
        gt=0,
        description="A step is also an anomaly if its loss or gradient norm is this many standard deviations above its "
        "running mean. Default: only if one of them is not finite.",
    )
    window: int = Field(
        128,
        ge=2,
        le=10**6,
        description="Steps of the running mean and deviation. No step counts as a spike before this many are complete.",
    )
    rewind_steps: int = Field(
        100,
        ge=1,
        le=10**9,
        description="With `rewind`: steps between two points that it can return to. Each of them is saved.",
    )
    max_consecutive: int = runtime_field(
        10,
        "With `skip` and `rewind`: the run ends after this many consecutive anomalies. Rewinds to the same step count "
        "as consecutive.",
        ge=1,
    )


class LossScale(Section):
    """With `precision: fp16`: dynamic loss scaling, as in torch.amp.GradScaler. See docs/numerics.md."""

    initial_power: int = Field(16, ge=0, le=24, description="The first scale, as a power of two.")
    growth_interval: int = Field(
        2000, ge=1, le=10**9, description="Steps without an overflow after which the scale doubles."
    )


ObjectiveName = Literal["next_token", "distillation", "dpo", "orpo", "reward", "kto"]
Adapted = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters (LoRA) for the frozen weights of `model.init_from`. Only the adapters are trained and saved.
    See docs/fine-tuning.md."""

    rank: int | None = Field(
        None, ge=1, le=65_536, description="Rank of each adapter. Default: the weights are trained."
    )
    alpha: float = Field(16.0, gt=0, description="Each adapter is scaled by `alpha` / `rank`.")
    rslora: bool = Field(False, description="Scale by `alpha` / sqrt(`rank`) instead (rsLoRA).")
    targets: tuple[Adapted, ...] = Field(
        get_args(Adapted), min_length=1, description="Matrices of every layer that get an adapter."
    )
    base: Literal["fp32", "bf16", "nf4"] = Field(
        "fp32",
        description="How the frozen matrices of the layers are stored: 4 bytes an element, 2, or 0.56 (NF4: 4 bits and "
        "a scale for 64 elements). They are expanded to multiply. Embedding, head, norms and biases stay fp32.",
    )


class Preference(Section):
    """Preference optimization (objectives dpo, orpo and kto): the model learns to prefer some answers. See
    docs/fine-tuning.md."""

    beta: float = Field(
        0.1,
        gt=0,
        description="dpo and kto: strength of the pull toward the frozen weights of `model.init_from`. orpo: weight of "
        "the odds ratio.",
    )
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of the loss of desirable answers.")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of the loss of undesirable answers.")


class ObjectiveChoice(Function):
    """What a step minimizes. Give the name of a built-in objective, or a function of your own code: it gets logits
    [n, vocabulary] and targets [n], and returns a loss for each target. Keys that are no fields are passed to it by
    name. See docs/your-own-code.md."""

    kind: Literal["auto", "next_token", "distillation", "dpo", "orpo", "reward", "kto"] = Field(
        "auto",
        description="A built-in objective. `auto`: next_token for text and chat, dpo for preferences, kto for "
        "unpaired. `distillation`: the likeliest tokens of a teacher. `dpo`: direct preference optimization. `orpo`: "
        "the chosen answers and an odds ratio, without a reference model. `reward`: the ranking loss of a reward model "
        "(`model.head: scalar`). `kto`: single answers with labels (Kahneman-Tversky).",
    )
    use: str | None = runtime_field(  # type: ignore[assignment]
        None,
        "Your own objective: a Python file, relative to the folder of the spec, and a function in it.",
        pattern=USE,
    )

    @classmethod
    def _of_text(cls, value: str) -> dict[str, object]:
        return {"use": value} if ":" in value else {"kind": value}

    @property
    def is_own(self) -> bool:
        """Whether it is a function of user code."""
        return self.use is not None


class Distillation(Section):
    """Distillation (`objective: distillation`): the model learns a teacher's likeliest tokens. See
    docs/fine-tuning.md."""

    teacher: str | None = Field(
        None,
        description="The teacher's weights: a folder in the Hugging Face layout, such as the export of a run, or an "
        "s3:// or hf:// URL. It has the vocabulary of the run. The run id has a digest of the content.",
    )
    top_k: int = Field(32, ge=1, le=4096, description="The teacher's likeliest tokens that each position learns.")
    hard_weight: float = Field(0.0, ge=0, description="Weight of the cross-entropy of the actual next tokens.")


class Training(Section):
    """The computation of every step."""

    steps: int = Field(300, ge=1, le=10**9, description="Optimizer steps.")
    global_batch: int = Field(32, ge=1, le=10**9, description="Sequences in one optimizer step, over all ranks.")
    batch_ramp: BatchRamp = Field(
        default_factory=BatchRamp, description="Growth of the global batch in the first steps."
    )
    micro_batch: int = plan_field(
        8,
        "Sequences that one rank computes together. With `determinism: elastic` it is part of the run id, because sums "
        "are made of micro-batches. `auto` sets `auto_micro_batch`.",
        ge=1,
        le=10**6,
    )
    auto_micro_batch: bool = runtime_field(
        False,
        "Choose `micro_batch` by a trial before the first step. The run keeps the choice. `micro_batch: auto` means "
        "the same. See docs/planner.md.",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32",
        description="Arithmetic of forward and backward. Master weights and optimizer state are fp32. `fp8` is bf16 "
        "with fp8 products in linear layers, on accelerators that support it.",
    )
    loss_scale: LossScale = Field(
        default_factory=LossScale, description="Loss scaling for fp16, which keeps small gradients."
    )
    objective: ObjectiveChoice = Field(default_factory=ObjectiveChoice, description="What a step minimizes.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="How gradients update weights.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning-rate schedule.")
    lora: Lora = Field(default_factory=Lora, description="Training of adapters instead of the weights.")
    distillation: Distillation = Field(default_factory=Distillation, description="The teacher of a distillation.")
    preference: Preference = Field(default_factory=Preference, description="How preferences are learned.")
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd", "topk"] = Field(
        "none",
        description="With `ddp`: compression of the gradients that ranks send. `fp16` and `bf16` send half as many "
        "bits, `powersgd` thin matrices, `topk` the largest elements.",
    )
    powersgd_rank: int = Field(
        4, ge=1, le=1024, description="With `gradient_compression: powersgd`: columns of the thin matrices."
    )
    topk_fraction: float = runtime_field(
        0.01,
        "With `gradient_compression: topk`: fraction of each gradient's elements that is sent. It is then part of the "
        "run id.",
        gt=0,
        le=1,
    )
    clip_norm: float | None = Field(1.0, gt=0, description="Maximum global gradient norm; `null`: no clipping.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of initialization, shuffling and everything else that is random."
    )
    determinism: Literal["off", "exact", "elastic"] = Field(
        "exact",
        description="`exact`: the same bits under the same plan (layout, hardware, software). `elastic`: the same bits "
        "at any data-parallel size. `off`: no promise, and the fastest.",
    )
    anomalies: Anomalies = Field(default_factory=Anomalies, description="What happens after a step that went wrong.")
    activation_checkpointing: Literal["none", "full", "selective"] = plan_field(
        "none",
        "Recompute activations in the backward pass instead of keeping them. `full`: all of a layer. `selective`: all "
        "except the results of matrix products and attention. The bits are the same as with `none`.",
    )
    compile: bool = plan_field(False, "Compile the model with torch.compile.")
    loss_chunk: int = plan_field(
        LOSS_CHUNK,
        "Tokens of a sequence whose logits exist at a time. A smaller chunk needs less memory for a large vocabulary. "
        "It sets the order of sums, so with `determinism: elastic` it is part of the run id.",
        ge=1,
        le=2**24,
    )
    log_every: int = runtime_field(10, "Steps between two progress lines.", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        """Before the trial the micro-batch is 1, the smallest candidate, so that rules can check the rest."""
        if isinstance(value, Mapping) and value.get("micro_batch") == AUTO:
            return {**value, "micro_batch": 1, "auto_micro_batch": True}
        if isinstance(value, Mapping) and value.get("auto_micro_batch") is True and "micro_batch" not in value:
            return {**value, "micro_batch": 1}
        return value


KEEPING = ("powersgd", "topk")  # kinds of gradient compression whose state includes the error that they left out
AUTO = "auto"  # instead of the section: the planner chooses


class Parallel(Section):
    """The layout: how one step is distributed over processes. It sets the order of sums, and so the last bits."""

    auto: bool = runtime_field(
        False,
        "Use the fastest layout that the planner finds for `processes`, `cluster.nodes` and the accelerator. It "
        "replaces the fields below, `training.micro_batch` and `training.activation_checkpointing`. `parallel: auto` "
        "means the same. See docs/planner.md.",
    )
    processes: int = plan_field(
        1, "Processes on each node: one for each accelerator, or several on CPU cores.", ge=1, le=1024
    )
    threads: int = plan_field(
        1, "CPU threads of each process. On a CPU the number sets the order of sums.", ge=1, le=1024
    )
    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = plan_field(
        "ddp", "`ddp` and `fsdp` (FSDP2) train with the torch engine, `zero1`-`zero3` with DeepSpeed."
    )
    bucket_mib: float = plan_field(
        25.0,
        "With `ddp`: size of a bucket of gradients, in MiB. It is reduced while later ones are computed.",
        gt=0,
        le=4096,
    )
    replicas: int = plan_field(
        1,
        "With `fsdp`: copies of the model, each sharded over its own ranks (HSDP). 1 shards over all ranks.",
        ge=1,
        le=1_000_000,
    )
    reshard: Literal["always", "never"] = plan_field(
        "always",
        "With `fsdp`: `always` frees a layer's gathered weights after forward and gathers them again for backward. "
        "`never` keeps them: more memory, less traffic.",
    )
    offload: Literal["none", "optimizer", "parameters", "parameters_on_disk"] = plan_field(
        "none",
        "`optimizer` (`zero1`-`zero3`): master weights and moments are in host memory, and the optimizer steps there. "
        "`parameters` (`zero3`, `fsdp`): weights too, until they are gathered. `parameters_on_disk` (`zero3` with "
        "`offload_path`): weights are also on the disk, and are read for each use.",
    )
    offload_path: str | None = plan_field(
        None,
        "With `zero3` and `offload`: a folder on a fast local disk of each node (NVMe), as an absolute path. Master "
        "weights and moments are stored there and pass through host memory one group at a time. Each rank has its own "
        "folder in it, which is removed at the end. Default: host memory. The plan records that a path is set, not "
        "which one.",
    )
    tensor: int = plan_field(
        1,
        "Ranks that compute one micro-batch together. Matrices, vocabulary and sequence are split among them (tensor "
        "and sequence parallelism). They communicate within every layer: keep them on one node.",
        ge=1,
        le=1024,
    )
    pipeline: int = plan_field(
        1, "Stages that the layers are distributed to, each on its own ranks (pipeline parallelism).", ge=1, le=1024
    )
    stages: tuple[int, ...] | None = plan_field(
        None,
        "With `pipeline`: layers of each stage, in the order of the model, such as `[3, 5]`. `interleaved` needs twice "
        "as many entries: rank r has entries r and r + `pipeline`. Default: even stages, with the head counted.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = plan_field(
        "1f1b",
        "With `pipeline`: order of the micro-batches. `gpipe`: all forward, then all backward. `1f1b`: alternately, "
        "which keeps fewer activations. `interleaved`: two stages on each rank, with less idle time and more traffic. "
        "`zero_bubble`: `1f1b`, with gradients of weights computed in idle time.",
    )
    context: int = plan_field(
        1,
        "Ranks that each sequence is split over, so that a long one fits (context parallelism). Attention covers the "
        "whole sequence: keys and values are gathered in every layer.",
        ge=1,
        le=1024,
    )
    expert: int = plan_field(
        1,
        "Ranks of a stage that the experts of each layer are distributed over (expert parallelism). These ranks "
        "process different tokens. Each token is sent to the ranks that have its experts.",
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


class Script(Section):
    """A training script of your own, in place of Holdfast's training loop."""

    script: str | None = Field(
        None,
        pattern=r"^[^:]+\.py$",
        description="The script: a Python file, relative to the folder of the spec. The `*.py` files of its folder "
        "travel with it. It uses `holdfast.session()`, see [Your own code](your-own-code.md).",
    )
    arguments: tuple[str, ...] = Field((), max_length=1000, description="Arguments of the script.")
    include: tuple[str, ...] = Field(
        (), max_length=100, description="Patterns of more files in the folder of the script that travel with it."
    )
    determinism: Literal["off", "exact"] = Field(
        "off",
        description="`exact`: deterministic kernels, and random numbers that depend only on the seed, the step and the "
        "rank. `off` promises nothing about the bits of a script.",
    )
    restart_on: Literal["lost", "any"] = runtime_field(
        "lost",
        "`lost`: a launch is repeated after a lost process, node or connection. `any`: also after an exception of the "
        "script, within `cluster.restarts`.",
    )
    log_every: int = runtime_field(10, "Steps between two progress lines.", ge=1)


class MemoryTier(Section):
    """Copies of the state in the memory of its node (`/dev/shm`, up to three). The next launch on that node resumes
    from them. See docs/checkpoints-tiers.md."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. Default: no copies.", ge=1)
    peers: int = runtime_field(0, "Other nodes that hold a copy of this node's state in their memory.", ge=0, le=1)


class DiskTier(Section):
    """Copies of the state on a disk of its node (up to three). The next launch on that node resumes from them."""

    every_steps: int | None = runtime_field(None, "Steps between two copies. Default: no copies.", ge=1)
    path: str | None = runtime_field(
        None, "A folder on a disk of the node, as an absolute path. Each run has its own folder in it."
    )


class Checkpoint(Section):
    """When the state is saved, and which checkpoints are kept. No field can change the weights."""

    every: Literal["steps", "auto"] = runtime_field(
        "steps",
        "`steps` saves at multiples of `every_steps`. `auto` chooses the interval from the measured cost of a save and "
        "how often the run fails.",
    )
    every_steps: int = runtime_field(
        50, "Steps between two checkpoints; with `auto` the maximum. The last step is always saved.", ge=1
    )
    every_minutes: float | None = runtime_field(
        None, "Also save when this many minutes have passed since the last save, by the clock of rank 0.", gt=0
    )
    max_lag_steps: int | None = runtime_field(
        None,
        "Steps that training may continue past the newest checkpoint while the store accepts none. Then the gang ends, "
        "and is started again. Default: three times `every_steps`.",
        ge=1,
    )
    digest_every: int | None = runtime_field(
        None,
        "Steps between two state digests in the history. Replicas compare their digests then, and at every save. "
        "Default: only at saves.",
        ge=1,
    )
    keep_last: int = runtime_field(3, "Number of newest checkpoints to keep.", ge=1)
    keep_every: int | None = runtime_field(
        None, "Also keep one checkpoint per this many steps: at the multiple, or else the next one after it.", ge=1
    )
    keep_days: float | None = runtime_field(
        None, "Also keep every checkpoint of the last this many days.", gt=0, le=3650
    )
    upload_mib_per_second: float | None = runtime_field(
        None,
        "Limit of the upload of checkpoints by all ranks of one host, in MiB per second. The last save before a "
        "requested shutdown is not limited. Default: no limit.",
        gt=0,
    )
    grace_seconds: float = runtime_field(25.0, "Time to save and exit after SIGTERM, in seconds.", gt=0, le=3600)
    compression: Literal["none", "lossless"] = runtime_field(
        "none",
        "`lossless` compresses tensor bytes if that saves space, which is measured at every save. It writes 20 to 33 % "
        "less, and costs about 3 s of a core per GB and a copy of the state in memory.",
    )

    memory: MemoryTier = Field(default_factory=MemoryTier, description="Copies in the memory of the nodes.")
    disk: DiskTier = Field(default_factory=DiskTier, description="Copies on the disks of the nodes.")

    @property
    def lag_steps(self) -> int:
        """`max_lag_steps`, with the default resolved."""
        return self.max_lag_steps or 3 * self.every_steps


# Samples in the batch of each step, and samples before it, as pure functions of the step.
#
# With `training.batch_ramp` the batch grows in equal increments over the first steps. Positions in the training
# sequence are numbered continuously, so an epoch still uses each sample exactly once. Seeking is a search in the table
# of increments.


@dataclass(frozen=True)
class BatchSizes:
    """Batches of `final` samples, or batches that grow from `start` by `increment` at equally spaced steps. The last of
    these steps is `steps` (from 0)."""

    final: int
    start: int | None = None
    increment: int = 1
    steps: int = 1
    _table: tuple[list[int], list[int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        levels = 0 if self.start is None else (self.final - self.start) // self.increment
        sizes = [self.final - self.increment * (levels - level) for level in range(levels + 1)]
        begins = [-(-level * self.steps // max(1, levels)) for level in range(levels + 1)]
        spans = [(after - before) * size for before, after, size in zip(begins, begins[1:], sizes, strict=False)]
        object.__setattr__(self, "_table", (begins, sizes, list(accumulate(spans, initial=0))))

    @classmethod
    def of(cls, training: Training) -> BatchSizes:
        """The batch sizes of a spec."""
        ramp = training.batch_ramp
        if ramp.start is None or ramp.increment is None:
            return cls(training.global_batch)
        return cls(training.global_batch, ramp.start, ramp.increment, ramp.steps)

    def size(self, step: int) -> int:
        """Samples of the batch of `step`, which counts from 0."""
        begins, sizes, _ = self._table
        return sizes[bisect_right(begins, step) - 1]

    def before(self, step: int) -> int:
        """Samples of all batches before that of `step`: the position of its first sample."""
        begins, sizes, firsts = self._table
        level = bisect_right(begins, step) - 1
        return firsts[level] + (step - begins[level]) * sizes[level]
