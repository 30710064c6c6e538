"""The protocol of every backend that runs the DAG: this machine, ssh, Kubeflow, Argo, Slurm, Ray.

Every backend returns the existing run when the same request is submitted again. A run is named by the backend's own id,
by Holdfast's run id or its beginning, or by the name of its spec. Nothing is printed here. A backend renders the DAG of
`holdfast.pipelines.table` and defines none.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.pipelines.backends.capabilities import Capabilities
from holdfast.pipelines.backends.rank_shell import RankShell
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import ExitCode, MissingError
from holdfast.steps import STEPS

PENDING, RUNNING, SUCCEEDED, FAILED, CANCELED = "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELED"
NOT_BEGUN = "NOT_BEGUN"  # state of a step that never ran before its run ended
SHOWN_IDS = 8  # candidates in an error
SKIPPED = "skipped"  # beginning of the outcome of a step whose condition did not hold
UNFINISHED = (PENDING, RUNNING, "PAUSED", "CANCELING")


@dataclass(frozen=True)
class StepStatus:
    """A step of a run, as the backend reports it."""

    name: str
    state: str
    seconds: float | None = None  # elapsed time
    error: str = ""
    pods: tuple[str, ...] = ()  # one for each try, oldest first; empty on a single machine
    exit_code: int | None = None  # from the table, once it has ended; None where it is unknown


@dataclass(frozen=True)
class RunStatus:
    """A run, as the backend reports it. Listings omit the steps."""

    backend: str
    id: str  # the backend's id
    name: str
    state: str  # one of the above, or a backend-specific state
    link: str = ""  # where a person views it
    message: str = ""  # why it failed
    steps: tuple[StepStatus, ...] = ()
    exit_code: int | None = None  # from the table; None while unfinished or unknown
    job: str = ""  # the execution id that its steps use, if it differs from `id`
    endpoint: str = ""  # where it was submitted, if the backend chose among several places

    @property
    def unfinished(self) -> bool:
        """Whether it may still change."""
        return self.state in UNFINISHED


def ended_with(state: str, steps: Iterable[StepStatus] = ()) -> int | None:
    """The exit code of a run in `state`: that of the first of its `steps` with a nonzero code."""
    if state == SUCCEEDED:
        return int(ExitCode.OK)
    if state in UNFINISHED:
        return None
    return next((step.exit_code for step in steps if step.exit_code), None)


def step_called(name: str) -> str:
    """The step of a task name: the name itself, or `train` for a trial's `train-2`."""
    step, _, number = name.rpartition("-")
    return step if number.isdecimal() and step in STEPS and STEPS[step].per_trial else name


def is_step(wanted: str, name: str) -> bool:
    """Whether the step `name` matches `wanted`. Empty matches all; a step without a number matches all its trials."""
    return wanted in ("", name, step_called(name))


def require_one_run(wanted: str, run_ids: Iterable[str]) -> None:
    """Refuse the beginning of an id that several runs share, so that no command acts on the wrong run. Raises
    MissingError.
    """
    ids = sorted(set(run_ids))
    if len(ids) > 1:
        text = ", ".join(ids[:SHOWN_IDS]) + (f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else "")
        raise MissingError(f"{wanted!r}: names several runs: {text}; write more of the id")


class Backend(Protocol):
    """A backend that runs the DAG.

    Promises of every method:

    - Errors are those of `holdfast.spec.errors`: MissingError for an unknown run, AccessDeniedError without the rights,
      and an error of the group "unreachable" (code 203 and above) if the engine does not answer within its deadline.
      The last kind may succeed later.
    - Only `submit` and `resume` start something, and only `cancel` ends something. A failed call may be repeated.
    - Nothing is printed, except by a backend with the capability `foreground`.
    - A call returns within seconds. The exceptions: `submit` and `resume` of a backend with `foreground` return when
      the run has ended, and `logs` with `follow`.
    """

    name: str
    capabilities: Capabilities

    def objects(self, request: RunRequest) -> list[dict[str, Any]]:
        """The exact objects that `submit` would send. Sends nothing, and changes nothing.

        It may read the engine, to omit what exists there already. Without a server, the objects are those for an empty
        one.
        """

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Start the run of `request`. Returns it, and whether this call created it.

        Idempotent: an unfinished or successful run of an equal request is returned, and nothing starts. Two equal calls
        at the same time create one run. Does not wait for the run, except with `foreground`.
        """

    def status(self, run: str) -> RunStatus:
        """The current status of a run, with its steps. Reads only. Raises MissingError.

        `exit_code` is None while the run is unfinished, and if no record of the steps has it.
        """

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """Yield (step, line) of the steps' logs, or only those of `step`, as the engine has them.

        Lines of one step are in order, without line ends. Lines of several steps may interleave. Without `follow` the
        iterator ends with the newest line, and a second call yields the same lines and newer ones. With `follow` it
        ends when the run has ended; a line may be missing if the engine removes a pod first. Raises MissingError for a
        step without a log.
        """

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Ask a run to stop. Returns its status, and whether it was still running.

        Idempotent. Does not wait: the training saves a checkpoint and ends within `checkpoint.grace_seconds`, and the
        exit handler runs. Raises MissingError.
        """

    def list(self) -> list[RunStatus]:
        """The runs that the backend knows, newest first, without their steps. Reads only."""

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """The command line that runs a command in the place of a rank, on the machine of the caller.

        Starts and reads nothing. Its exit code is that of the command, or an error's of the program that reaches the
        node. Raises MissingError if the node cannot be entered.
        """

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Resume the run of `request` from its newest checkpoint. Returns it, and whether this call started something.

        Idempotent: a run that has not ended continues unchanged. A backend whose engine cannot restart a run in place
        submits it again; finished steps are not repeated.
        """
