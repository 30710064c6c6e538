"""The verdict on a model as it lies in the store, and its key: the question that it answers.

The question is the settings and the champion that the model was compared with. A champion is known by its registry, its
version, its run and a digest of its weights: version 1 of another MLflow is another champion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from holdfast.scoring.measured import Measured, Record, TaskScore
from holdfast.spec.identity import digest
from holdfast.spec.operations import Evaluation
from holdfast.spec.tree import Spec

if TYPE_CHECKING:
    from holdfast.tracking import Champion

EVALUATION_VERSION = 3  # raised by hand whenever the same model would get other figures

Word = Literal["blessed", "not_blessed"]


class Check(Record):
    """One condition that the model met or did not meet."""

    name: str  # finite, or the field of the spec's evaluation section
    value: float
    bound: float | None  # None: the condition has no bound
    passed: bool
    sentence: str


class Sample(Record):
    """What the model says after a prompt."""

    prompt: str
    text: str


class Opponent(Record):
    """The champion that the model was compared with, or the reason why it was not."""

    registry: str  # the MLflow that it is the champion of, without credentials
    model: str
    version: int
    run_id: str
    state_digest: str
    measured: Measured | None
    note: str


class Verdict(Record):
    """What an evaluation found. `runs/<run-id>/evaluations/<key>.json`."""

    version: int = EVALUATION_VERSION
    word: Word
    reasons: tuple[str, ...]  # a sentence for each check, failed ones first
    checks: tuple[Check, ...]
    metrics: dict[str, float | int]
    device: str  # what the model was scored on: cpu, cuda, ...
    champion: Opponent | None = None
    run_id: str
    dataset_id: str
    step: int
    checkpoint: str
    export: str
    export_digest: str  # of the files that were scored
    state_digest: str
    key: str
    settings: Evaluation
    samples: tuple[Sample, ...] = Field(default=())
    tasks: tuple[TaskScore, ...] = ()

    @property
    def blessed(self) -> bool:
        """Whether the model may be registered."""
        return self.word == "blessed"

    def dump(self) -> bytes:
        """The verdict as it lies in the store."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def settings_key(spec: Spec) -> str:
    """A digest of what is asked of the model, without the champion: the keys of all its verdicts begin with it."""
    return digest(
        {
            "version": EVALUATION_VERSION,
            "settings": spec.evaluation.model_dump(mode="json"),
            "registered_model": spec.registered_model,
        }
    )


def key_against(spec: Spec, champion: Champion | None) -> str:
    """The key of the verdict under this spec's settings against a champion, or against none."""
    if champion is None:
        return f"{settings_key(spec)}-none"
    return f"{settings_key(spec)}-v{champion.version}-{digest(champion.identity)}"


def reached_against(verdict: Mapping[str, Any], champion: Champion | None) -> bool:
    """Whether a verdict (as JSON) was reached against this very champion, or without one."""
    then = verdict.get("champion")
    if then is None or champion is None:
        return then is None and champion is None
    return {name: then.get(name) for name in champion.identity} == champion.identity
