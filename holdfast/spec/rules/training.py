"""Rules of `training` and `checkpoint`: the schedule, the optimizer, compression, anomalies, local tiers."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.training import KEEPING
from holdfast.spec.tree import Spec


def check_local_tiers(spec: Spec) -> Iterator[Problem]:
    """Copies on a disk need a path."""
    disk = spec.checkpoint.disk
    if disk.every_steps is not None and disk.path is None:
        yield Problem(
            "checkpoint.disk.path",
            None,
            "is required by checkpoint.disk.every_steps",
            "name a folder on a disk of the nodes, such as /scratch/holdfast",
        )
    if disk.path is not None and (not disk.path.startswith("/") or ".." in disk.path.split("/")):
        yield Problem("checkpoint.disk.path", disk.path, "is not an absolute path", "use a path that begins with /")


def check_elastic_determinism(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine has sums that do not depend on the number of ranks."""
    if spec.training.determinism == "elastic" and spec.parallel.engine != "torch":
        yield Problem(
            "training.determinism",
            "elastic",
            f"is not supported with parallel.strategy: {spec.parallel.strategy}",
            "use parallel.strategy: ddp or fsdp, or training.determinism: exact",
        )


def check_learning_rate_scaling(spec: Spec) -> Iterator[Problem]:
    """A learning rate that scales with the batch names the batch for which it is set."""
    schedule = spec.training.schedule
    if schedule.scaling != "none" and schedule.base_batch is None:
        yield Problem(
            "training.schedule.base_batch",
            None,
            f"is required by training.schedule.scaling: {schedule.scaling}",
            "name the global batch for which training.optimizer.learning_rate is set",
        )
    if schedule.scaling == "none" and schedule.base_batch is not None:
        yield Problem(
            "training.schedule.base_batch",
            schedule.base_batch,
            "has no effect without training.schedule.scaling",
            "use scaling: linear or sqrt, or remove it",
        )


def check_compression(spec: Spec) -> Iterator[Problem]:
    """Gradients are compressed only between whole replicas, whose sums have a fixed order and no additional errors."""
    training, parallel = spec.training, spec.parallel
    if training.gradient_compression == "none":
        return
    field, kind = "training.gradient_compression", training.gradient_compression
    if parallel.strategy != "ddp" or parallel.tensor * parallel.pipeline * parallel.context * parallel.expert > 1:
        yield Problem(
            field,
            kind,
            "is only for whole replicas, because sharded or split models send parts of gradients",
            "use parallel.strategy: ddp without other degrees, or none",
        )
    if training.determinism == "elastic":
        yield Problem(
            field,
            kind,
            "rounds sums of ranks, so bits depend on their number, and training.determinism is elastic",
            "use none, or training.determinism: exact",
        )
    if kind in KEEPING and (training.precision == "fp16" or training.anomalies.action == "skip"):
        because = "precision: fp16" if training.precision == "fp16" else "anomalies.action: skip"
        yield Problem(
            field,
            kind,
            f"keeps the error of each gradient, and training.{because} could make it infinite or NaN",
            "use fp16, bf16 or none; or bf16 arithmetic and anomalies.action: rewind",
        )


def check_optimizer(spec: Spec) -> Iterator[Problem]:
    """LAMB needs norms of whole tensors. The torch engine sums them if every rank has a part of every tensor."""
    parallel = spec.parallel
    if spec.training.optimizer.kind != "lamb":
        return
    unable = {
        "strategy": parallel.strategy if parallel.engine == "deepspeed" else None,
        "pipeline": parallel.pipeline if parallel.pipeline > 1 else None,
        "offload": parallel.offload if parallel.offload != "none" else None,
    }
    for field, value in unable.items():
        if value is not None:
            yield Problem(
                "training.optimizer.kind",
                "lamb",
                f"is not supported with parallel.{field}: {value}",
                "use adamw, or parallel.strategy: ddp or fsdp without pipeline and offload",
            )


def check_anomalies(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine can discard an update."""
    anomalies = spec.training.anomalies
    if anomalies.action != "stop" and spec.parallel.engine != "torch":
        yield Problem(
            "training.anomalies.action",
            anomalies.action,
            f"is not supported with parallel.strategy: {spec.parallel.strategy}, because DeepSpeed applies an update "
            "before it can be discarded",
            "use parallel.strategy: ddp or fsdp, or training.anomalies.action: stop",
        )


def check_warmup(spec: Spec) -> Iterator[Problem]:
    """The warm-up ends before the run does. A factor of user code replaces warm-up and decay."""
    if spec.training.schedule.warmup_steps >= spec.training.steps:
        yield Problem(
            "training.schedule.warmup_steps",
            spec.training.schedule.warmup_steps,
            f"is not below training.steps = {spec.training.steps}",
            f"use at most {spec.training.steps - 1}",
        )
    schedule = spec.training.schedule
    for name in ("kind", "warmup_steps", "final_ratio") if schedule.factor is not None else ():
        if (value := getattr(schedule, name)) != type(schedule).model_fields[name].default:
            yield Problem(f"training.schedule.{name}", value, "is not used with a factor of your own", "remove it")
