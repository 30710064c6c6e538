"""Rules of `training.precision`: what goes with which arithmetic. What an accelerator knows is found out there."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec

FP8_CAPABILITY = (8, 9)  # of CUDA, that multiplies fp8 numbers: Ada; Hopper is 9.0
FP8_UNIT = 16  # kernels for fp8 take matrices whose sides are multiples of it


def check_precision(spec: Spec) -> Iterator[Problem]:
    """fp16 is the torch engine's, and it alone scales the loss."""
    training = spec.training
    if training.precision == "fp16" and spec.parallel.engine != "torch":
        yield Problem(
            "training.precision", "fp16",
            f"is not there for parallel.strategy: {spec.parallel.strategy}, whose loss scaler keeps a state of its own "
            "that no other engine could go on from",
            "use bf16, or parallel.strategy: ddp or fsdp",
        )  # fmt: skip
    if training.precision != "fp16" and training.loss_scale != type(training.loss_scale)():
        yield Problem(
            "training.loss_scale", None, f"means nothing with training.precision: {training.precision}",
            "remove it, or use training.precision: fp16",
        )  # fmt: skip


def check_fp8(spec: Spec) -> Iterator[Problem]:
    """fp8 is multiplied by NVIDIA's accelerators, in whole and dense matrices of the torch engine."""
    if spec.training.precision != "fp8":
        return
    parallel, training, other = spec.parallel, spec.training, "or training.precision: bf16"
    unable: tuple[tuple[str, object, bool, str, str], ...] = (
        ("cluster.accelerator", spec.cluster.accelerator, spec.cluster.accelerator != "nvidia",
         "multiplies no fp8 numbers here", "use nvidia (Ada, Hopper, Blackwell)"),
        ("parallel.strategy", parallel.strategy, parallel.engine != "torch",
         "has no fp8 here", "use ddp or fsdp"),
        ("parallel.tensor", parallel.tensor, parallel.tensor > 1,
         "cuts matrices, of which each rank would scale its part by itself", "use 1"),
        ("parallel.schedule", parallel.schedule, parallel.schedule == "zero_bubble",
         "computes the two gradients of a product apart, which are one operation in fp8", "use 1f1b"),
        ("model.experts", spec.model.experts, spec.model.experts > 1,
         "are multiplied in groups, which have no fp8 here", "use 1"),
        ("training.lora.rank", training.lora.rank, training.lora.rank is not None,
         "makes matrices that are too thin for fp8", "remove it"),
        ("data.kind", spec.data.kind, spec.data.kind == "preferences",
         "measures small differences between two models, which nobody has compared in fp8", "use another kind"),
    )  # fmt: skip
    for field, value, is_used, why, remedy in unable:
        if is_used:
            yield Problem(field, value, f"{why} (training.precision: fp8)", f"{remedy}, {other}")
    yield from _sides_fit(spec, other)


def _sides_fit(spec: Spec, other: str) -> Iterator[Problem]:
    model, tokens = spec.model, spec.training.micro_batch * spec.model.context // max(1, spec.parallel.context)
    sides = (
        ("model.hidden", model.hidden, model.hidden, "the residual stream"),
        ("model.ffn", model.ffn_width, model.ffn_width, "the feed-forward layer"),
        ("model.heads", model.heads, model.heads * model.head_width, "the queries"),
        ("model.kv_heads", model.key_value_heads, model.key_value_heads * model.head_width, "the keys"),
        ("model.context", model.context, tokens, "a micro-batch, in tokens of one rank,"),
    )
    for field, value, side, what in sides:
        if side % FP8_UNIT:
            yield Problem(
                field, value, f"makes {what} {side} wide, which is no multiple of {FP8_UNIT} "
                "(training.precision: fp8)", f"change it, {other}",
            )  # fmt: skip
