"""Typed events of a run: progress, launches, attempts, saves, endings; and their texts for people.

`channel` carries the events.
"""

from typing import ClassVar, Literal

from pydantic import Field

from holdfast.spec.errors import ExitCode
from holdfast.telemetry.accelerators import Figures
from holdfast.telemetry.event_base import BaseEvent, Name, Text, Word, in_words, joined, percent, rounded


class LaunchBegan(BaseEvent):
    """A launcher starts a gang, or takes one over."""

    kind: Literal["launch_began"] = "launch_began"
    job: Name
    nodes: int
    processes: int  # on each node
    adopted: bool = False

    @property
    def text(self) -> str:
        """See BaseEvent."""
        verb = "takes over" if self.adopted else "starts"
        return f"launch {self.launch}: {verb} {self.nodes} x {self.processes} processes as {self.job}"


class LaunchPending(BaseEvent):
    """A launcher waits for the resources of its gang: in a queue, or for pods that do not start."""

    kind: Literal["launch_pending"] = "launch_pending"
    reason: Text
    count: int = 1  # occurrences since the last record; a change is recorded

    @property
    def text(self) -> str:
        """See BaseEvent."""
        repetition = f" (came up {self.count} times)" if self.count > 1 else ""
        return f"waiting: {self.reason}{repetition}"


class LaunchEnded(BaseEvent):
    """The gang of a launch has ended."""

    kind: Literal["launch_ended"] = "launch_ended"
    code: int
    detail: Text = ""
    restart_in: float | None = None  # seconds until the next launch; None: no further launch

    @property
    def text(self) -> str:
        """See BaseEvent."""
        next_launch = "" if self.restart_in is None else f"; starting the next in {self.restart_in:.0f} s"
        return joined(f"launch {self.launch} ended ({in_words(self.code)}){next_launch}", self.detail)

    @property
    def is_news(self) -> bool:
        """See BaseEvent."""
        return self.restart_in is not None


class AttemptBegan(BaseEvent):
    """The ranks have met, have loaded the state, and train from here."""

    kind: Literal["attempt_began"] = "attempt_began"
    world: int  # ranks
    step: int  # steps done before
    steps: int  # 0: not known
    host: Name = ""  # host of rank 0
    device: Name = ""
    peak_flops: float | None = None  # FLOP/s of all ranks together
    mfu_unavailable: Text = ""  # why it is unknown
    accelerator: Name = ""  # its driver's name for it
    energy_unavailable: Text = ""  # why its energy is unknown
    # other figures that its driver does not report, and why
    missing_metrics: dict[Word, Word] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """See BaseEvent."""
        verb = "resuming" if self.step else "starting"
        total = f" of {self.steps}" if self.steps else ""
        return f"attempt {self.attempt}: {verb} from step {self.step}{total} on {self.device} x {self.world}"

    @property
    def is_news(self) -> bool:
        """See BaseEvent."""
        return self.step > 0


class Progress(BaseEvent):
    """Progress of the training."""

    kind: Literal["progress"] = "progress"
    notable: ClassVar[bool] = False
    step: int
    steps: int
    loss: float | None = None  # nats a token
    grad_norm: float | None = None
    tokens_per_second: float | None = None  # None for a script, whose steps have no tokens
    seconds_left: float
    learning_rate: float | None = None
    step_seconds: float | None = None  # seconds per step, the mean since the last Progress event
    mfu: float | None = None  # from 0 to 1
    phase_seconds: dict[Name, float] = Field(default_factory=dict)  # per step, by phases (`telemetry/phases.py`)
    peak_memory: int | None = None  # bytes on rank 0

    @property
    def text(self) -> str:
        """See BaseEvent."""
        seconds = int(self.seconds_left)
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s  "
        norm = "" if self.grad_norm is None else f"grad_norm {rounded(self.grad_norm, 3)}  "
        used = "" if self.mfu is None else f"{100 * self.mfu:.1f} % MFU  "
        return (
            f"step {self.step:,}/{self.steps:,} ({percent(self.step, self.steps)} %)  loss {rounded(self.loss, 4)}  "
            f"{norm}{speed}{used}"
            f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
        )


class PhaseProgress(BaseEvent):
    """Progress of a phase of a step: tokenize, pack, score, export."""

    kind: Literal["phase"] = "phase"
    notable: ClassVar[bool] = False
    phase: Name
    done: int  # done part of `total`
    total: int  # in the unit of the phase

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"{self.phase} {percent(self.done, self.total)} %"


class TimeSpent(Figures, BaseEvent):
    """How one rank spent its time since its last report, or since its process began, and the figures of its accelerator
    now. Its joules cover the same seconds."""

    kind: Literal["time_spent"] = "time_spent"
    notable: ClassVar[bool] = False
    silent: ClassVar[bool] = True
    rank: int
    step: int  # steps done by then
    # by phases (`telemetry/phases.py`); their sum is the time since the last report
    seconds: dict[Name, float] = Field(default_factory=dict)
    peak_memory: int = 0  # the most bytes that it has held
    last: bool = False  # its process ends with it...
    failed: bool = False  # ...by a failure, and not by completion or request

    @property
    def text(self) -> str:
        """See BaseEvent."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.seconds.items())
        return f"rank {self.rank} by step {self.step}: {phases}"


class ProfileSaved(BaseEvent):
    """A requested profile is in the store."""

    kind: Literal["profile_saved"] = "profile_saved"
    first: int  # step
    last: int
    key: Name  # key of the trace

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"steps {self.first} to {self.last} are profiled: {self.key}"


class SaveCommitted(BaseEvent):
    """A checkpoint is in the store."""

    kind: Literal["save_committed"] = "save_committed"
    step: int
    seconds: float  # from the copy to the commit
    stall_seconds: float = 0.0  # the part that training waited for
    bytes: int | None = None  # bytes written for it

    @property
    def text(self) -> str:
        """See BaseEvent."""
        size = "" if self.bytes is None else f", {self.bytes:,} bytes"
        return f"saved step {self.step} in {self.seconds:.1f} s{size}; training waited {self.stall_seconds:.2f} s"


class SaveFailed(BaseEvent):
    """A checkpoint could not be written; training continues."""

    kind: Literal["save_failed"] = "save_failed"
    urgent: ClassVar[bool] = True
    step: int
    reason: Text
    lag: int  # steps since the newest checkpoint

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"step {self.step} is not saved, {self.lag} steps hang on the checkpoint before it: {self.reason}"


class CheckpointQuarantined(BaseEvent):
    """A checkpoint does not verify; an older one is used."""

    kind: Literal["checkpoint_quarantined"] = "checkpoint_quarantined"
    urgent: ClassVar[bool] = True
    step: int
    reason: Text

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"checkpoint of step {self.step} is set aside: {self.reason}"


class AnomalyFound(BaseEvent):
    """The loss or the gradient norm of a step is not finite, or far above normal; see training.anomalies."""

    kind: Literal["anomaly_found"] = "anomaly_found"
    step: int  # steps done, including this one
    action: Name  # stop, skip or rewind
    loss: Name  # as text: not every value is a number in JSON
    grad_norm: Name
    batch: Text = ""  # the position of its samples

    @property
    def text(self) -> str:
        """See BaseEvent."""
        sentence = f"step {self.step} is an anomaly ({self.action}): loss {self.loss}, gradient norm {self.grad_norm}"
        return joined(sentence, self.batch)

    @property
    def is_news(self) -> bool:
        """See BaseEvent."""
        return True


class StepEvaluated(BaseEvent):
    """A checkpoint was scored while the run trains; see evaluation.every_steps."""

    kind: Literal["step_evaluated"] = "step_evaluated"
    step: int  # of the checkpoint
    loss: float | None = None  # held out, in nats per token; None: not finite
    tasks: dict[str, float] = Field(default_factory=dict)  # by task.NAME.METRIC

    @property
    def text(self) -> str:
        """See BaseEvent."""
        figures = "".join(f", {name} {value:.4f}" for name, value in self.tasks.items())
        return f"step {self.step}: held-out loss {rounded(self.loss, 4)}{figures}"


class RankEnded(BaseEvent):
    """A rank exits with a code of the table. A killed rank emits no such event."""

    kind: Literal["rank_ended"] = "rank_ended"
    rank: int
    code: int
    host: Name = ""
    reason: Text = ""

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return joined(f"rank {self.rank} on {self.host} ended ({in_words(self.code)})", self.reason)


class HangDetected(BaseEvent):
    """A rank does nothing while others wait for it, or all wait: the gang is ended and begins again."""

    kind: Literal["hang_detected"] = "hang_detected"
    urgent: ClassVar[bool] = True
    rank: int  # the first suspected rank
    host: Name = ""
    phase: Name
    step: int  # its current step
    seconds: float  # since its last sign
    message: Text

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return self.message


class StragglerDetected(BaseEvent):
    """A rank is slower than its peers, which wait for it in every step."""

    kind: Literal["straggler_detected"] = "straggler_detected"
    urgent: ClassVar[bool] = True
    rank: int
    host: Name = ""  # its scheduler's name for it
    phase: Name  # the phase with the largest excess over its peers
    ratio: float  # of its working time to that of its peers
    seconds: float  # excess of that phase per step
    step: int  # after which it was detected

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return (
            f"rank {self.rank} on {self.host} takes {self.ratio:.2f} times as long as its peers, which wait for it: "
            f"{self.seconds:.3f} s more in the phase {self.phase} of each step, up to step {self.step}"
        )


class NodeReclaimed(BaseEvent):
    """A cloud has announced that it takes a node back: the gang saves and exits."""

    kind: Literal["node_reclaimed"] = "node_reclaimed"
    urgent: ClassVar[bool] = True
    host: Name  # its scheduler's name for it
    seconds: float | None = None  # from the notice to the end; None when the cloud does not state it
    reason: Text  # in the cloud's words

    @property
    def text(self) -> str:
        """See BaseEvent."""
        notice = "" if self.seconds is None else f", {self.seconds:.0f} s notice"
        return f"node {self.host} reclaimed by the cloud{notice}: {self.reason}"


class HealthChecked(BaseEvent):
    """The ranks of a launch were measured before they trained."""

    kind: Literal["health_checked"] = "health_checked"
    ranks: int
    seconds: float  # duration
    reason: Text  # why it was done
    failed: Text = ""  # what keeps the run from starting
    warned: Text = ""  # other problems
    key: Name  # key of the whole report

    @property
    def text(self) -> str:
        """See BaseEvent."""
        summary = f"the health of {self.ranks} ranks was checked in {self.seconds:.1f} s ({self.reason})"
        if self.failed:
            return f"{summary}: failed: {self.failed}"
        return f"{summary}: {self.warned}" if self.warned else f"{summary}: well"

    @property
    def is_news(self) -> bool:
        """See BaseEvent."""
        return bool(self.failed or self.warned)


class AuditDiffers(BaseEvent):
    """An audit computed steps again, and got other bits than the run recorded."""

    kind: Literal["audit_differs"] = "audit_differs"
    urgent: ClassVar[bool] = True
    step: int  # the first that differs
    start: int  # the checkpoint that the audit began from
    host: Name  # where the audit ran
    differing: Text  # the differences at that step, recorded and computed

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"step {self.step}, computed again on {self.host} from step {self.start}, differs: {self.differing}"


class ScriptVerification(BaseEvent):
    """A training script is verified before its first launch: the beginning, an estimate, and the result."""

    kind: Literal["script_verification"] = "script_verification"
    urgent: ClassVar[bool] = True
    steps: int
    seconds: float | None = None  # so far; None: it begins
    seconds_left: float = 0.0  # estimate; 0 at the end
    result: Text = ""

    @property
    def text(self) -> str:
        """See BaseEvent."""
        if self.seconds is None:
            return (
                f"verifying that the script resumes exactly: {self.steps} steps without a stop, and again with one; "
                "once for this code and environment; --set train.verify_steps=0 skips it"
            )
        if not self.result:
            return f"verifying: one of its launches took {self.seconds:.0f} s, about {self.seconds_left:.0f} s more"
        return f"verified in {self.seconds:.0f} s: {self.result}"


class StepBegan(BaseEvent):
    """A step of the DAG begins."""

    kind: Literal["step_began"] = "step_began"
    name: Name

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return f"{self.name} begins"


class StepEnded(BaseEvent):
    """A step of the DAG has ended."""

    kind: Literal["step_ended"] = "step_ended"
    name: Name
    code: int
    seconds: float
    reason: Text = ""  # reason of a failure
    result: Name = ""  # the dataset id, the verdict's outcome, the version

    @property
    def text(self) -> str:
        """See BaseEvent."""
        ending = f": {self.result}" if self.code == ExitCode.OK and self.result else f" ({in_words(self.code)})"
        return joined(f"{self.name} ended after {self.seconds:.1f} s{ending}", self.reason)


class RunEnded(BaseEvent):
    """The pipeline has ended, as its exit handler sees it."""

    kind: Literal["run_ended"] = "run_ended"
    status: Name  # succeeded, failed or cancelled
    reason: Text = ""

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return joined(f"the run {self.status}", self.reason)


class WarningIssued(BaseEvent):
    """A warning for a person."""

    kind: Literal["warning_issued"] = "warning_issued"
    urgent: ClassVar[bool] = True
    message: Text

    @property
    def text(self) -> str:
        """See BaseEvent."""
        return self.message


Event = (
    LaunchBegan
    | LaunchPending
    | LaunchEnded
    | AttemptBegan
    | Progress
    | PhaseProgress
    | TimeSpent
    | ProfileSaved
    | SaveCommitted
    | SaveFailed
    | CheckpointQuarantined
    | AnomalyFound
    | StepEvaluated
    | RankEnded
    | HangDetected
    | StragglerDetected
    | NodeReclaimed
    | HealthChecked
    | AuditDiffers
    | ScriptVerification
    | StepBegan
    | StepEnded
    | RunEnded
    | WarningIssued
)
