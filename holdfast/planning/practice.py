"""How a run computes, as far as it affects the memory of a rank."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from holdfast.planning.answers import AnswerLot
from holdfast.planning.layout import HOLDFAST, MEGATRON, Layout, State
from holdfast.planning.shape import Architecture
from holdfast.spec.training import KEEPING, LOSS_CHUNK, Lora, ObjectiveName, Training


@dataclass(frozen=True)
class Teacher:
    """The frozen model of a distillation."""

    shape: Architecture
    top: int  # likeliest tokens of each position


@dataclass(frozen=True)
class Practice:
    """How an engine computes, as far as it affects memory."""

    state: State = HOLDFAST
    flash: bool = True  # attention that recomputes its scores instead of storing them
    fused_norm: bool = True  # a norm that keeps no normalized copy
    autocast: bool = False  # only products are in 16 bits: the residual stream is fp32, inputs are cast
    compiled: bool = False  # each layer is one graph, whose compiler chooses what it keeps
    # What selective checkpointing recomputes: all but products (here), or attention's scores (Korthikanti).
    selective: Literal["products", "attention"] = "products"
    kernel: Literal["cpu", "efficient", "flash", "plain"] = "flash"  # of attention: what its backward needs
    whole_update: bool = False  # all updates exist before the first is applied
    held_back: bool = False  # and the values that they change are copied first, to undo the update
    left_out: bool = False  # whole replicas keep the compression error of gradients (topk, powersgd)
    lora: Lora = field(default_factory=Lora)  # adapters to frozen weights
    loss_chunk: int = LOSS_CHUNK  # tokens whose logits exist at a time
    reference: bool = False  # a frozen copy of the first weights (dpo and kto)
    teacher: Teacher | None = None  # of a distillation
    answers: AnswerLot | None = None  # that a rank generates
    whole_model: bool = False  # a copy of it generates them


PAPER = Practice(state=MEGATRON, flash=False, selective="attention")  # Megatron-LM of 2021 and 2022
MEGATRON_FLASH = Practice(state=MEGATRON)


@dataclass(frozen=True)
class Updates:
    """What a training sets, as far as it affects memory: mostly how it updates its weights."""

    lamb: bool = False
    elastic: bool = False  # elastic determinism
    judged: bool = False  # an update may be held back (training.anomalies)
    left_out: bool = False  # see Practice
    lora: Lora = field(default_factory=Lora)
    loss_chunk: int = LOSS_CHUNK
    compiled: bool = False  # see Practice
    reference: bool = False  # see Practice
    average: bool = False  # of the weights (training.ema)
    teacher: Teacher | None = None
    answers: AnswerLot | None = None

    @classmethod
    def of(
        cls, training: Training, objective: ObjectiveName = "next_token", teacher: Architecture | None = None
    ) -> Self:
        """The values of a spec with this objective, and its teacher if it is known."""
        judged = training.anomalies.action != "stop" or training.anomalies.deviations is not None
        return cls(
            lamb=training.optimizer.kind == "lamb" or (judged and training.optimizer.kind == "muon"),
            elastic=training.determinism == "elastic",
            judged=judged,
            left_out=training.gradient_compression in KEEPING,
            lora=training.lora,
            loss_chunk=training.loss_chunk,
            compiled=training.compile,
            average=training.ema.decay is not None,
            reference=training.lora.rank is None
            and (objective in ("dpo", "kto") or (objective == "grpo" and training.grpo.kl_weight > 0)),
            teacher=None if teacher is None else Teacher(teacher, training.distillation.top_k),
            answers=AnswerLot.of(training) if objective == "grpo" else None,
        )


def practice_here(precision: str, layout: Layout, kind: str, updates: Updates | None = None) -> Practice:
    """The practice of the engines here. Only whole replicas use autocast, and torch has no fused norm for CPUs."""
    updates = updates or Updates()
    autocast = precision in ("bf16", "fp16", "fp8") and layout.sharding != "full" and layout.tensor == 1
    errors = updates.left_out and layout.sharding == "none" and layout.data > 1  # otherwise nothing is compressed
    # Torch has no kernel that does these in one pass.
    whole_update = updates.lamb or (updates.elastic and layout.sharding == "full")
    divided = layout.ranks > layout.data or layout.expert > 1 or (layout.sharding == "full" and layout.ranks > 1)
    return Practice(
        state=replace(HOLDFAST, optimizer=HOLDFAST.optimizer + 4 * updates.average),
        fused_norm=kind != "cpu",
        autocast=autocast,
        compiled=updates.compiled,
        kernel=_kernel_here(kind, precision),
        whole_update=whole_update,
        held_back=whole_update and (updates.judged or precision == "fp16"),
        left_out=errors,
        lora=updates.lora,
        loss_chunk=updates.loss_chunk,
        reference=updates.reference,
        teacher=updates.teacher,
        answers=updates.answers,
        whole_model=divided or (updates.elastic and layout.sharding == "full"),
    )


def _kernel_here(kind: str, precision: str) -> Literal["cpu", "efficient", "flash", "plain"]:
    """The kernel that computes attention (see `model.attention`)."""
    if kind in ("nvidia", "amd"):
        return "efficient" if precision == "fp32" else "flash"
    return "cpu" if kind == "cpu" else "plain"
