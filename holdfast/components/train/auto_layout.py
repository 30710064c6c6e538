"""Layout of a run with `parallel: auto`: planned when the run begins, then recorded.

The recorded layout is that of the newest segment, or of the newest launch before the first save. A newer version of the
planner therefore does not change a run. `--replan` plans again.
"""

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint import newest_segments
from holdfast.corpus.starting_model import teacher_of
from holdfast.engines.assignment import Assignment
from holdfast.launch import GangExit
from holdfast.launch.launches import newest_launch, read_exit, read_launch
from holdfast.planning.auto import Proposal, best, layout_fields, with_fields
from holdfast.runtime.environment import in_step_pod
from holdfast.spec import Spec
from holdfast.spec.errors import ExitCode, Problem, SpecError
from holdfast.spec.plan import Value, settings_of, stages_of
from holdfast.spec.rules.parallel import CHOSEN
from holdfast.store import Store

log = logging.getLogger("holdfast.train")

FIELDS = ("training.micro_batch", "training.activation_checkpointing", *(f"parallel.{name}" for name in CHOSEN))


def resolve_layout(spec: Spec, identity: str, store: Store, vocabulary: int, *, replan: bool) -> Spec:
    """The spec with the layout that `parallel.auto` stands for in this run. Other specs are returned unchanged.
    Raises SpecError if no layout can be planned, or if the recorded one no longer fits the spec."""
    if not spec.parallel.auto:
        return spec
    recorded = _after_running_out(spec, identity, store, replan=replan)
    if recorded is None and not replan:
        recorded = _recorded(spec, identity, store)
    if recorded is None:
        chosen = best(spec, vocabulary, here=not in_step_pod(), teacher=teacher_of(spec))
        log.info(
            "parallel: auto is %s: %.0f tokens/s, %.1f GB, by the figures of %s",
            chosen.layout,
            chosen.speed.tokens_per_second,
            chosen.memory.total / 1e9,
            chosen.task.accelerator.name,
        )
        return with_fields(spec, layout_fields(chosen.task, chosen.layout))
    try:
        resolved = spec.with_overrides(recorded | {"parallel.auto": False})
    except SpecError as error:
        problems = "; ".join(f"{problem.field}: {problem.value} {problem.message}" for problem in error.problems)
        message = f"was {_words(recorded)} until now, which does not go with the spec any more ({problems})"
        raise SpecError(
            [Problem("parallel.auto", True, message, "go back to the former spec, or say --replan to plan anew")]
        ) from None
    log.info("parallel: auto is what the run has recorded: %s", _words(recorded))
    return resolved


def _recorded(spec: Spec, identity: str, store: Store) -> dict[str, Any] | None:
    """The fields of the layout that the run continues with. None if it has none, or if the ranks differ and no bits
    are promised."""
    if segments := newest_segments(store, identity):
        settings = dict(segments[-1].plan.settings)
    elif number := newest_launch(store, identity):
        assignment = Assignment.recorded(
            read_launch(store, identity, number).assignment, f"launch {number} of run {identity}"
        )
        settings = settings_of(assignment.training, assignment.parallel, assignment.accelerator, assignment.nodes)
    else:
        return None
    ranks = (settings["parallel.processes"], settings["cluster.nodes"])
    declared = (spec.parallel.processes, spec.cluster.nodes.max)
    if spec.training.determinism == "off" and ranks != declared:
        return None
    return _layout_in(settings)


def _layout_in(settings: Mapping[str, Value]) -> dict[str, Any]:
    """The layout fields among the settings of a plan."""
    return {name: settings[name] for name in FIELDS if name in settings} | {"parallel.stages": stages_of(settings)}


def _words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in fields.items())


def _after_running_out(spec: Spec, identity: str, store: Store, *, replan: bool) -> dict[str, Any] | None:
    """The fields of the layout that was proposed when the newest launch ran out of memory. It is used before the
    first save, or with `--replan`. Raises SpecError if no layout could be proposed."""
    number = newest_launch(store, identity)
    ended = read_exit(store, identity, number)
    if ended is None or not ended.ran_out or (newest_segments(store, identity) and not replan):
        return None
    assignment = Assignment.recorded(
        read_launch(store, identity, number).assignment, f"launch {number} of run {identity}"
    )
    if (assignment.parallel.processes, assignment.nodes) != (spec.parallel.processes, spec.cluster.nodes.max):
        return None  # the proposal does not fit other ranks
    if ended.next_plan is None:
        problem = (
            f"ran out of memory in launch {number}, and no layout of these ranks needs less by the planner's count"
        )
        raise SpecError([Problem("parallel.auto", True, problem, "use more ranks, or a smaller model")])
    settings = settings_of(assignment.training, assignment.parallel, assignment.accelerator, assignment.nodes)
    return _layout_in(settings) | ended.next_plan


def ran_out_of_memory(ending: GangExit) -> bool:
    """Whether a launch ran out of memory, according to its ranks or its launcher."""
    return ending.code == ExitCode.OUT_OF_MEMORY or (
        ending.code == ExitCode.KILLED and "out of memory" in ending.detail.lower()
    )


def recovery_advice(proposal: Proposal | None, *, auto: bool, saved: bool) -> str:
    """Advice for a person after a launch that ran out of memory."""
    if proposal is None:
        return "no layout of these ranks needs less memory by the planner's count: use more ranks, or a smaller model"
    if auto:
        return f"{proposal.words}; the same command{' with --replan' if saved else ''} continues with it"
    return f"{proposal.words}; to continue with it, add to the command: {proposal.options} --replan"
