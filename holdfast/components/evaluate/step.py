"""Evaluation: fetches the model, scores it and the champion on the same text, and writes verdict and report.

Each question is answered once. The verdict of a run under the same settings and the same champion is read back, not
measured again. The report is written first. Writing the verdict is the commit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from holdfast.code.resolve import enter_code
from holdfast.components.evaluate.report import draw
from holdfast.dataset import Dataset
from holdfast.model.exported import require_intact
from holdfast.model.generate import generate
from holdfast.runtime.environment import cache_dir
from holdfast.scoring import key_against, reached_against, settings_key
from holdfast.scoring.device import scoring_devices
from holdfast.scoring.models import ExportedModel, score_champion, score_model
from holdfast.scoring.tasks import TaskFiles, find_task
from holdfast.scoring.verdict import Check, Measured, Opponent, Sample, TaskScore, Verdict, Word
from holdfast.spec.errors import DataError, MissingError, UnscorableChampionError
from holdfast.spec.operations import Evaluation, Metric, Task
from holdfast.spec.tree import Spec
from holdfast.store import Store, layout

if TYPE_CHECKING:
    import torch

    from holdfast.tracking import Champion

# Checks from measurements to a verdict: each condition of the spec's evaluation section, and the decision.
#
# A number that is not finite never blesses, under any settings. The same measurements give the same verdict.
# `holdfast.scoring` measures.


def checks(settings: Evaluation, measured: Measured, champion: Opponent | None) -> tuple[Check, ...]:
    """Every condition of the settings, each with its value, its bound and a sentence."""
    finite = all(math.isfinite(value) for value in (measured.loss, measured.perplexity, measured.bits_per_byte))
    checks_made = [
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
            checks_made.append(Check(name=name, value=value, bound=bound, passed=passed, sentence=sentence))
    for task, score in zip(settings.tasks, measured.tasks, strict=True):
        checks_made.extend(_of_task(task, score, champion))
    for metric in settings.metrics:
        checks_made.extend(_of_metric(metric, measured.own[metric.name], champion))
    if champion is not None:
        checks_made.append(_versus(settings, measured.bits_per_byte, champion))
    return tuple(checks_made)


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
    if task.champion_tolerance is None or champion is None or champion.measured is None:
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
    name, subject = f"metric.{metric.name}", f"Metric {metric.name}: {value:.4f}"
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
    theirs = champion.measured.own.get(metric.name, math.nan)
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


log = logging.getLogger("holdfast.evaluate")


class Trained(BaseModel):
    """The fields of `result.json` that this step reads."""

    run_id: str
    dataset_id: str
    step: int
    checkpoint: str
    export: str
    export_digest: str
    state_digest: str
    seconds: float
    tokens: int = 0
    parameters: int = 0


def evaluate(spec: Spec, run_id: str, store: Store) -> Verdict:
    """Score the finished run `run_id` and write its verdict and report, or return its existing verdict.

    Raises:

    - MissingError if the run has not finished or its files are missing.
    - DataError without held-out text, or for a damaged export.
    - UnscorableChampionError, and ForeignVersionError for a champion of another store.
    """
    trained = _trained(store, run_id)
    require_intact(store, trained.export, trained.export_digest, changed=True)
    champion = _champion(spec, store)
    if champion is not None and _is_champion(trained, champion) and (earlier := _blessed(spec, store, trained)):
        return earlier
    key = key_against(spec, champion)
    tasks = [find_task(task) for task in spec.evaluation.tasks]
    if (existing := _known(store, trained, key, champion, tasks)) is not None:
        log.info("run %s: %s, as found before", run_id, existing.word)
        _mirror(spec, existing, store)  # its writer may have died before this
        return existing

    dataset = Dataset.open(store, trained.dataset_id, cache_dir())
    devices = scoring_devices(spec.cluster)
    model = ExportedModel.load(store, trained.export, devices, trained.export_digest)
    if spec.evaluation.metrics:
        enter_code(store, spec.code)
    measured = score_model(
        model,
        dataset,
        spec.evaluation.max_tokens,
        tasks,
        document_masks=spec.data.document_masks,
        metrics=spec.evaluation.metrics,
    )
    samples = _samples(spec, model) if math.isfinite(measured.loss) else ()
    opponent = None
    if champion is not None:
        compared = [task for task in tasks if task.task.champion_tolerance is not None]
        opponent = _oppose(spec, champion, trained, dataset, devices, compared, context=model.decoder.shape.context)
    checklist = checks(spec.evaluation, measured, opponent)
    decision, reasons = decide(checklist)
    verdict = Verdict(
        word=decision,
        reasons=reasons,
        checks=checklist,
        metrics=measured.figures,
        device=devices[0].type,
        champion=opponent,
        run_id=run_id,
        dataset_id=trained.dataset_id,
        step=trained.step,
        checkpoint=trained.checkpoint,
        export=trained.export,
        export_digest=trained.export_digest,
        state_digest=trained.state_digest,
        key=key,
        settings=spec.evaluation,
        samples=samples,
        tasks=measured.tasks,
    )
    store.put_if_absent(layout.verdict(run_id, key, "html"), draw(spec, verdict, dataset.manifest, store).encode())
    if not store.put_if_absent(layout.verdict(run_id, key), verdict.dump()):
        verdict = _read(store, run_id, key) or verdict  # another evaluation was first, on other hardware
    _mirror(spec, verdict, store)
    log.info("run %s: %s. %s", run_id, verdict.word.replace("_", " "), " ".join(verdict.reasons))
    return verdict


def _mirror(spec: Spec, verdict: Verdict, store: Store) -> None:
    """Show the verdict in MLflow, blessed or not. Without MLflow it logs a warning, because the store has the
    record."""
    from holdfast.tracking import RunTracker, TrackingUnavailable

    try:
        RunTracker.open(spec, verdict.run_id, verdict.dataset_id, store).log_evaluation(verdict.model_dump(mode="json"))
    except TrackingUnavailable as error:
        log.warning("the verdict is not in MLflow for now, it is safe in the store: %s", error)


def _trained(store: Store, run_id: str) -> Trained:
    key = layout.result(run_id)
    try:
        return Trained.model_validate_json(store.get(key))
    except MissingError:
        raise MissingError(f"{store.url}/{key}: does not exist; train run {run_id} to its end first") from None
    except ValidationError as error:
        raise DataError(f"{store.url}/{key}: {error.errors()[0]['msg']}; delete it and train again") from None


def _read(store: Store, run_id: str, key: str) -> Verdict | None:
    name = layout.verdict(run_id, key)
    if store.stat(name) is None:
        return None
    try:
        return Verdict.model_validate_json(store.get(name))
    except ValidationError as error:
        raise DataError(f"{store.url}/{name}: {error.errors()[0]['msg']}; delete it and evaluate again") from None


def _known(
    store: Store, trained: Trained, key: str, champion: Champion | None, tasks: Sequence[TaskFiles]
) -> Verdict | None:
    """The verdict under a key. A verdict is deleted if it covers other weights (a new training without exactness),
    another champion than its key, or tasks with changed files."""
    verdict = _read(store, trained.run_id, key)
    if verdict is None:
        return None
    same_tasks = [task_score.digest for task_score in verdict.tasks] == [task.digest for task in tasks]
    if _same_weights(verdict, trained) and reached_against(verdict.model_dump(), champion) and same_tasks:
        return verdict
    log.warning(
        "run %s: verdict %s is about other weights, tasks or another champion: judging anew", trained.run_id, key
    )
    for suffix in ("json", "html"):
        store.delete(layout.verdict(trained.run_id, key, suffix))
    return None


def _same_weights(verdict: Verdict, trained: Trained) -> bool:
    return (verdict.state_digest, verdict.export_digest) == (trained.state_digest, trained.export_digest)


def _is_champion(trained: Trained, champion: Champion) -> bool:
    return (champion.run_id, champion.state_digest or trained.state_digest) == (trained.run_id, trained.state_digest)


def _blessed(spec: Spec, store: Store, trained: Trained) -> Verdict | None:
    """The verdict under these settings that made the run champion."""
    folder = layout.run(trained.run_id, "evaluations/")
    for info in store.list(f"{folder}{settings_key(spec)}-"):
        if info.key.endswith(".json"):
            verdict = _read(store, trained.run_id, info.key.removeprefix(folder).removesuffix(".json"))
            if verdict is not None and verdict.blessed and _same_weights(verdict, trained):
                return verdict
    return None


def _champion(spec: Spec, store: Store) -> Champion | None:
    if spec.evaluation.versus_champion == "ignore":
        return None
    from holdfast.tracking import champion, trusted_stores

    return champion(spec.registered_model, trusted_stores(spec, store))


def _oppose(
    spec: Spec,
    champion: Champion,
    trained: Trained,
    dataset: Dataset,
    devices: Sequence[torch.device],
    tasks: Sequence[TaskFiles],
    *,
    context: int,
) -> Opponent:
    """Score the champion on the text of `dataset.validation(context, ...)` and on `tasks`. Raises
    UnscorableChampionError, unless the spec ignores such a champion."""
    opponent = f"champion {champion.model} version {champion.version}"
    measured: Measured | None = None
    if _is_champion(trained, champion):
        note = f"The {opponent} is this very run: there is nothing to compare."
    else:
        try:
            measured, note = score_champion(
                champion,
                dataset,
                spec.evaluation.max_tokens,
                devices,
                context,
                tasks,
                spec.model.head,
                spec.evaluation.metrics,
            )
        except (MissingError, DataError) as error:
            if spec.evaluation.unscorable_champion == "refuse":
                raise UnscorableChampionError(
                    f"the {opponent} could not be scored, so run {trained.run_id} was not compared with it: {error}. "
                    "Restore what is missing, or promote another version (holdfast models promote MODEL/VERSION), or "
                    "judge without it: evaluation.unscorable_champion: ignore"
                ) from error
            note = f"The {opponent} could not be scored, so nothing was compared: {error}"
            log.warning("%s", note)
    return Opponent(**champion.identity, measured=measured, note=note)


def _samples(spec: Spec, model: ExportedModel) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            prompt=prompt,
            text=generate(
                model.decoder,
                model.tokenizer,
                prompt,
                tokens=spec.evaluation.sample_tokens,
                temperature=spec.evaluation.temperature,
                seed=spec.training.seed,
            ),
        )
        for prompt in spec.evaluation.prompts
    )
