"""Checks from measurements to a verdict: each condition of the spec's evaluation section, and the decision.

A number that is not finite never blesses, under any settings. The same measurements give the same verdict.
`holdfast.scoring` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.scoring.verdict import Check, Measured, Opponent, TaskScore, Word
from holdfast.spec.operations import Evaluation, Task


def checks(settings: Evaluation, measured: Measured, champion: Opponent | None) -> tuple[Check, ...]:
    """Every condition of the settings, each with its value, its bound and a sentence."""
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
    for task, score in zip(settings.tasks, measured.tasks, strict=True):
        found.extend(_of_task(task, score, champion))
    if champion is not None:
        found.append(_versus(settings, measured.bits_per_byte, champion))
    return tuple(found)


def decide(made: tuple[Check, ...]) -> tuple[Word, tuple[str, ...]]:
    """The outcome, and its reasons. Failed checks come first."""
    word: Word = "blessed" if all(check.passed for check in made) else "not_blessed"
    return word, tuple(check.sentence for check in sorted(made, key=lambda check: check.passed))


def _of_task(task: Task, score: TaskScore, champion: Opponent | None) -> Iterator[Check]:
    """The checks of a downstream task, if it has bounds."""
    name, what = f"task.{score.task}.{score.metric}", f"Task {score.task}: {score.metric} {score.value:.4f}"
    sign = 1 if score.higher_is_better else -1
    if task.bound is not None:
        passed = sign * score.value >= sign * task.bound  # False for NaN
        words = "reaches" if passed else "does not reach"
        yield Check(
            name=name, value=score.value, bound=task.bound, passed=passed, sentence=f"{what} {words} {task.bound:g}."
        )
    if task.champion_tolerance is None or champion is None or champion.measured is None:
        return
    theirs = next((each for each in champion.measured.tasks if each.asks_the_same(score)), None)
    if theirs is None or not math.isfinite(theirs.value):
        sentence = f"{what}: the champion has no figure to compare with."
        yield Check(name=f"{name}.versus_champion", value=score.value, bound=None, passed=True, sentence=sentence)
        return
    bound = theirs.value - sign * task.champion_tolerance
    passed = sign * score.value >= sign * bound
    sentence = (
        f"{what} against {theirs.value:.4f} of the champion {champion.model} version {champion.version}: "
        f"{'' if passed else 'not '}within {task.champion_tolerance:g}."
    )
    yield Check(name=f"{name}.versus_champion", value=score.value, bound=bound, passed=passed, sentence=sentence)


def _versus(settings: Evaluation, value: float, champion: Opponent) -> Check:
    """The comparison with the champion. A champion that cannot be measured blocks nothing, which the sentence
    states."""
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
