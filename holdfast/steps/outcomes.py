"""Outcomes of the steps in one execution of the DAG.

The runner of a DAG on one machine names a folder in HOLDFAST_OUTCOMES. Each step writes its outcome there, and does not
start if the folder has a `stop` file. A container on a cluster has no such folder: it passes its outcome to a recorder.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.runtime.environment import outcomes_folder
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.spec.identity import run_id
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.load import parse_spec

STOP_FILE = "stop"
LOG_FILE = "HOLDFAST_LOG_FILE"  # the file for the output of the steps, which messages can name
RUN_ID = "HOLDFAST_RUN_ID"  # the run that the pipeline makes, if known beforehand
POD = "HOLDFAST_POD_NAME"
EXIT_HANDLER = "notify"
KILLED = "the process was killed: out of memory, or ended by a user"


@dataclass
class Outcome:
    """How a step ended."""

    step: str
    pid: int
    started: float  # unix seconds
    ended: float | None = None  # unix seconds; None while it runs, or if it was killed
    exit_code: int | None = None
    reason: str = ""  # why it failed
    result: str = ""  # what it returned: dataset id, run id, verdict or version
    pod: str = ""  # where it ran on a cluster
    part: str = ""  # which part, if a step is divided into concurrent parts
    interrupted: int = 0  # consecutive tries before this one that were stopped or killed

    @property
    def name(self) -> str:
        """The name of this outcome: one for each step, or for each part of it."""
        return f"{self.step}-{self.part}" if self.part else self.step

    @property
    def was_interrupted(self) -> bool:
        """Whether it was stopped or killed, and did not fail by itself."""
        return self.ended is None or ExitCode.is_interruption(self.exit_code)

    def as_json(self) -> bytes:
        """The outcome as a JSON object, without secrets."""
        fields = {**asdict(self), "reason": redact(self.reason), "result": redact(self.result)}
        return json.dumps(fields, ensure_ascii=False).encode()

    def write(self, folder: Path) -> None:
        """Write it to `folder` atomically: a reader sees the whole file or the earlier one."""
        temporary = folder / f".{self.name}.{self.pid}"
        temporary.write_bytes(self.as_json())
        temporary.replace(folder / f"{self.name}.json")


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes in `folder`, in the order in which the steps started."""
    outcomes = [parse_json(path.read_bytes(), Outcome, str(path)) for path in folder.glob("*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.started)


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The first step that failed before the exit handler, with its reason; None if no failure is known. A step that was
    stopped counts only if none failed: when one part of a step fails, the other parts are stopped."""
    interrupted = None
    for outcome in outcomes:
        if outcome.ended is None and outcome.step != EXIT_HANDLER:
            outcome.exit_code, outcome.reason = int(ExitCode.KILLED), KILLED
        if outcome.exit_code and not ExitCode.is_interruption(outcome.exit_code):
            return outcome
        interrupted = interrupted or (outcome if outcome.exit_code else None)
    return interrupted


def run_of(outcomes: Iterable[Outcome], spec: str, overrides: Sequence[str], salt: str) -> str:
    """The run id of the DAG: what train returned, else derived from what preprocess returned.

    Empty if preprocess did not end, the spec is refused, or the id depends on weights whose bytes only train has read.
    """
    outcomes = list(outcomes)
    if trained := next((outcome.result for outcome in outcomes if outcome.step == "train"), ""):
        return trained
    dataset_id = next((outcome.result for outcome in outcomes if outcome.step == "preprocess"), "")
    try:
        checked = parse_spec(spec, overrides)
    except HoldfastError:
        return ""
    models = [reward.model for reward in checked.training.grpo.rewards if reward.model]
    reads_weights = checked.model.init_from or checked.training.distillation.teacher or models
    return run_id(checked, dataset_id, salt) if dataset_id and not reads_weights else ""


def was_stopped() -> bool:
    """Whether a stop of the run on this machine was requested. A removed folder also means a stop by a process that is
    gone."""
    folder = outcomes_folder()
    return folder is not None and ((folder / STOP_FILE).exists() or not folder.is_dir())


Recorder = Callable[[str, Outcome], None]  # called with the store's URL
