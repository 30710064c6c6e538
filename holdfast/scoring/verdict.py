"""The verdict on a model as the store holds it, and its key.

The key covers the evaluation settings and the champion of the comparison. A champion is identified by its registry,
version, run and weights digest: version 1 of another MLflow is another champion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from holdfast.spec.identity import GENERATOR_VERSION, digest
from holdfast.spec.operations import Evaluation, Task
from holdfast.spec.tree import Spec

if TYPE_CHECKING:
    from holdfast.tracking import Champion

# Metrics of a model on held-out text. Needs no torch.


class Record(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """A frozen model that writes NaN and infinity to JSON as strings."""


class TaskScore(Record):
    """The metric of a model on a downstream task."""

    task: str
    digest: str  # over the task's file and data
    metric: str
    shots: int
    value: float
    higher_is_better: bool
    examples: int

    def asks_the_same(self, other: TaskScore) -> bool:
        """Whether both scores have the same task digest, metric, shots and number of examples."""
        return (self.digest, self.metric, self.shots, self.examples) == (
            other.digest,
            other.metric,
            other.shots,
            other.examples,
        )


class OwnFigures(Record):
    """Metrics of an export that a user's command and functions give."""

    own: dict[str, float] = {}  # by name

    @property
    def figures(self) -> dict[str, float | int]:
        """All metrics by name: `metric.NAME`."""
        return {f"metric.{name}": value for name, value in self.own.items()}


class Measured(OwnFigures):
    """Metrics of a model on held-out text, with those of user code."""

    loss: float  # mean cross-entropy in nats per token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # of the text's UTF-8
    tokens: int  # targets scored
    text_bytes: int  # UTF-8 bytes of the scored text
    reward_accuracy: float | None = None  # of a reward model: the share of pairs in the right order
    pass_at_1: float | None = None  # of prompts: the share of sampled answers that solve theirs
    pass_at_k: float | None = None  # the share of prompts that one of the k answers solves
    mean_reward: float | None = None  # of the answers
    tasks: tuple[TaskScore, ...] = ()

    @property
    def figures(self) -> dict[str, float | int]:
        """All metrics by name; a task's is `task.NAME.METRIC`, and one of user code `metric.NAME`."""
        figures: dict[str, float | int] = self.model_dump(exclude={"tasks", "own"}, exclude_none=True)
        figures |= {f"task.{task.task}.{task.metric}": task.value for task in self.tasks}
        return figures | super().figures


def solved_shares(metrics: Mapping[str, float | int], answers: int) -> list[tuple[str, float]]:
    """pass@1 and pass@k among the metrics, by title. With one answer to each prompt, pass@k is the same as pass@1."""
    named = [("pass@1", "pass_at_1"), (f"pass@{answers}", "pass_at_k")][: 2 if answers > 1 else 1]
    return [(title, metrics[name]) for title, name in named if isinstance(metrics.get(name), int | float)]


EVALUATION_VERSION = 4  # raise by hand when the same model would get other figures

Word = Literal["blessed", "not_blessed"]


class Check(Record):
    """One condition, which the model met or failed."""

    name: str  # `finite`, or the field of the spec's evaluation section
    value: float
    bound: float | None  # None: the condition has no bound
    passed: bool
    sentence: str


class Sample(Record):
    """A continuation of a prompt by the model."""

    prompt: str
    text: str


class Opponent(Record):
    """The champion of the comparison, or the reason why there was no comparison."""

    registry: str  # MLflow of the champion, without credentials
    model: str
    version: int
    run_id: str
    state_digest: str
    measured: Measured | OwnFigures | None
    note: str


class Verdict(Record):
    """The result of an evaluation. `runs/<run-id>/evaluations/<key>.json`."""

    version: int = EVALUATION_VERSION
    word: Word
    reasons: tuple[str, ...]  # a sentence for each check, failed ones first
    checks: tuple[Check, ...]
    metrics: dict[str, float | int]
    device: str  # that scored the model: cpu, cuda, ...
    champion: Opponent | None = None
    run_id: str
    dataset_id: str  # empty for a script without data
    step: int
    checkpoint: str
    export: str
    export_digest: str  # of the scored files
    state_digest: str
    key: str
    number: int = 0  # counts the verdicts of the run in order of their evaluations; 0: older than this field
    settings: Evaluation
    samples: tuple[Sample, ...] = Field(default=())
    tasks: tuple[TaskScore, ...] = ()

    @property
    def blessed(self) -> bool:
        """Whether the model may be registered."""
        return self.word == "blessed"

    def dump(self) -> bytes:
        """The verdict as JSON bytes for the store."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def record_order(key: str, record: Mapping[str, Any]) -> tuple[float, str]:
    """The sort key of the verdicts of one run, or of its registrations (as JSON), the newest last. It comes from their
    contents: `number` and `created`, otherwise the key. Times of objects change when a store is copied."""
    place = record.get("number", record.get("created"))
    return (place if isinstance(place, int | float) else 0, key)


def newest_record(records: Iterable[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """The newest of the verdicts, or of the registrations, of one run, with its key; both empty without one."""
    return max(records, key=lambda one: record_order(*one), default=("", {}))


def settings_key(spec: Spec) -> str:
    """A digest of the evaluation settings without the champion. The keys of all verdicts under them begin with it."""
    settings = spec.evaluation.model_dump(mode="json")
    for name in ("metrics", "command", "load"):
        if not settings[name]:
            del settings[name]  # keys are older than the field
    if spec.data.kind != "prompts":  # the same
        for name in ("max_prompts", "answers", "solved_reward", "min_pass_at_1", "min_pass_at_k"):
            del settings[name]
    for metric in settings.get("metrics", ()):
        if metric["name"] is None:
            del metric["name"]
    for name in ("every_steps", "keep_best", "stop_after", "timeout_minutes"):  # they change no verdict
        del settings[name]
    for task in settings["tasks"]:
        del task["while_training"]
        for name in ("filter", "chat_template", "system", "fewshot_as_multiturn"):
            if task[name] == Task.model_fields[name].default:
                del task[name]  # keys are older than the field
    key = {"version": EVALUATION_VERSION, "settings": settings, "registered_model": spec.registered_model}
    if spec.data.kind == "prompts":
        key["generator"] = GENERATOR_VERSION
    if spec.evaluation.command:
        key["code"] = spec.code  # what a command reaches is not known
    return digest(key)


def key_against(spec: Spec, champion: Champion | None) -> str:
    """The key of the verdict under this spec's settings against a champion, or against none."""
    if champion is None:
        return f"{settings_key(spec)}-none"
    return f"{settings_key(spec)}-v{champion.version}-{digest(champion.identity)}"


def reached_against(verdict: Mapping[str, Any], champion: Champion | None) -> bool:
    """Whether a verdict (as JSON) was reached against exactly this champion, or without one."""
    opponent = verdict.get("champion")
    if opponent is None or champion is None:
        return opponent is None and champion is None
    return {name: opponent.get(name) for name in champion.identity} == champion.identity
