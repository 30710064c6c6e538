"""The exit-code table, and the exceptions with its codes.

Promises that every failure that a user or a scheduler can see has one code with one meaning. PyTorchJob's `ExitCode`
restart policy reads the same numbers. 1-127 is permanent: repeating changes nothing. 128 and above is retryable: the
same command may succeed. A shell reports `128 + n` for a process that signal n ended.
"""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from importlib.util import find_spec

from holdfast.spec.redaction import HIDDEN, carries_secret, names_secret, redact


class ExitCode(IntEnum):
    """Exit codes of Holdfast processes."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_BLESSED = 3
    NOT_DUE = 4
    TRIALS_FAILED = 5
    MISMATCH = 6
    CHAMPION_CHANGED = 7
    UNSCORABLE_CHAMPION = 8
    FOREIGN_VERSION = 9
    BAD_SPEC = 10
    BAD_DATA = 11
    DIVERGED = 12
    NO_CHECKPOINT_VERIFIES = 13
    FENCED = 14
    NOT_FOUND = 15
    ACCESS_DENIED = 16
    CANCELLED = 17
    PLAN_CHANGED = 18
    STORE_REFUSED = 19
    OUT_OF_MEMORY = 20
    NOT_EXACT = 21
    USER_CODE = 22

    INTERRUPTED = 130
    KILLED = 137
    TERMINATED = 143
    HUNG = 201
    LOST_PEER = 202
    STORE_UNREACHABLE = 203
    PREEMPTED = 204
    NO_SPACE = 205
    UNSCHEDULABLE = 206
    CLUSTER_UNREACHABLE = 207
    WRONG_ARITHMETIC = 208
    RENDEZVOUS_TIMEOUT = 209
    UNHEALTHY_NODE = 210
    SCRIPT_FAILED = 211

    @property
    def retryable(self) -> bool:
        """Whether running the same command again may succeed."""
        return self >= 128

    @staticmethod
    def is_interruption(code: int | None) -> bool:
        """Whether `code` means that a person or the cluster requested the exit, so the process did not fail."""
        return code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED, ExitCode.CANCELLED)


MEANINGS = {
    ExitCode.OK: "Success. For a run: its model is blessed.",
    ExitCode.UNEXPECTED: "A bug of Holdfast. The log has the traceback.",
    ExitCode.USAGE: "The command line is wrong.",
    ExitCode.NOT_BLESSED: "The run finished, and its model did not pass the evaluation.",
    ExitCode.NOT_DUE: "No retraining is due (`holdfast trigger --exit-code`).",
    ExitCode.TRIALS_FAILED: "Some trials of a sweep failed. The rest is compared; a blessed best one is registered.",
    ExitCode.MISMATCH: "Two checkpoints or two runs do not have the same bits, or this Holdfast would not continue a "
    "run with them.",
    ExitCode.CHAMPION_CHANGED: "The champion changed during evaluation. Run the same command again to compare with "
    "the new champion; retrying only this step does not help.",
    ExitCode.UNSCORABLE_CHAMPION: "The champion could not be scored. Nothing was compared or registered.",
    ExitCode.FOREIGN_VERSION: "MLflow names a version that this store has not registered. It is not used.",
    ExitCode.BAD_SPEC: "The spec is refused. The message names each field, its value and the remedy.",
    ExitCode.BAD_DATA: "The data cannot be used as it is.",
    ExitCode.DIVERGED: "The loss is NaN or infinite, or too many anomalies followed each other.",
    ExitCode.NO_CHECKPOINT_VERIFIES: "Checkpoints exist, and none of them is intact.",
    ExitCode.FENCED: "A newer attempt owns the run. This one must not be restarted.",
    ExitCode.NOT_FOUND: "A run, dataset, bucket or file does not exist.",
    ExitCode.ACCESS_DENIED: "Credentials are missing, or do not allow the operation.",
    ExitCode.CANCELLED: "A person or the pipeline ended the run.",
    ExitCode.PLAN_CHANGED: "The plan differs from the one of the attempts before. `--replan` accepts that.",
    ExitCode.STORE_REFUSED: "The store refuses a request, or does not support conditional writes.",
    ExitCode.OUT_OF_MEMORY: "An accelerator or the host ran out of memory. The same plan needs as much again.",
    ExitCode.NOT_EXACT: "A training script does not resume with the same bits (`holdfast verify`).",
    ExitCode.USER_CODE: "A function of your own code failed, or returned a value that cannot be used.",
    ExitCode.INTERRUPTED: "SIGINT.",
    ExitCode.KILLED: "SIGKILL: often the host ran out of memory, or a node was lost.",
    ExitCode.TERMINATED: "SIGTERM, before a checkpoint could be saved.",
    ExitCode.HUNG: "A rank or a step made no progress for too long.",
    ExitCode.LOST_PEER: "A rank was lost.",
    ExitCode.STORE_UNREACHABLE: "The store, or the tracking server, cannot be reached.",
    ExitCode.PREEMPTED: "SIGTERM, after a checkpoint was saved.",
    ExitCode.NO_SPACE: "No space is left on a disk.",
    ExitCode.UNSCHEDULABLE: "The cluster had no place for the job within the time limit.",
    ExitCode.CLUSTER_UNREACHABLE: "The API of the cluster cannot be reached.",
    ExitCode.WRONG_ARITHMETIC: "A replica has different bits from its peers: its hardware computes wrong results.",
    ExitCode.RENDEZVOUS_TIMEOUT: "Not all nodes of a gang joined in time (`cluster.nodes.rendezvous_seconds`).",
    ExitCode.UNHEALTHY_NODE: "A node failed its health check, or cannot run the tests of an evaluation.",
    ExitCode.SCRIPT_FAILED: "A training script raised an exception, and `train.restart_on` is `any`.",
}


class HoldfastError(Exception):
    """A failure with a known meaning. The message names the thing, the value and the remedy, and contains no secret."""

    exit_code: ExitCode = ExitCode.UNEXPECTED
    tried_again: bool = False  # the code that raises it used all retries of the spec; the step must not retry again

    def __str__(self) -> str:
        return redact(super().__str__())


SHOWN_CHARACTERS = 80  # of a value in a message
NAMED_FIELDS = 3  # of a refused spec, in the first line of its message
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = SHOWN_CHARACTERS


def shown(value: object) -> str:
    """A value in a message, shortened if it is large or deep."""
    try:
        text = _short.repr(value)
    except ValueError:  # Python refuses to print the longest numbers
        return "a number with too many digits"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


@dataclass(frozen=True)
class Problem:
    """One fault of a spec."""

    field: str  # dotted path, as written in the file: "training.global_batch"
    value: object
    message: str
    remedy: str
    place: str = ""  # where the field was given: "spec.yaml:12:3", or "--set"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _without_secrets(self.value))

    def __str__(self) -> str:
        location = f"{self.place}: {self.field}" if self.place else self.field
        if self.value is None:  # no value was given, and the message says so
            return f"{location}: {self.message}\n    remedy: {self.remedy}"
        return f"{location}: {self.message} (value: {shown(self.value)})\n    remedy: {self.remedy}"


def _without_secrets(value: object) -> object:
    """A value for messages. It is redacted before it is shortened, because a secret that is cut is not recognized."""
    if isinstance(value, str):
        redacted = redact(value)
        return HIDDEN if redacted == value and "://" in value and carries_secret(value) else redacted
    if isinstance(value, dict):
        return {key: HIDDEN if names_secret(str(key)) else _without_secrets(item) for key, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list) else value


class SpecError(HoldfastError):
    """A refused spec, with every problem found."""

    exit_code = ExitCode.BAD_SPEC

    def __init__(self, problems: list[Problem], source: str = "spec") -> None:
        self.problems = problems
        self.source = source
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        fields = list(dict.fromkeys(problem.field for problem in problems))  # in the first line, which may be all of it
        more = f" and {len(fields) - NAMED_FIELDS} more" if len(fields) > NAMED_FIELDS else ""
        headline = f"{source}: {count} in {', '.join(fields[:NAMED_FIELDS])}{more}"
        super().__init__("\n".join([headline, *(f"  {problem}" for problem in problems)]))


class UsageError(HoldfastError):
    """A command or a call with arguments that do not fit together."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, field: str = "", remedy: str = "") -> None:
        self.field, self.remedy = field, remedy  # the argument, such as --backend, and what to do
        self.text = f"{message}; {remedy}" if remedy else message
        super().__init__(f"{field}: {self.text}" if field else self.text)


class DataError(HoldfastError):
    """A source, tokenizer or shard that cannot be used in its present form."""

    exit_code = ExitCode.BAD_DATA


class UserCodeError(HoldfastError):
    """A function of the user's own code that fails, or returns something else than its role requires."""

    exit_code = ExitCode.USER_CODE


class NotExactError(HoldfastError):
    """A training script does not resume with the bits of an undisturbed run."""

    exit_code = ExitCode.NOT_EXACT


class DivergedError(HoldfastError):
    """The loss or the gradient is no longer finite."""

    exit_code = ExitCode.DIVERGED


class NoCheckpointVerifiesError(HoldfastError):
    """Checkpoints exist, and all of them are damaged."""

    exit_code = ExitCode.NO_CHECKPOINT_VERIFIES


class FencedError(HoldfastError):
    """A newer attempt claimed this run."""

    exit_code = ExitCode.FENCED


class MissingError(HoldfastError):
    """A run, dataset, bucket or file that was named does not exist."""

    exit_code = ExitCode.NOT_FOUND
    problem: Problem | None = None  # of the spec's field that names what is missing


class AccessDeniedError(HoldfastError):
    """Credentials are missing, or do not allow the operation."""

    exit_code = ExitCode.ACCESS_DENIED


class PlanChangedError(HoldfastError):
    """A run that promises bits would continue under a different plan, and `--replan` was not given."""

    exit_code = ExitCode.PLAN_CHANGED


class ChampionChangedError(HoldfastError):
    """The champion was replaced during the evaluation. The model is evaluated again, not refused."""

    exit_code = ExitCode.CHAMPION_CHANGED


class UnscorableChampionError(HoldfastError):
    """A model must be compared with the champion, and the champion cannot be scored."""

    exit_code = ExitCode.UNSCORABLE_CHAMPION


class ForeignVersionError(HoldfastError):
    """A registered version without a registration and a verdict in the store in use."""

    exit_code = ExitCode.FOREIGN_VERSION


class HungError(HoldfastError):
    """A process that this one depends on is still running, but no longer responds."""

    exit_code = ExitCode.HUNG


class LostPeerError(HoldfastError):
    """Another rank of the gang was lost."""

    exit_code = ExitCode.LOST_PEER


class StoreUnreachableError(HoldfastError):
    """The store did not answer within the deadline, including all retries."""

    exit_code = ExitCode.STORE_UNREACHABLE


class BadReaderError(StoreUnreachableError):
    """A node reads a state of the store that no other node confirms, so the node itself may be at fault."""

    def __init__(self, message: str, here: bool = False) -> None:
        super().__init__(message)
        self.here = here  # whether the node is that of this process


class StoreRefusedError(HoldfastError):
    """The store answers, but refuses a request or lacks an operation. Repeating it changes nothing."""

    exit_code = ExitCode.STORE_REFUSED


class ClusterUnreachableError(HoldfastError):
    """The Kubernetes API server did not answer within the deadline, including all retries."""

    exit_code = ExitCode.CLUSTER_UNREACHABLE


class TerminatedError(HoldfastError):
    """The process received a request to exit, and had nothing to save."""

    exit_code = ExitCode.TERMINATED


class PreemptedError(HoldfastError):
    """The process received a request to exit, and saved a checkpoint first."""

    exit_code = ExitCode.PREEMPTED


class NoSpaceError(HoldfastError):
    """A disk or a quota is full."""

    exit_code = ExitCode.NO_SPACE


class WrongArithmeticError(HoldfastError):
    """This rank's copy of the state has different bits from its replicas."""

    exit_code = ExitCode.WRONG_ARITHMETIC


class UnhealthyNodeError(HoldfastError):
    """The node of this process failed the health check: it is slower than its peers, or its driver reports faults."""

    exit_code = ExitCode.UNHEALTHY_NODE


def error_named(name: str, message: str) -> HoldfastError:
    """A failure that another process reported, from the name of its class and its message."""
    error_class = globals().get(name)
    if isinstance(error_class, type) and issubclass(error_class, HoldfastError) and error_class is not SpecError:
        return error_class(message)
    return HoldfastError(message)


# Optional packages, and the extra of Holdfast that installs each.

# Name of the imported module -> the extra that contains it.
EXTRAS = {
    module: extra
    for extra, modules in {
        "train": "tokenizers torch pcodec tqdm",
        "preprocess": "pyarrow zstandard",
        "dvc": "dvc dvc_s3",
        "deepspeed": "deepspeed",
        "metrics": "prometheus_client",
        "nvml": "pynvml",
        "tensorboard": "tensorboard",
        "otel": "opentelemetry",
        "serve": "starlette uvicorn",
        "tracking": "mlflow psycopg",
        "wandb": "wandb",
        "trackio": "trackio",
        "pipelines": "kfp kfp_server_api hera kubernetes jinja2 huggingface_hub typer rich jsonschema",
        "tasks": "lm_eval",
        "ray": "ray",
        "chaos": "moto",
        "search": "optuna",
        "scripts": "transformers accelerate lightning",
    }.items()
    for module in modules.split()
}


def missing_package(error: BaseException) -> MissingError | None:
    """What to install, if the exception is caused by a missing package of an extra. Otherwise None."""
    for cause in causes(error):
        module = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if module in EXTRAS and find_spec(module) is None:  # otherwise an installed version lacks a module
            return MissingError(_words(module, "this command"))
    return None


def require_package(module: str, use: str, instead: str = "") -> None:
    """Raises MissingError if the package of an extra that `use` needs is not installed."""
    if find_spec(module) is None:
        raise MissingError(_words(module, use) + (f", or {instead}" if instead else ""))


def _words(module: str, use: str) -> str:
    package = {"deepspeed": "DeepSpeed", "ray": "Ray"}.get(module, f"the package {module}")
    return f"{use} needs {package}, which is not installed here: pip install 'holdfast[{EXTRAS[module]}]'"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    ids: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in ids:
        ids.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
