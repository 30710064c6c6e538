"""Rules of `training.precision`: what each arithmetic supports. The support of the accelerator is checked on it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec

FP8_CAPABILITY = (8, 9)  # the lowest CUDA capability with fp8 products: Ada; Hopper is 9.0
FP8_UNIT = 16  # fp8 kernels need matrices whose sides are multiples of it


def check_precision(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine supports fp16, and only fp16 scales the loss."""
    training = spec.training
    if training.precision == "fp16" and spec.parallel.engine != "torch":
        yield Problem(
            "training.precision",
            "fp16",
            f"is not supported with parallel.strategy: {spec.parallel.strategy}, because no other engine can resume "
            "from the state of its loss scaler",
            "use bf16, or parallel.strategy: ddp or fsdp",
        )
    if training.precision != "fp16" and training.loss_scale != type(training.loss_scale)():
        yield Problem(
            "training.loss_scale",
            None,
            f"has no effect with training.precision: {training.precision}",
            "remove it, or use training.precision: fp16",
        )


def check_fp8(spec: Spec) -> Iterator[Problem]:
    """fp8 needs NVIDIA accelerators, and whole and dense matrices of the torch engine."""
    if spec.training.precision != "fp8":
        return
    parallel, training, other = spec.parallel, spec.training, "or training.precision: bf16"
    unable: tuple[tuple[str, object, bool, str, str], ...] = (
        (
            "cluster.accelerator",
            spec.cluster.accelerator,
            spec.cluster.accelerator != "nvidia",
            "does not support fp8 products here",
            "use nvidia (Ada, Hopper, Blackwell)",
        ),
        (
            "parallel.strategy",
            parallel.strategy,
            parallel.engine != "torch",
            "does not support fp8 here",
            "use ddp or fsdp",
        ),
        (
            "parallel.tensor",
            parallel.tensor,
            parallel.tensor > 1,
            "splits matrices, and each rank would scale its part separately",
            "use 1",
        ),
        (
            "parallel.schedule",
            parallel.schedule,
            parallel.schedule == "zero_bubble",
            "computes the two gradients of a product separately, and in fp8 they are one operation",
            "use 1f1b",
        ),
        (
            "model.experts",
            spec.model.experts,
            spec.model.experts > 1,
            "are multiplied in groups, which do not support fp8 here",
            "use 1",
        ),
        (
            "training.lora.rank",
            training.lora.rank,
            training.lora.rank is not None,
            "creates matrices that are too thin for fp8",
            "remove it",
        ),
        (
            "data.kind",
            spec.data.kind,
            spec.data.kind in ("preferences", "unpaired"),
            "measures small differences between two models, which are not tested in fp8",
            "use another kind",
        ),
    )
    for field, value, is_used, message, remedy in unable:
        if is_used:
            yield Problem(field, value, f"{message} (training.precision: fp8)", f"{remedy}, {other}")
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
    for field, value, side, matrix in sides:
        if side % FP8_UNIT:
            yield Problem(
                field,
                value,
                f"makes {matrix} {side} wide, which is not a multiple of {FP8_UNIT} (training.precision: fp8)",
                f"change it, {other}",
            )
