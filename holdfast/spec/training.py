"""The `training` section, what a run computes, and the `train` section, a script of the user in its place."""

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field, model_validator

from holdfast.spec.functions import USE, Function
from holdfast.spec.rollout import Grpo
from holdfast.spec.section import Section, plan_field, runtime_field

LOSS_CHUNK = 1024  # tokens


class ParameterGroup(Section):
    """Parameters whose names match a pattern, and how they are trained. See docs/training.md."""

    match: str = Field(
        "*",
        min_length=1,
        max_length=200,
        description="Pattern of canonical names, such as `*.layers.0.*` or `*.mlp.*.weight`. `*` stands for any "
        "text. A name belongs to the first group that matches.",
    )
    rate_factor: float = Field(1.0, gt=0, le=1e6, description="Factor of the learning rate of every step.")
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of these parameters, norms included. Default: that of the optimizer."
    )
    adamw: bool = Field(False, description="With `kind: muon`: update these parameters by AdamW.")
    frozen: bool = Field(
        False, description="Do not train these parameters. They stay in every checkpoint, without optimizer state."
    )


class MuonSettings(Section):
    """With `kind: muon`: the update of hidden matrices. See docs/training.md."""

    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the momentum.")
    nesterov: bool = Field(True, description="Orthogonalize the momentum one step ahead.")
    iterations: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations.")
    scaling: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of a matrix's learning rate. `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), so that one "
        "rate fits both optimizers. `original`: sqrt(max(1, rows / columns)).",
    )


class Optimizer(Section):
    """AdamW, LAMB, Muon, or your own. Weight decay applies to matrices, not to norms."""

    build: Function | None = Field(
        None,
        description="Your own optimizer: a function of torch's parameter groups that returns a "
        "`torch.optim.Optimizer`. See [Your own code](your-own-code.md).",
    )
    kind: Literal["adamw", "lamb", "muon"] = Field(
        "adamw",
        description="`lamb` scales each tensor's update to the norm of the tensor, for very large batches. `muon` "
        "orthogonalizes the updates of the matrices of all layers, and trains the rest by AdamW.",
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    muon: MuonSettings = Field(default_factory=MuonSettings, description="Settings of `kind: muon`.")
    groups: tuple[ParameterGroup, ...] = Field(
        (), max_length=100, description="Parameters with another rate or weight decay, or frozen ones, by name."
    )


class Ema(Section):
    """An exponential moving average (EMA) of the trained weights, as part of the state. See docs/training.md."""

    decay: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="After each update, average = `decay` x average + (1 - `decay`) x weights. It begins as the first "
        "weights. Default: no average.",
    )
    export: bool = Field(
        False, description="Export, evaluate and register the average instead of the weights of the last step."
    )


class Schedule(Section):
    """Learning rate by step: linear warm-up, then a decay to `final_ratio` of the peak."""

    factor: Function | None = Field(
        None,
        description="Your own schedule, instead of warm-up and decay: a function of the step (from 0) and the number "
        "of steps that returns a factor of the peak learning rate.",
    )
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = Field(
        "cosine",
        description="Shape after the warm-up. `wsd` (warm-up, stable, decay): constant, then a decay over the last "
        "`decay_steps`. `inverse_sqrt`: the peak times the root of `warmup_steps` / step.",
    )
    warmup_steps: int = Field(0, ge=0, lt=10**9, description="Steps of linear warm-up.")
    final_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the last step, as a fraction of the peak."
    )
    decay_steps: int | None = Field(None, ge=1, lt=10**9, description="With `wsd`: steps of the decay at the end.")
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        "linear", description="With `wsd`: shape of the decay. `sqrt` is 1 - sqrt(progress), which falls fast first."
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


ObjectiveName = Literal["next_token", "distillation", "dpo", "orpo", "reward", "kto", "grpo"]
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

    kind: Literal["auto", "next_token", "distillation", "dpo", "orpo", "reward", "kto", "grpo"] = Field(
        "auto",
        description="A built-in objective. `auto`: next_token for text and chat, dpo for preferences, kto for "
        "unpaired, grpo for prompts. `distillation`: the likeliest tokens of a teacher. `dpo`: direct preference "
        "optimization. `orpo`: the chosen answers and an odds ratio, without a reference model. `reward`: the ranking "
        "loss of a reward model (`model.head: scalar`). `kto`: single answers with labels (Kahneman-Tversky). `grpo`: "
        "rewards of the model's own answers.",
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
    temperature: float = Field(
        1.0,
        gt=0,
        le=100,
        description="The divergence is that of the logits divided by this number, of teacher and model. It is not "
        "multiplied by its square.",
    )


class Training(Section):
    """The computation of every step."""

    steps: int = Field(300, ge=1, le=10**9, description="Optimizer steps.")
    pause_at: int | None = runtime_field(
        None,
        "Step at which this launch of the run ends, with a checkpoint and its held-out loss. The run is then not "
        "registered. A search sets it for its trials. Default: no pause.",
        ge=1,
        le=10**9,
    )
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
    ema: Ema = Field(default_factory=Ema, description="An average of the weights over the steps.")
    lora: Lora = Field(default_factory=Lora, description="Training of adapters instead of the weights.")
    distillation: Distillation = Field(default_factory=Distillation, description="The teacher of a distillation.")
    preference: Preference = Field(default_factory=Preference, description="How preferences are learned.")
    grpo: Grpo = Field(
        default_factory=Grpo, description="How the model learns from the rewards of answers that it generates."
    )
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
    log_every: int = runtime_field(
        10, "Steps between two progress lines. A run with no more steps than that has up to ten lines.", ge=1
    )

    @property
    def pauses(self) -> bool:
        """Whether a launch ends before the last step."""
        return self.pause_at is not None and self.pause_at < self.steps

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
