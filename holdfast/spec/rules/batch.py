"""Rules of the batch: it divides over the ranks, and a ramp has whole increments."""

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.rules.model import nearest_multiples
from holdfast.spec.training import AUTO
from holdfast.spec.tree import Spec

MOST_INCREMENTS = 10_000  # of a ramp; each is a row of a table in every rank


def check_batch_size(spec: Spec) -> Iterator[Problem]:
    """The global batch is a whole number of micro-batches on every rank."""
    model_ranks = spec.parallel.tensor * spec.parallel.pipeline * spec.parallel.context
    if spec.world_size % model_ranks:
        yield Problem(
            "parallel.processes",
            spec.parallel.processes,
            f"gives {spec.world_size} ranks, which do not split into groups of tensor x pipeline x context = "
            f"{model_ranks}",
            f"make processes x nodes a multiple of {model_ranks}",
        )
        return
    if spec.training.determinism == "elastic":
        yield from _check_grains(spec)
        return
    if spec.parallel.auto:  # the planner considers only layouts that divide it
        return
    unit = spec.training.micro_batch * spec.data_parallel_size
    if spec.training.global_batch % unit:
        yield Problem(
            "training.global_batch",
            spec.training.global_batch,
            f"is not a multiple of micro_batch x data-parallel ranks = {spec.training.micro_batch} x "
            f"{spec.data_parallel_size} = {unit}",
            f"use {nearest_multiples(spec.training.global_batch, unit)}, or change training.micro_batch",
        )


def check_auto_micro_batch(spec: Spec) -> Iterator[Problem]:
    """A trial chooses the micro-batch only where it is free: not in the run id, and not chosen by the planner."""
    training, field = spec.training, "training.micro_batch"
    if not training.auto_micro_batch:
        return
    if training.micro_batch != 1:
        remedy = "remove training.auto_micro_batch, or write micro_batch: auto"
        yield Problem(field, training.micro_batch, "is a number, and training.auto_micro_batch is true", remedy)
    if training.determinism == "elastic":
        message = "is not possible with training.determinism: elastic, where the number is part of the run id"
        yield Problem(field, AUTO, message, "write a number, or use training.determinism: exact")
    if spec.parallel.auto:
        yield Problem(field, AUTO, "is chosen by parallel: auto", "remove it, or give the layout yourself")
    if spec.parallel.engine == "deepspeed":
        message = f"is not supported with parallel.strategy: {spec.parallel.strategy}"
        yield Problem(field, AUTO, message, "write a number, or use parallel.strategy: fsdp")


def _check_grains(spec: Spec) -> Iterator[Problem]:
    """Under elastic determinism the global batch is a whole number of micro-batches, at least one for each rank."""
    training, ranks = spec.training, spec.data_parallel_size
    grains, rest = divmod(training.global_batch, training.micro_batch)
    if rest:
        yield Problem(
            "training.global_batch",
            training.global_batch,
            f"is not a multiple of training.micro_batch = {training.micro_batch}",
            f"use {nearest_multiples(training.global_batch, training.micro_batch)}",
        )
    elif ranks > grains:
        yield Problem(
            "training.micro_batch",
            training.micro_batch,
            f"leaves {grains} micro-batches of the global batch for {ranks} ranks",
            f"use at most {max(1, training.global_batch // ranks)}, or fewer ranks",
        )


def check_batch_ramp(spec: Spec) -> Iterator[Problem]:
    """A ramp of the batch has whole increments, and each divides over the ranks like the global batch."""
    training, ramp = spec.training, spec.training.batch_ramp
    field = "training.batch_ramp"
    if ramp.start is None or ramp.increment is None:
        if ramp.start is not None or ramp.increment is not None:
            present, missing = ("start", "increment") if ramp.increment is None else ("increment", "start")
            yield Problem(
                f"{field}.{missing}", None, f"is required by {field}.{present}", f"add it, or remove {present}"
            )
        return
    growth = training.global_batch - ramp.start
    if growth <= 0 or growth % ramp.increment:
        yield Problem(
            f"{field}.increment",
            ramp.increment,
            f"does not lead from {ramp.start} to training.global_batch = {training.global_batch}",
            "use a start below it, and an increment that divides the difference",
        )
        return
    if growth // ramp.increment > min(ramp.steps, MOST_INCREMENTS):
        yield Problem(
            f"{field}.increment",
            ramp.increment,
            f"gives {growth // ramp.increment} increments in {ramp.steps} steps",
            f"use a larger increment, for at most one increment per step and {MOST_INCREMENTS} in all",
        )
    elastic = training.determinism == "elastic"
    if spec.parallel.auto and not elastic:  # the planner considers only layouts that divide it
        return
    unit = training.micro_batch * (1 if elastic else max(1, spec.data_parallel_size))
    for name, value in (("start", ramp.start), ("increment", ramp.increment)):
        if value % unit:
            yield Problem(
                f"{field}.{name}",
                value,
                f"is not a multiple of {unit}, the micro-batch" + ("" if elastic else " times the data-parallel ranks"),
                f"use {nearest_multiples(value, unit)}, or another training.micro_batch",
            )
    if elastic and ramp.start // training.micro_batch < spec.data_parallel_size:
        yield Problem(
            f"{field}.start",
            ramp.start,
            f"leaves some of {spec.data_parallel_size} ranks without a micro-batch",
            f"use at least {spec.data_parallel_size * training.micro_batch}, or fewer ranks",
        )
    unable: tuple[tuple[str, object, bool, str], ...] = (
        (
            "parallel.strategy",
            spec.parallel.strategy,
            spec.parallel.engine == "deepspeed",
            "sets the number of accumulated micro-batches only once (DeepSpeed)",
        ),
        (
            "parallel.pipeline",
            spec.parallel.pipeline,
            spec.parallel.pipeline > 1,
            "has a schedule for a fixed number of micro-batches",
        ),
        (
            "data.shuffle.kind",
            spec.data.shuffle.kind,
            spec.data.shuffle.kind == "blocks",
            "distributes samples over a fixed number of rows of a batch",
        ),
    )
    for other, value_of_it, is_used, message in unable:
        if is_used:
            yield Problem(
                other, value_of_it, f"{message}, and {field} changes it", f"use another value, or remove {field}"
            )
