"""The decision: one explicit word, the conditions that led to it, and what was compared.

Promises that the same facts give the same word. Leaves finding the facts out to `step`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Word = Literal["due", "not_due"]
Name = Literal["no_champion", "same_model", "already_answered", "new_data", "changed_spec", "age", "decay", "failed"]


class Record(BaseModel):
    """A part of the decision: frozen, and able to carry NaN through JSON."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Decay(Record):
    """The champion on the held-out text of the sources as they are now, against what it was blessed with."""

    dataset_id: str  # the sources as they are now, in the champion's tokens
    bits_per_byte: float
    blessed_with: float  # bits per byte
    tokens: int  # targets scored

    @property
    def share(self) -> float:
        """How much more bits per byte it needs, as a share."""
        return self.bits_per_byte / self.blessed_with - 1


class Condition(Record):
    """One thing that makes a retraining due, or in vain."""

    name: Name
    due: bool
    sentence: str


class Started(Record):
    """A retraining that was started. `triggers/<name>/started-<run id>.json`."""

    job: str  # the execution of the DAG
    asked: str  # a digest of the whole spec and of the code


class Decision(Record):
    """Whether a retraining is due. `triggers/<name>/<key>.json`."""

    word: Word
    reason: str  # the sentences that decided, in one line
    conditions: tuple[Condition, ...] = Field(min_length=1)
    dataset_id: str  # of the sources as they are now
    run_id: str  # of the run that a retraining would make
    registered_model: str
    champion_version: int | None = None
    champion_run_id: str = ""
    champion_dataset_id: str = ""
    champion_age_hours: float | None = None
    decay: Decay | None = None  # None: not measured
    key: str
    decided: float  # unix seconds

    @property
    def due(self) -> bool:
        """Whether to retrain."""
        return self.word == "due"

    def dump(self) -> bytes:
        """The decision as it lies in the store."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def judge(conditions: tuple[Condition, ...]) -> tuple[Word, str]:
    """The word, and the sentences that led to it: those of the conditions that are due, else all of them."""
    met = [condition.sentence for condition in conditions if condition.due]
    return ("due" if met else "not_due"), " ".join(met or [condition.sentence for condition in conditions])


def of_age(age_hours: float, most: float) -> Condition:
    """Whether a champion is too old."""
    due = age_hours >= most
    return Condition(
        name="age",
        due=due,
        sentence=f"The champion is {age_hours:.1f} hours old, {'not ' * (not due)}as old as the {most:g} allowed.",
    )


def of_decay(decay: Decay, most: float) -> Condition:
    """Whether a champion has become too bad. What is no number any more is."""
    due = not (math.isfinite(decay.share) and decay.share <= most)
    return Condition(
        name="decay",
        due=due,
        sentence=f"The champion needs {decay.bits_per_byte:.4f} bits per byte on the sources' held-out text as it is "
        f"now, {decay.share:+.2%} against the {decay.blessed_with:.4f} it was blessed with: "
        f"{'more than' if due else 'within'} the {most:.2%} allowed.",
    )
