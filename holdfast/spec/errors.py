"""The exit-code table and the exceptions that carry its codes.

Promises that every failure a person or a scheduler can see has one code with one meaning. PyTorchJob's `ExitCode`
restart policy reads the same numbers: 1-127 is permanent (repeating changes nothing), 128 and above is retryable
(the same command may succeed). `128 + n` is what a shell reports for death by signal n.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from enum import IntEnum

from holdfast.spec.redaction import HIDDEN, carries_secret, names_secret, redact


class ExitCode(IntEnum):
    """What a Holdfast process says when it ends."""

    OK = 0
    UNEXPECTED = 1  # a bug: a traceback is in the log
    USAGE = 2  # wrong command line
    NOT_BLESSED = 3  # the run finished; its model did not pass the evaluation
    NOT_DUE = 4  # no retraining is due; said only when asked for by --exit-code
    TRIALS_FAILED = 5  # a sweep: some trials failed; the others are compared, and the best is registered if blessed
    DIFFERENT = 6  # what was compared, two checkpoints or two runs, is not the same bits
    OVERTAKEN = 7  # another model became champion meanwhile: all of the run's command, and no step alone, compares anew
    UNSCORABLE_CHAMPION = 8  # the champion could not be scored, so nothing was compared: the gate stays closed
    FOREIGN_VERSION = 9  # MLflow names a version that this store has not registered: it is not used
    BAD_SPEC = 10
    BAD_DATA = 11
    DIVERGED = 12  # NaN or infinite loss, and the policy says stop
    NO_CHECKPOINT_VERIFIES = 13  # checkpoints exist and none of them is intact
    FENCED = 14  # a newer attempt owns the run: this one must not come back
    NOT_FOUND = 15  # a run, dataset, bucket or file that was named does not exist
    ACCESS_DENIED = 16  # no credentials, or credentials that do not allow the operation
    CANCELLED = 17  # a person or the pipeline ended the run
    PLAN_CHANGED = 18  # the run promises bits, and would be computed in another way than before: see --replan
    STORE_REFUSED = 19  # the store refuses a request, or does not hold conditional writes
    OUT_OF_MEMORY = 20  # of an accelerator or of the host: the same plan needs as much again

    INTERRUPTED = 130  # SIGINT
    KILLED = 137  # SIGKILL: out of memory, or a node that went away
    TERMINATED = 143  # SIGTERM before a checkpoint could be made
    HUNG = 201
    LOST_PEER = 202
    STORE_UNREACHABLE = 203
    PREEMPTED = 204  # SIGTERM, with a checkpoint saved
    NO_SPACE = 205
    UNSCHEDULABLE = 206  # the cluster had no place for the job for too long
    CLUSTER_UNREACHABLE = 207
    WRONG_ARITHMETIC = 208  # a replica holds other bits than the others: its hardware computes wrong
    NOT_MET = 209  # the nodes of a gang did not all come together in time
    UNHEALTHY_NODE = 210  # the health check of a node failed: the run does not start there

    @property
    def retryable(self) -> bool:
        """Whether running the same command again may succeed."""
        return self >= 128

    @staticmethod
    def is_interruption(code: int | None) -> bool:
        """Whether a process that ends with `code` was asked to leave: it did not fail."""
        return code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED, ExitCode.CANCELLED)


class HoldfastError(Exception):
    """A failure with a known meaning. The message names the thing, the value and the remedy, and holds no secret."""

    exit_code: ExitCode = ExitCode.UNEXPECTED
    tried_again: bool = False  # as often as the spec allows, by whoever raises it: the step must not do it once more

    def __str__(self) -> str:
        return redact(super().__str__())


SHOWN_CHARACTERS = 80  # of a value in a message
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = SHOWN_CHARACTERS


def shown(value: object) -> str:
    """A value in a message, short however large or deep it is."""
    text = _short.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec."""

    field: str  # dotted path, as written in the file: "training.global_batch"
    value: object
    message: str
    remedy: str
    place: str = ""  # where the field is given: "spec.yaml:12:3", or "--set"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _without_secrets(self.value))

    def __str__(self) -> str:
        named = f"{self.place}: {self.field}" if self.place else self.field
        if self.value is None:  # nothing was given: the message says so
            return f"{named}: {self.message}\n    remedy: {self.remedy}"
        return f"{named}: {self.message} (value: {shown(self.value)})\n    remedy: {self.remedy}"


def _without_secrets(value: object) -> object:
    """A value for people. It is redacted before it is shortened: what is cut off is no longer known as a secret."""
    if isinstance(value, str):
        shown = redact(value)
        return HIDDEN if shown == value and "://" in value and carries_secret(value) else shown
    if isinstance(value, dict):
        return {key: HIDDEN if names_secret(str(key)) else _without_secrets(each) for key, each in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


class SpecError(HoldfastError):
    """A spec that is refused, with every problem found."""

    exit_code = ExitCode.BAD_SPEC

    def __init__(self, problems: list[Problem], source: str = "spec") -> None:
        self.problems = problems
        self.source = source
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


class DataError(HoldfastError):
    """A source, tokenizer or shard that cannot be used as it is."""

    exit_code = ExitCode.BAD_DATA


class DivergedError(HoldfastError):
    """The loss or the gradient stopped being a finite number."""

    exit_code = ExitCode.DIVERGED


class NoCheckpointVerifiesError(HoldfastError):
    """Checkpoints exist and every one of them is damaged."""

    exit_code = ExitCode.NO_CHECKPOINT_VERIFIES


class FencedError(HoldfastError):
    """A newer attempt has claimed this run."""

    exit_code = ExitCode.FENCED


class MissingError(HoldfastError):
    """A run, dataset, bucket or file that was named does not exist."""

    exit_code = ExitCode.NOT_FOUND


class AccessDeniedError(HoldfastError):
    """No credentials, or credentials that do not allow the operation."""

    exit_code = ExitCode.ACCESS_DENIED


class PlanChangedError(HoldfastError):
    """A run that promises bits would go on in another way than it was computed before, and nobody has said so."""

    exit_code = ExitCode.PLAN_CHANGED


class OvertakenError(HoldfastError):
    """A verdict was reached against a champion that has been replaced since: the model is judged anew, not refused."""

    exit_code = ExitCode.OVERTAKEN


class UnscorableChampionError(HoldfastError):
    """A model must be compared with the champion, and the champion cannot be scored."""

    exit_code = ExitCode.UNSCORABLE_CHAMPION


class ForeignVersionError(HoldfastError):
    """A registered version without a registration and a verdict in the store in use."""

    exit_code = ExitCode.FOREIGN_VERSION


class HungError(HoldfastError):
    """A process that this one cannot go on without is there, and says nothing any more."""

    exit_code = ExitCode.HUNG


class LostPeerError(HoldfastError):
    """Another rank of the gang went away."""

    exit_code = ExitCode.LOST_PEER


class StoreUnreachableError(HoldfastError):
    """The store did not answer within the deadline, all retries included."""

    exit_code = ExitCode.STORE_UNREACHABLE


class BadReaderError(StoreUnreachableError):
    """A node reads of the store what nobody else has confirmed to be there: it may be the node that is wrong."""

    def __init__(self, message: str, here: bool = False) -> None:
        super().__init__(message)
        self.here = here  # whether it is the node of this process


class StoreRefusedError(HoldfastError):
    """The store answers, and refuses a request or lacks an operation: repeating it changes nothing."""

    exit_code = ExitCode.STORE_REFUSED


class ClusterUnreachableError(HoldfastError):
    """The Kubernetes API server did not answer within the deadline, all retries included."""

    exit_code = ExitCode.CLUSTER_UNREACHABLE


class TerminatedError(HoldfastError):
    """The process was asked to leave, and had nothing to save."""

    exit_code = ExitCode.TERMINATED


class PreemptedError(HoldfastError):
    """The process was asked to leave, and saved a checkpoint first."""

    exit_code = ExitCode.PREEMPTED


class NoSpaceError(HoldfastError):
    """A disk or a quota is full."""

    exit_code = ExitCode.NO_SPACE


class WrongArithmeticError(HoldfastError):
    """This rank's copy of the state has other bits than its replicas."""

    exit_code = ExitCode.WRONG_ARITHMETIC


class UnhealthyNodeError(HoldfastError):
    """The node of this process failed the health check: it is slower than its peers, or its driver counts faults."""

    exit_code = ExitCode.UNHEALTHY_NODE


def error_named(name: str, message: str) -> HoldfastError:
    """The failure of which another process told the name of its class and its words."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, HoldfastError) and found is not SpecError:
        return found(message)
    return HoldfastError(message)
