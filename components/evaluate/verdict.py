"""The verdict: one explicit word, the checks that led to it, and where everything came from.

Promises that a number that is not finite never blesses, whatever is asked for, and that the same measurements give the
same bytes. Leaves measuring to `score`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.components.spec.identity import digest
from holdfast.components.spec.operations import Evaluation
from holdfast.components.spec.tree import Spec

EVALUATION_VERSION = 1  # raised by hand whenever the same model would get other figures

Word = Literal["blessed", "not_blessed"]


class Record(BaseModel):
    """A part of the verdict: frozen, and able to carry NaN through JSON."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


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


class Measured(Record):
    """The figures of a model on held-out text."""

    loss: float  # mean cross-entropy in nats a token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # of the text's UTF-8
    tokens: int  # targets scored
    text_bytes: int  # UTF-8 bytes of the text that they stand for


class Opponent(Record):
    """The champion that the model was compared with, or the reason why it was not."""

    model: str
    version: int
    run_id: str
    measured: Measured | None
    note: str


class Verdict(Record):
    """What an evaluation found. `runs/<run-id>/evaluations/<key>.json`."""

    version: int = EVALUATION_VERSION
    word: Word
    reasons: tuple[str, ...]  # a sentence for each check, failed ones first
    checks: tuple[Check, ...]
    metrics: dict[str, float | int]
    champion: Opponent | None = None
    run_id: str
    dataset_id: str
    step: int
    checkpoint: str
    export: str
    state_digest: str
    key: str
    settings: Evaluation
    samples: tuple[Sample, ...] = Field(default=())

    @property
    def blessed(self) -> bool:
        """Whether the model may be registered."""
        return self.word == "blessed"

    def dump(self) -> bytes:
        """The verdict as it lies in the store."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def settings_key(spec: Spec) -> str:
    """A digest of what is asked of the model, without the champion."""
    return digest(
        {
            "version": EVALUATION_VERSION,
            "settings": spec.evaluation.model_dump(mode="json"),
            "registered_model": spec.registered_model,
        }
    )


def key_against(spec: Spec, champion: int | None) -> str:
    """The key of the verdict under this spec's settings against a version of the registered model, or against none."""
    return f"{settings_key(spec)}-{'none' if champion is None else f'v{champion}'}"


def checks(settings: Evaluation, measured: Measured, champion: Opponent | None) -> tuple[Check, ...]:
    """Every condition of the settings, each with the value, the bound and a sentence."""
    finite = all(math.isfinite(value) for value in (measured.loss, measured.perplexity, measured.bits_per_byte))
    found = [
        Check(
            name="finite",
            value=measured.loss,
            bound=None,
            passed=finite,
            sentence=f"The held-out loss is {measured.loss:.4f} nats a token."
            if finite
            else f"The held-out loss is {measured.loss}, perplexity {measured.perplexity}: not finite numbers.",
        )
    ]
    for name, words, value, bound in (
        ("max_loss", "held-out loss", measured.loss, settings.max_loss),
        ("max_perplexity", "perplexity", measured.perplexity, settings.max_perplexity),
        ("max_bits_per_byte", "bits per byte", measured.bits_per_byte, settings.max_bits_per_byte),
    ):
        if bound is not None:
            passed = value < bound  # False for NaN
            sentence = f"{words.capitalize()} {value:.4f} is {'below' if passed else 'not below'} the bound {bound:g}."
            found.append(Check(name=name, value=value, bound=bound, passed=passed, sentence=sentence))
    if champion is not None:
        found.append(_versus(settings, measured.bits_per_byte, champion))
    return tuple(found)


def decide(made: tuple[Check, ...]) -> tuple[Word, tuple[str, ...]]:
    """The word, and the reasons for it: what failed first."""
    word: Word = "blessed" if all(check.passed for check in made) else "not_blessed"
    return word, tuple(check.sentence for check in sorted(made, key=lambda check: check.passed))


def _versus(settings: Evaluation, value: float, champion: Opponent) -> Check:
    """The comparison with the champion. One that cannot be measured is in nobody's way, and the sentence says so."""
    who = f"champion {champion.model} version {champion.version}"
    if champion.measured is None:
        return Check(
            name="versus_champion", value=value, bound=None, passed=math.isfinite(value), sentence=champion.note
        )
    theirs = champion.measured.bits_per_byte
    if not math.isfinite(theirs):
        passed, sentence = math.isfinite(value), f"The {who} has {theirs} bits per byte on the same text."
        return Check(name="versus_champion", value=value, bound=None, passed=passed, sentence=sentence)
    better = settings.versus_champion == "better"
    bound = theirs if better else theirs * (1 + settings.champion_tolerance)
    passed = value < bound if better else value <= bound
    needed = "below" if better else "at most"
    allowed = f" (with {settings.champion_tolerance:.2%} tolerance)" if bound != theirs else ""
    sentence = (
        f"{value:.4f} bits per byte against {theirs:.4f} of the {who} on the same text: "
        f"{'' if passed else 'not '}{needed} {bound:.4f}{allowed}."
    )
    return Check(name="versus_champion", value=value, bound=bound, passed=passed, sentence=sentence)
