"""Decision of the trigger: one explicit outcome, its conditions, and the compared values.

The same facts give the same outcome. `step` determines the facts.
"""

import math
from typing import Literal

from pydantic import BaseModel, Field

Word = Literal["due", "not_due"]
Name = Literal["no_champion", "same_model", "already_answered", "new_data", "changed_spec", "age", "decay", "failed"]


class Record(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """A part of the decision. It is frozen, and can carry NaN through JSON."""


class Decay(Record):
    """The champion on the held-out text of the current sources, against its bits per byte when it was blessed."""

    dataset_id: str  # the current sources, in the champion's tokens
    bits_per_byte: float
    blessed_with: float  # bits per byte
    tokens: int  # targets scored

    @property
    def share(self) -> float:
        """The relative increase of its bits per byte."""
        return self.bits_per_byte / self.blessed_with - 1


class Condition(Record):
    """A condition that makes a retraining due, or pointless."""

    name: Name
    due: bool
    sentence: str


class Started(Record):
    """A started retraining. `triggers/<name>/started-<run id>.json`."""

    job: str  # the execution of the DAG
    inputs_digest: str  # a digest of the whole spec and of the code


class Decision(Record):
    """The decision whether a retraining is due. `triggers/<name>/<key>.json`."""

    word: Word
    reason: str  # the deciding sentences, in one line
    conditions: tuple[Condition, ...] = Field(min_length=1)
    dataset_id: str  # of the current sources
    run_id: str  # of the run that a retraining would be
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
        """The decision as it is stored."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def judge(conditions: tuple[Condition, ...]) -> tuple[Word, str]:
    """The outcome, and the sentences of the conditions that are due, or else of all conditions."""
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
    """Whether a champion has decayed too much. A value that is not finite counts as decayed."""
    due = not (math.isfinite(decay.share) and decay.share <= most)
    return Condition(
        name="decay",
        due=due,
        sentence=f"The champion needs {decay.bits_per_byte:.4f} bits per byte on the sources' held-out text as it is "
        f"now, {decay.share:+.2%} against the {decay.blessed_with:.4f} it was blessed with: "
        f"{'more than' if due else 'within'} the {most:.2%} allowed.",
    )
