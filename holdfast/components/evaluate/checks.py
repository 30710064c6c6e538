"""Checks from measurements to a verdict: each condition of the spec's evaluation section, and the decision.

A number that is not finite never blesses, under any settings. The same measurements give the same verdict.
`holdfast.scoring` measures.
"""

import math
from collections.abc import Iterator

from holdfast.scoring.verdict import Check, Measured, Opponent, OwnFigures, TaskScore, Word
from holdfast.spec.operations import Evaluation, Metric, Task


def checks(settings: Evaluation, measured: OwnFigures, champion: Opponent | None) -> tuple[Check, ...]:
    """Every condition of the settings, each with its value, its bound and a sentence."""
    made = list(_of_text(settings, measured, champion)) if isinstance(measured, Measured) else []
    made.extend(_of_unnamed(settings, measured))
    for metric in settings.metrics:
        made.extend(_of_metric(metric, measured.own[metric.label], champion))
    if champion is not None:
        if isinstance(measured, Measured):
            made.append(_versus(settings, measured.bits_per_byte, champion))
        elif champion.measured is None:
            made.append(Check(name="versus_champion", value=0.0, bound=None, passed=True, sentence=champion.note))
    return tuple(made)


def _of_text(settings: Evaluation, measured: Measured, champion: Opponent | None) -> Iterator[Check]:
    """The checks of the figures on held-out text, and of the tasks."""
    finite = all(math.isfinite(value) for value in (measured.loss, measured.perplexity, measured.bits_per_byte))
    yield Check(
        name="finite",
        value=measured.loss,
        bound=None,
        passed=finite,
        sentence=f"The held-out loss is {measured.loss:.4f} nats a token."
        if finite
        else f"The held-out loss is {measured.loss}, perplexity {measured.perplexity}: not finite numbers.",
    )
    for name, description, value, bound in (
        ("max_loss", "held-out loss", measured.loss, settings.max_loss),
        ("max_perplexity", "perplexity", measured.perplexity, settings.max_perplexity),
        ("max_bits_per_byte", "bits per byte", measured.bits_per_byte, settings.max_bits_per_byte),
    ):
        if bound is not None:
            passed = value < bound  # False for NaN
            sentence = (
                f"{description.capitalize()} {value:.4f} is {'below' if passed else 'not below'} the bound {bound:g}."
            )
            yield Check(name=name, value=value, bound=bound, passed=passed, sentence=sentence)
    for name, description, share, bound in (
        ("min_pass_at_1", "pass@1", measured.pass_at_1, settings.min_pass_at_1),
        ("min_pass_at_k", f"pass@{settings.answers}", measured.pass_at_k, settings.min_pass_at_k),
    ):
        if bound is not None and share is not None:
            passed = share >= bound
            sentence = f"{description} {share:.4f} {'reaches' if passed else 'does not reach'} the bound {bound:g}."
            yield Check(name=name, value=share, bound=bound, passed=passed, sentence=sentence)
    for task, score in zip(settings.tasks, measured.tasks, strict=True):
        yield from _of_task(task, score, champion)


def _of_unnamed(settings: Evaluation, measured: OwnFigures) -> Iterator[Check]:
    """The check that metrics are finite that the command wrote and the spec does not name."""
    named = {metric.label for metric in settings.metrics}
    for name, value in measured.own.items():
        if name not in named and not math.isfinite(value):
            sentence = f"Metric {name}: {value} is not a finite number."
            yield Check(name=f"metric.{name}", value=value, bound=None, passed=False, sentence=sentence)


def decide(made: tuple[Check, ...]) -> tuple[Word, tuple[str, ...]]:
    """The outcome, and its reasons. Failed checks come first."""
    word: Word = "blessed" if all(check.passed for check in made) else "not_blessed"
    return word, tuple(check.sentence for check in sorted(made, key=lambda check: check.passed))


def _of_task(task: Task, score: TaskScore, champion: Opponent | None) -> Iterator[Check]:
    """The checks of a downstream task, if it has bounds."""
    name, subject = f"task.{score.task}.{score.metric}", f"Task {score.task}: {score.metric} {score.value:.4f}"
    sign = 1 if score.higher_is_better else -1
    if task.bound is not None:
        passed = sign * score.value >= sign * task.bound  # False for NaN
        relation = "reaches" if passed else "does not reach"
        yield Check(
            name=name,
            value=score.value,
            bound=task.bound,
            passed=passed,
            sentence=f"{subject} {relation} {task.bound:g}.",
        )
    if task.champion_tolerance is None or champion is None or not isinstance(champion.measured, Measured):
        return
    theirs = next(
        (score_of_champion for score_of_champion in champion.measured.tasks if score_of_champion.asks_the_same(score)),
        None,
    )
    if theirs is None or not math.isfinite(theirs.value):
        sentence = f"{subject}: the champion has no figure to compare with."
        yield Check(name=f"{name}.versus_champion", value=score.value, bound=None, passed=True, sentence=sentence)
        return
    bound = theirs.value - sign * task.champion_tolerance
    passed = sign * score.value >= sign * bound
    sentence = (
        f"{subject} against {theirs.value:.4f} of the champion {champion.model} version {champion.version}: "
        f"{'' if passed else 'not '}within {task.champion_tolerance:g}."
    )
    yield Check(name=f"{name}.versus_champion", value=score.value, bound=bound, passed=passed, sentence=sentence)


def _of_metric(metric: Metric, value: float, champion: Opponent | None) -> Iterator[Check]:
    """The checks of a metric of user code: that it is finite, its bounds, and the comparison with the champion."""
    name, subject = f"metric.{metric.label}", f"Metric {metric.label}: {value:.4f}"
    if not math.isfinite(value):
        yield Check(name=name, value=value, bound=None, passed=False, sentence=f"{subject} is not a finite number.")
        return
    for bound, reaches, sign in ((metric.at_least, "at least", 1), (metric.at_most, "at most", -1)):
        if bound is not None:
            passed = sign * value >= sign * bound
            sentence = f"{subject} is {'' if passed else 'not '}{reaches} {bound:g}."
            yield Check(name=name, value=value, bound=bound, passed=passed, sentence=sentence)
    if metric.versus_champion == "ignore" or champion is None or champion.measured is None:
        return
    theirs = champion.measured.own.get(metric.label, math.nan)
    opponent = f"champion {champion.model} version {champion.version}"
    if not math.isfinite(theirs):
        sentence = f"{subject}: the {opponent} has no finite figure to compare with."
        yield Check(name=f"{name}.versus_champion", value=value, bound=None, passed=True, sentence=sentence)
        return
    sign, better = 1 if metric.higher_is_better else -1, metric.versus_champion == "better"
    bound = theirs if better else theirs - sign * metric.tolerance
    passed = sign * value > sign * bound if better else sign * value >= sign * bound
    relation = f"{'' if passed else 'not '}{'better' if better else 'as good'}"
    sentence = f"{subject} against {theirs:.4f} of the {opponent}: {relation}."
    yield Check(name=f"{name}.versus_champion", value=value, bound=bound, passed=passed, sentence=sentence)


def _versus(settings: Evaluation, value: float, champion: Opponent) -> Check:
    """The comparison with the champion. A champion that cannot be measured blocks nothing, which the sentence
    states."""
    opponent = f"champion {champion.model} version {champion.version}"
    if champion.measured is None:
        return Check(
            name="versus_champion", value=value, bound=None, passed=math.isfinite(value), sentence=champion.note
        )
    if not isinstance(champion.measured, Measured):
        sentence = f"The {opponent} has no bits per byte: a training script made it."
        return Check(name="versus_champion", value=value, bound=None, passed=math.isfinite(value), sentence=sentence)
    theirs = champion.measured.bits_per_byte
    if not math.isfinite(theirs):
        passed, sentence = math.isfinite(value), f"The {opponent} has {theirs} bits per byte on the same text."
        return Check(name="versus_champion", value=value, bound=None, passed=passed, sentence=sentence)
    better = settings.versus_champion == "better"
    bound = theirs if better else theirs * (1 + settings.champion_tolerance)
    passed = value < bound if better else value <= bound
    relation = "below" if better else "at most"
    allowed = f" (with {settings.champion_tolerance:.2%} tolerance)" if bound != theirs else ""
    sentence = (
        f"{value:.4f} bits per byte against {theirs:.4f} of the {opponent} on the same text: "
        f"{'' if passed else 'not '}{relation} {bound:.4f}{allowed}."
    )
    return Check(name="versus_champion", value=value, bound=bound, passed=passed, sentence=sentence)
