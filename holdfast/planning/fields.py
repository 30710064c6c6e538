"""Layouts as fields of a spec: the fields of a layout, parts without a field, and what the engines refuse today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.planning.layout import Layout, Sharding
from holdfast.planning.search import Task
from holdfast.spec import rules
from holdfast.spec.tree import Spec

STRATEGIES = {"none": "ddp", "optimizer": "zero1", "full": "fsdp"}
# zero2 also shards gradients. The planner has no such sharding and counts them as whole.
SHARDINGS: dict[str, Sharding] = {
    "ddp": "none",
    "fsdp": "full",
    "zero1": "optimizer",
    "zero2": "optimizer",
    "zero3": "full",
}


def fields_of(task: Task, layout: Layout) -> dict[str, Any]:
    """The spec fields of this layout, by dotted names."""
    processes = min(task.accelerator.node, task.gpus)
    nodes = task.gpus // processes
    return {
        "training.micro_batch": layout.micro_batch,
        "training.activation_checkpointing": layout.checkpointing,
        "parallel.auto": False,
        "parallel.processes": processes,
        "parallel.strategy": STRATEGIES[layout.sharding],
        "parallel.replicas": layout.data // layout.shard if layout.sharding == "full" else 1,
        "parallel.reshard": "never" if layout.keeps_gathered else "always",
        "parallel.offload": layout.offload,
        **({} if layout.on_disk else {"parallel.offload_path": None}),
        "parallel.tensor": layout.tensor,
        "parallel.pipeline": layout.pipeline,
        "parallel.stages": None,
        "parallel.schedule": layout.schedule,
        "parallel.context": layout.context,
        "parallel.expert": layout.expert,
        "cluster.accelerator": task.accelerator.kind,
        "cluster.nodes.min": nodes,
        "cluster.nodes.max": nodes,
    }


def layout_of(spec: Spec) -> Layout:
    """The layout in a spec, for the ranks that it declares."""
    parallel, ranks = spec.parallel, spec.data_parallel_size
    sharding = SHARDINGS[parallel.strategy]
    return Layout(
        data=ranks, shard={"none": 1, "optimizer": ranks, "full": ranks // parallel.replicas}[sharding],
        tensor=parallel.tensor, pipeline=parallel.pipeline, context=parallel.context, expert=parallel.expert,
        micro_batch=spec.training.micro_batch, sharding=sharding,
        checkpointing=spec.training.activation_checkpointing, schedule=parallel.schedule,
        chunks=2 if parallel.schedule == "interleaved" else 1, offload=parallel.offload,
        on_disk=parallel.offload_path is not None,
    )  # fmt: skip


def unsaid(layout: Layout) -> list[str]:
    """Parts of a layout without a field in the spec."""
    return [f"{layout.chunks} stages on each rank"] if layout.chunks > 2 else []


def refused(spec: Spec, task: Task, layout: Layout) -> list[str]:
    """Why the engines do not run this layout of a spec today; empty when they do."""
    if missing := unsaid(layout):
        return [f"{what} has no field in the spec" for what in missing]
    found = rules.problems(with_fields(spec, fields_of(task, layout)))
    return [f"{problem.field}: {problem.value} {problem.message}" for problem in found]


def with_fields(spec: Spec, fields: Mapping[str, Any]) -> Spec:
    """The spec with some fields changed, without checks between fields."""
    for field, value in fields.items():
        spec = _with(spec, field.split("."), value)
    return spec


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})
