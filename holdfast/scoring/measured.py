"""Metrics of a model on held-out text. Needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen model that writes NaN and infinity to JSON as strings."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


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
            other.digest, other.metric, other.shots, other.examples,
        )  # fmt: skip


class Measured(Record):
    """Metrics of a model on held-out text."""

    loss: float  # mean cross-entropy in nats per token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # of the text's UTF-8
    tokens: int  # targets scored
    text_bytes: int  # UTF-8 bytes of the scored text
    tasks: tuple[TaskScore, ...] = ()

    @property
    def figures(self) -> dict[str, float | int]:
        """All metrics by name; a task's is `task.NAME.METRIC`."""
        own: dict[str, float | int] = self.model_dump(exclude={"tasks"})
        return own | {f"task.{each.task}.{each.metric}": each.value for each in self.tasks}
