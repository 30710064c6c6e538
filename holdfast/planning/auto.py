"""`parallel: auto`: the fastest layout that the engines run, for the ranks and the accelerator that a spec declares.

The same spec and version give the same layout. Without a result, a SpecError names the remedy.
`components.train.auto_layout` makes a run keep its first layout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from holdfast.planning.calibration import default_path, read
from holdfast.planning.hardware import ACCELERATORS, Accelerator, accelerator, by_label
from holdfast.planning.layout import Layout, Sharding
from holdfast.planning.practice import Updates
from holdfast.planning.search import MICRO_BATCHES, Candidate, Task, search
from holdfast.planning.shape import Architecture
from holdfast.spec import rules
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.model import Model
from holdfast.spec.rules.objective import objective_name
from holdfast.spec.tree import Spec

# Layouts as fields of a spec: the fields of a layout, parts without a field, and what the engines refuse today.

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
        data=ranks,
        shard={"none": 1, "optimizer": ranks, "full": ranks // parallel.replicas}[sharding],
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        micro_batch=spec.training.micro_batch,
        sharding=sharding,
        checkpointing=spec.training.activation_checkpointing,
        schedule=parallel.schedule,
        chunks=2 if parallel.schedule == "interleaved" else 1,
        offload=parallel.offload,
        on_disk=parallel.offload_path is not None,
    )


def unsaid(layout: Layout) -> list[str]:
    """Parts of a layout without a field in the spec."""
    return [f"{layout.chunks} stages on each rank"] if layout.chunks > 2 else []


def refused(spec: Spec, task: Task, layout: Layout) -> list[str]:
    """Why the engines do not run this layout of a spec today; empty when they do."""
    if missing := unsaid(layout):
        return [f"{part} has no field in the spec" for part in missing]
    fields = {**fields_of(task, layout), "training.auto_micro_batch": False}
    problems = rules.problems(with_fields(spec, fields))
    return [f"{problem.field}: {problem.value} {problem.message}" for problem in problems]


def with_fields(spec: Spec, fields: Mapping[str, Any]) -> Spec:
    """The spec with some fields changed, without checks between fields."""
    for field, value in fields.items():
        spec = _with(spec, field.split("."), value)
    return spec


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})


UNKNOWN_VOCABULARY = 128_256  # of Llama 3, when the vocabulary is known only after a download
LESS = 0.9  # share of the memory of a layout that ran out of it, for the next one; estimates are not exact
MORE = 1.1  # share of an accelerator's memory up to which a trial measures
LEFT_TO_THE_SPEC = ("parallel.processes", "cluster.accelerator", "cluster.nodes.min", "cluster.nodes.max")


def with_micro_batch(spec: Spec, size: int) -> Spec:
    """The spec with a micro-batch instead of `training.micro_batch: auto`, without checks."""
    return with_fields(spec, {"training.micro_batch": size, "training.auto_micro_batch": False})


def micro_batch_candidates(spec: Spec, vocabulary: int, *, here: bool) -> tuple[int, ...]:
    """The sizes that a trial of `training.micro_batch: auto` measures, in ascending order.

    Each divides the batch over the ranks. Where the accelerator is known, none needs clearly more than its memory by
    the planner's count. The smallest one is always included.
    """
    possible = [size for size in MICRO_BATCHES if not rules.problems(with_micro_batch(spec, size))]
    try:
        on = accelerator_of(spec, here=here)
        task = declared_task(spec, on, vocabulary)
    except SpecError:
        return tuple(possible)
    limit = MORE * on.memory if on.kind == spec.cluster.accelerator else math.inf
    layouts = {size: layout_of(with_micro_batch(spec, size)) for size in possible}
    fitting = [size for size, layout in layouts.items() if Candidate(task, layout).memory.total <= limit]
    return tuple(fitting or possible[:1])


def accelerator_of(spec: Spec, *, here: bool) -> Accelerator:
    """The accelerator of the spec's ranks.

    It is `cluster.product`, otherwise the one that `cluster.node_selector` names. Where the ranks run `here`, it is
    otherwise the one that `holdfast calibrate` measured on this machine. Raises SpecError when none of them is known.
    """
    if spec.cluster.product is not None:
        return accelerator(spec.cluster.product)
    accelerators = {
        candidate.name: candidate for label in spec.cluster.node_selector.values() if (candidate := by_label(label))
    }
    if len(accelerators) == 1:
        return next(iter(accelerators.values()))
    if here and default_path().exists():
        calibration = read(default_path())
        if calibration.machine.kind == spec.cluster.accelerator:
            return calibration.accelerator()
    remedy = f"write cluster.product: {', '.join(ACCELERATORS)}"
    if here:
        remedy += f"; or measure this machine: holdfast calibrate{_kind(spec)}"
    raise SpecError([Problem("cluster.product", None, "is not set, and the planner guesses no accelerator", remedy)])


def _kind(spec: Spec) -> str:
    kind = spec.cluster.accelerator
    return "" if kind == "cpu" else f" -a {kind} --ranks {spec.parallel.processes}"


def vocabulary_of(spec: Spec) -> int | None:
    """The number of tokens of the spec's tokenizer; None where only its file has it."""
    return spec.data.tokenizer.vocabulary if spec.data.tokenizer.kind == "bpe" else None


def task_of(spec: Spec, here: Accelerator, gpus: int, vocabulary: int, teacher: Model | None = None) -> Task:
    """The training task of the spec on `gpus` accelerators. `teacher` is that of a distillation, if it can be read.
    Raises SpecError when these are not whole nodes."""
    if gpus > here.node and gpus % here.node:
        declared = gpus == spec.world_size
        field, value = ("parallel.processes", spec.parallel.processes) if declared else ("--gpus", gpus)
        remedy = f"use a multiple of {here.node}{f', or at most {here.node}' if declared else ''}"
        raise SpecError([Problem(field, value, f"makes no whole nodes of {here.node} {here.name}", remedy)])
    training = spec.training
    guide = None if teacher is None else Architecture.of(teacher, vocabulary)
    return Task(
        Architecture.of(spec.model, vocabulary),
        here,
        gpus,
        training.steps,
        training.global_batch,
        training.precision,
        training.micro_batch if training.determinism == "elastic" else None,
        updates=Updates.of(training, objective_name(spec), guide),
        samples=BatchSizes.of(training).before(training.steps),
    )


def declared_task(spec: Spec, here: Accelerator, vocabulary: int, teacher: Model | None = None) -> Task:
    """The task on the ranks that the spec declares, which may fill nodes only partly."""
    node = min(here.node, spec.parallel.processes)
    return task_of(spec, here.model_copy(update={"node": node}), spec.world_size, vocabulary, teacher)


def layout_fields(task: Task, layout: Layout) -> dict[str, Any]:
    """The spec fields that a layout sets, without those that declare the ranks."""
    return {name: value for name, value in fields_of(task, layout).items() if name not in LEFT_TO_THE_SPEC}


def best(spec: Spec, vocabulary: int | None, *, here: bool, teacher: Model | None = None) -> Candidate:
    """The layout for `parallel: auto`. `vocabulary` overrides the spec's, and `teacher` is that of a distillation.
    Raises SpecError without any layout."""
    size = vocabulary or vocabulary_of(spec) or UNKNOWN_VOCABULARY
    found_here = accelerator_of(spec, here=here)
    if found_here.kind != spec.cluster.accelerator:
        problem = f"is of the kind {found_here.kind}, and cluster.accelerator says {spec.cluster.accelerator}"
        raise SpecError([Problem("cluster.product", found_here.name, problem, "make the two agree")])
    return _best(spec, declared_task(spec, found_here, size, teacher))


def _best(spec: Spec, task: Task, below: float | None = None) -> Candidate:
    """The fastest layout that the torch engine runs, among those that need less memory than `below` bytes.

    Host memory is not counted, so offload stays a person's decision.
    """

    def runs(layout: Layout) -> bool:
        if layout.sharding == "optimizer":  # needs DeepSpeed, which is not always installed
            return False
        if below is not None and Candidate(task, layout).memory.total >= below:
            return False
        if refused(spec, task, layout):
            return False
        return not rules.problems(with_fields(spec, layout_fields(task, layout)))  # for any number of its nodes

    result = search(task, runs, count=1, offload=False)
    if result.today is not None:
        return result.today
    gigabytes = result.smallest.memory.total / 1e9
    message = (
        f"finds no layout that fits into {task.accelerator.memory / 1e9:.0f} GB of {task.accelerator.name}: the least "
        f"takes {gigabytes:.0f} GB"
        if not result.fitting
        else "finds no layout that fits and that the engines run"
    )
    raise SpecError(
        [
            Problem(
                "parallel.auto",
                True,
                message,
                "use more ranks, or a smaller model; holdfast plan SPEC says what it needs",
            )
        ]
    )


@dataclass(frozen=True)
class Proposal:
    """A layout that may fit after another one ran out of memory."""

    fields: Mapping[str, Any]  # the changed fields of the spec
    words: str

    @property
    def options(self) -> str:
        """The fields as command-line options."""
        return " ".join(f"--set {name}={_value(value)}" for name, value in self.fields.items())


def next_plan(spec: Spec, vocabulary: int, *, here: bool) -> Proposal | None:
    """The fastest layout of the same ranks that needs clearly less memory than the spec's, which ran out; None without
    one.

    An unknown accelerator gets the H100's figures. The speed order of layouts is then a guess; their memory is not.
    """
    try:
        on = accelerator_of(spec, here=here)
    except SpecError:
        unknown = {"kind": spec.cluster.accelerator, "memory": math.inf, "node": spec.parallel.processes}
        on = ACCELERATORS["H100"].model_copy(update=unknown)
    task = declared_task(spec, on, vocabulary)
    failed = Candidate(task, layout_of(spec)).memory.total
    try:
        chosen = _best(spec, task, below=LESS * min(failed, on.memory))
    except SpecError:
        return None
    fields = layout_fields(task, chosen.layout)
    changed = {name: value for name, value in fields.items() if value != _value_at(spec, name)}
    comparison = f"{chosen.memory.total / 1e9:.3g} GB by the planner's count, where this one takes {failed / 1e9:.3g}"
    return Proposal(changed, f"the next plan that fits is {chosen.layout}: {comparison}")


def _value_at(spec: Spec, field: str) -> object:
    """The value at a dotted path, such as `training.steps`."""
    return reduce(getattr, field.split("."), spec)


def _value(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
