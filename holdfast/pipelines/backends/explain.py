"""Reasons, exit codes, skips and missing steps, from a run's own records, for the status that an engine lists.

An engine knows the state of a step. The store has the causes of failures and skips, and what a training waits for.
Raises nothing while the store is unavailable: the engine's list then stays as it is.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from holdfast.components.notify.ending import NOT_BLESSED, not_due
from holdfast.pipelines.backends.interface import (
    CANCELED,
    FAILED,
    NOT_BEGUN,
    RUNNING,
    SKIPPED,
    SUCCEEDED,
    UNFINISHED,
    RunStatus,
    StepStatus,
    ended_with,
    step_called,
)
from holdfast.pipelines.table import EDGES, SCHEDULED_START, START, SWEEP_EDGES, Edge, edges_of, start_of
from holdfast.runtime.environment import store_url
from holdfast.scoring import newest_record
from holdfast.spec import parse_spec
from holdfast.spec.errors import DataError, ExitCode, HoldfastError, MissingError
from holdfast.steps.jobs import outcomes_in
from holdfast.steps.outcomes import EXIT_HANDLER, KILLED, Outcome, run_of
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_json_object
from holdfast.telemetry.event_base import in_words
from holdfast.telemetry.event_log import newest_objects
from holdfast.telemetry.events import AttemptBegan, LaunchPending, Progress

log = logging.getLogger("holdfast.status")

DEADLINE = 5.0  # seconds for the store, including retries
NEWEST = 4  # event objects to read: the launcher and the ranks each write their own


@dataclass(frozen=True)
class Known:
    """The store's records of one execution."""

    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # by name
    reasons: Sequence[str] = ()  # of the verdict
    waits: str = ""  # what the training currently waits for
    problem: str = ""  # why the store cannot be read
    start: str = START  # the first step of the DAG, and its edges
    edges: Sequence[Edge] = EDGES


class Given(Protocol):
    """The inputs of an execution, as its engine has them."""

    @property
    def spec(self) -> str:
        """The text of the spec."""

    @property
    def overrides(self) -> list[str]:
        """The changes to the spec. Raises SpecError."""

    @property
    def salt(self) -> str:
        """The salt, which separates runs of the same inputs."""


def store_named_by(given: Given) -> str:
    """The root of the store that the spec names; empty where it names none or is invalid."""
    with suppress(HoldfastError):
        return parse_spec(given.spec, given.overrides).store or ""
    return ""


def known_of(root: str, job: str, given: Given, status: RunStatus) -> Known:
    """The records in the store at `root` (default: this machine's) of the execution that its steps call `job`."""
    start, edges = _dag_of(given)
    try:
        store = open_store(root or store_url(), deadline=DEADLINE)
        records = outcomes_in(store, job)
        outcomes, run_id = {outcome.name: outcome for outcome in records}, _run_id(given, records)
        training = any(step_called(step.name) == "train" and step.state == RUNNING for step in status.steps)
        return Known(
            outcomes,
            verdict_reasons(store, run_id) if run_id and "evaluate" in outcomes else (),
            waits_for(store, run_id) if run_id and training else "",
            start=start,
            edges=edges,
        )
    except (HoldfastError, OSError, ValueError) as error:
        log.debug("the records of %s cannot be read: %s", job, error)
        return Known(problem=f"the records in the store cannot be read: {error}", start=start, edges=edges)


def _dag_of(given: Given) -> tuple[str, Sequence[Edge]]:
    """The first step and the edges of the DAG that a spec has. Retraining and shares of a corpus are left out."""
    with suppress(HoldfastError):
        spec = parse_spec(given.spec, given.overrides)
        if spec.train.script is not None:
            return start_of(spec), edges_of(spec)
    return START, EDGES


def explained(status: RunStatus, known: Known) -> RunStatus:
    """Add the records of the steps to `status`. An ended run also gets its missing steps."""
    steps = [_explained(step, status, known) for step in status.steps]
    steps = _completed(status, steps, known)
    unexplained = next((step for step in steps if step.state == FAILED and not step.error), None)
    message = status.message
    if known.problem and unexplained is not None and not message:
        message = f"why {unexplained.name} failed is not known: {known.problem}"
    return replace(status, steps=tuple(steps), message=message, exit_code=ended_with(status.state, steps))


def waits_for(store: Store, run_id: str) -> str:
    """The reason why the training of a run waits, from its newest events; empty while its ranks work."""
    newest = None
    for events in islice(newest_objects(store, run_id), NEWEST):
        for event in events:
            if isinstance(event, LaunchPending | Progress | AttemptBegan) and (
                newest is None or event.time >= newest.time
            ):
                newest = event
    return newest.reason if isinstance(newest, LaunchPending) else ""


def verdict_reasons(store: Store, run_id: str) -> list[str]:
    """The reasons of the newest verdict on a run."""
    verdicts: list[tuple[str, dict[str, Any]]] = []
    for info in store.list(layout.run(run_id, "evaluations/")):
        if info.key.endswith(".json"):
            with suppress(DataError, MissingError):
                verdicts.append((info.key, read_json_object(store, info.key)))
    newest = newest_record(verdicts)[1]
    return [str(reason) for reason in newest.get("reasons") or []]


def reason_of(outcome: Outcome) -> str:
    """Why a step failed: its exit code, and the first line of its reason."""
    reason = next(iter(outcome.reason.splitlines()), "")
    code = f"exit code {outcome.exit_code} ({in_words(outcome.exit_code or 0)})"
    return f"{code}: {reason}" if reason else code


def _run_id(given: Given, outcomes: list[Outcome]) -> str:
    """The id of the run that the steps work on; empty where it is unknown."""
    try:
        return run_of(outcomes, given.spec, given.overrides, given.salt)
    except HoldfastError:  # invalid parameters
        return run_of(outcomes, "", (), "")


def _explained(step: StepStatus, status: RunStatus, known: Known) -> StepStatus:
    outcome = known.outcomes.get(step.name)
    has_ended = outcome is not None and outcome.ended is not None
    state, error, code = step.state, step.error, step.exit_code
    if not status.unfinished and state in UNFINISHED:  # an outdated row
        state = NOT_BEGUN if outcome is None else SUCCEEDED if has_ended and not outcome.exit_code else status.state
    if outcome is not None and not has_ended and state == FAILED and not error:
        error, code = KILLED, int(ExitCode.KILLED)
    if outcome is not None and has_ended and outcome.exit_code and state not in (SUCCEEDED, RUNNING):
        error, code = reason_of(outcome), outcome.exit_code
    ended_by_a_person = status.state == CANCELED and (not code or code == ExitCode.KILLED)
    if state == FAILED and (ExitCode.is_interruption(code) or ended_by_a_person):
        state = CANCELED
    if state == RUNNING and known.waits and step_called(step.name) == "train":
        error = f"waits: {known.waits}"
    return replace(step, state=state, error=error, exit_code=code)


def _completed(status: RunStatus, steps: list[StepStatus], known: Known) -> list[StepStatus]:
    """The steps in the order of the DAG, with skipped steps and steps that never began."""
    steps_by_name = {step_called(step.name): step for step in steps}
    sweep = "compare" in steps_by_name or any(step.name != step_called(step.name) for step in steps)
    all_steps = list(steps)

    def add(step: StepStatus) -> None:
        position = next((index for index, other in enumerate(all_steps) if other.name == EXIT_HANDLER), len(all_steps))
        all_steps.insert(position, step)

    if not status.unfinished and not {known.start, SCHEDULED_START} & {*steps_by_name}:
        steps_by_name[known.start] = StepStatus(known.start, NOT_BEGUN)
        add(steps_by_name[known.start])
    for edge in SWEEP_EDGES if sweep else known.edges:
        if edge.before == "trigger" and "trigger" not in steps_by_name:
            continue
        predecessor, successor = steps_by_name.get(edge.before), steps_by_name.get(edge.after)
        if successor is not None and successor.state not in (NOT_BEGUN, SKIPPED.upper()):
            continue
        reason, name = _why_skipped(edge.before, known), successor.name if successor is not None else edge.after
        skipped = predecessor is not None and (
            predecessor.state == SKIPPED.upper() or (predecessor.state == SUCCEEDED and bool(reason))
        )
        passed = (
            predecessor is not None and predecessor.state == SUCCEEDED and bool(edge.when) and status.state == SUCCEEDED
        )
        if skipped or passed or (successor is not None and successor.state == SKIPPED.upper()):
            reason = reason or (predecessor.error if predecessor is not None else "")
            new_step = StepStatus(name, SKIPPED.upper(), None, reason, exit_code=0)
        elif not status.unfinished:
            new_step = StepStatus(name, NOT_BEGUN)
        else:
            continue
        steps_by_name[edge.after] = new_step
        if successor is not None:
            all_steps = [new_step if step is successor else step for step in all_steps]
        else:
            add(new_step)
    return all_steps


def _why_skipped(before: str, known: Known) -> str:
    """Why the successors of the step `before` are skipped; empty where they are not."""
    if before == "trigger":
        return not_due(known.outcomes.values())
    outcome = known.outcomes.get(before)
    if before in ("evaluate", "compare") and outcome is not None and outcome.result.startswith(NOT_BLESSED):
        return " ".join(known.reasons) or "not blessed"
    return ""
