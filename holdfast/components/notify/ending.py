"""Outcome of an execution of the DAG.

The records of its steps decide: a failed step, an interruption, the verdict, the trigger's decision. The engine's
status counts only if they are silent. KFP gives the exit handler the state of an ML Metadata execution, Argo the phase
of a Workflow. Neither shows a verdict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.runtime.environment import in_step_pod
from holdfast.spec.errors import DataError, ExitCode
from holdfast.spec.json_parsing import parse_json_value
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome, first_failure

ExitStatus = Literal["succeeded", "failed", "cancelled"]
Headline = Literal["registered", "not blessed", "nothing to do", "cancelled", "failed", "succeeded"]

NOT_DUE, NOT_BLESSED = "not_due", "not_blessed"  # prefixes of results that end a DAG early and successfully
SKIPPED = "skipped"  # prefix of the result of a step whose condition did not hold
_LAST = {"trigger": NOT_DUE, "evaluate": NOT_BLESSED, "compare": NOT_BLESSED, "register": ""}
_HEADLINES: dict[str, Headline] = {
    "trigger": "nothing to do",
    "evaluate": "not blessed",
    "compare": "not blessed",
    "register": "registered",
}
# Argo and Ray, kfp.local, KFP (COMPLETE, CACHED), Slurm (COMPLETED). KFP does not use SUCCEEDED here.
_SUCCEEDED = frozenset({"succeeded", "success", "complete", "completed", "cached"})
_CANCELLED = frozenset({"cancelled", "canceled", "cancelling", "canceling", "stopped"})
MOST_INTERRUPTIONS = 3  # tries before the last one; this often, nodes were reclaimed and no person cancelled
_SHUT_DOWN = "shutdown with strategy"  # Argo's message for nodes of a stopped Workflow; its phase is Failed


@dataclass(frozen=True)
class PipelineExit:
    """How an execution of the DAG ended, as its engine and its steps report it."""

    status: str  # the engine's, in any case
    failed_step: str = ""
    message: str = ""  # of the failed step
    exit_code: int | None = None  # of the failed step; None: the one in `message`
    log_place: str = ""  # location of its log; empty: this machine's newest log of the run
    outcomes: Sequence[Outcome] = ()  # the records of the steps
    done: Sequence[str] = ()  # what the exit handler did
    unknown: Sequence[str] = ()  # what it could not determine


def exit_status_of(
    word: str, outcomes: Iterable[Outcome] = (), *, stopped: bool = False, message: str = ""
) -> ExitStatus:
    """The outcome of the DAG. `word` is the engine's status in any case, and `outcomes` are those of this
    execution's steps. `stopped` is true if a person stopped it on this machine. `message` is the engine's message
    about the failed step."""
    counted, status = [outcome for outcome in outcomes if outcome.step != EXIT_HANDLER], word.lower().split()[:1]
    if stopped or _CANCELLED & {*status} or _SHUT_DOWN in message:
        return "cancelled"
    if any(_ends_well(outcome) for outcome in counted):
        return "succeeded"
    succeeded = bool(_SUCCEEDED & {*status})
    if compared(counted):  # the comparison leaves failed trials out
        counted = [outcome for outcome in counted if not outcome.part]
    failures = [outcome for outcome in counted if outcome.exit_code or (outcome.ended is None and not succeeded)]
    if not failures:
        return "succeeded" if succeeded else "failed"
    first = first_failure(failures)
    assert first is not None and first.exit_code is not None
    if ExitCode.is_interruption(first.exit_code) and first.interrupted < MOST_INTERRUPTIONS:
        return "cancelled"
    return "failed"


def headline_of(
    ending: ExitStatus, outcomes: Iterable[Outcome] = (), *, verdict: str = "", registered: bool = False
) -> Headline:
    """The headline of an execution for a person. It comes from the records of its steps, else from the store's
    `verdict` and whether the model is `registered`."""
    if ending != "succeeded":
        return ending
    last = next((outcome for outcome in reversed([*outcomes]) if _ends_well(outcome)), None)
    if last is not None:
        return _HEADLINES[last.step]
    if registered:
        return "registered"
    return "not blessed" if verdict == NOT_BLESSED else "succeeded"


def not_due(outcomes: Iterable[Outcome]) -> str:
    """Why a scheduled execution had nothing to do. Empty if it had, or was not scheduled."""
    result = next(
        (outcome.result for outcome in outcomes if outcome.step == "trigger" and outcome.result.startswith(NOT_DUE)), ""
    )
    return result.removeprefix(NOT_DUE).lstrip(": ") or ("no retraining is due" if result else "")


def compared(outcomes: Iterable[Outcome]) -> bool:
    """Whether the trials of a sweep were compared."""
    return any(outcome.step == "compare" and outcome.exit_code == 0 for outcome in outcomes)


def _ends_well(outcome: Outcome) -> bool:
    """Whether the DAG ends successfully with this step, with nothing left to do. A trial of a sweep ends no DAG."""
    early, complete = _LAST.get(outcome.step), outcome.exit_code == 0 and not outcome.part
    return (
        early is not None and complete and outcome.result.startswith(early) and not outcome.result.startswith(SKIPPED)
    )


# Argo's report of a Workflow's failed nodes: the first of them, as text.
#
# It fails on no input from Argo. The step's own message is in its outcome in the store.


def first_failed_node(failures: str) -> tuple[str, str]:
    """The template and the message of the first node in `workflow.failures`, or empty strings.

    Argo quotes this list once more than its other parameters, and names retries as `step(1)`.
    """
    nodes = [node for node in _decoded(failures) if isinstance(node, dict) and node.get("templateName")]
    if not nodes:
        return "", ""
    first = min(nodes, key=lambda node: str(node.get("finishedAt") or "~"))
    return str(first["templateName"]), str(first.get("message") or first.get("phase") or "")


def _decoded(text: str) -> list[Any]:
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = parse_json_value(value, "workflow.failures")
            except DataError:
                return []
    return value if isinstance(value, list) else []


def end_jobs_left(spec: str, overrides: Sequence[str], run_id: str) -> tuple[list[str], list[str]]:
    """Sentences about the jobs on the cluster that were ended, and about what remains unknown. Both lists are empty
    outside a step's pod, or without a run."""
    if not run_id or not in_step_pod():
        return [], []
    from holdfast.launch.kubernetes.orphaned_jobs import end_jobs_of_run

    return end_jobs_of_run(spec, overrides, run_id)
