"""Evaluation: fetches the model, scores it and the champion on the same text, and writes verdict and report.

Each question is answered once. The verdict of a run under the same settings and the same champion is read back, not
measured again. The report is written first. Writing the verdict is the commit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from holdfast.code.resolve import enter_code, entered_folder
from holdfast.components.evaluate.checks import checks, decide
from holdfast.components.evaluate.report import draw
from holdfast.dataset import Dataset
from holdfast.dataset.manifest import load_manifest
from holdfast.model.exported import require_intact
from holdfast.model.generate import generate
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.secrets import redact
from holdfast.scoring import key_against, reached_against, settings_key
from holdfast.scoring.answers import score_answers
from holdfast.scoring.device import scoring_devices
from holdfast.scoring.models import ExportedModel, score_champion, score_model
from holdfast.scoring.own import score_export
from holdfast.scoring.task_files import TaskFiles, find_task
from holdfast.scoring.verdict import Measured, Opponent, OwnFigures, Sample, Verdict
from holdfast.spec.errors import DataError, MissingError, UnscorableChampionError, UserCodeError
from holdfast.spec.tree import Spec
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_json

if TYPE_CHECKING:
    from holdfast.tracking import Champion

log = logging.getLogger("holdfast.evaluate")


class _Numbered(BaseModel):
    """The number of a verdict."""

    number: int = 0


class Trained(BaseModel):
    """The fields of `result.json` that this step reads."""

    run_id: str
    dataset_id: str = ""  # empty for a script without data
    code: str = ""  # digest of the bundle of a script
    step: int
    checkpoint: str
    export: str
    export_digest: str
    state_digest: str
    seconds: float
    tokens: int = 0
    parameters: int = 0
    first_weights: str = ""  # digests of the weights that it read


def evaluate(spec: Spec, run_id: str, store: Store) -> Verdict:
    """Score the finished run `run_id` and write its verdict and report, or return its existing verdict.

    Raises:

    - MissingError if the run has not finished or its files are missing.
    - DataError without held-out text, or for a damaged export.
    - UserCodeError for a command or a metric that fails.
    - UnscorableChampionError, and ForeignVersionError for a champion of another store.
    """
    trained = _trained(store, run_id)
    if not trained.export:
        raise MissingError(
            f"run {run_id}: its script exported nothing that could be scored; call session.export(model) after "
            "the last step, and run the changed script, which is another run"
        )
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

    grpo = spec.training.grpo
    answers = grpo.environment is not None or any(each.use for each in grpo.rewards)
    if spec.evaluation.metrics or spec.evaluation.command or answers:
        enter_code(store, spec.code)
    scorer = _TextScorer(spec, store, trained, tasks) if spec.train.script is None else _ExportScorer(spec)
    measured = scorer.score_candidate(store, trained)
    opponent = None if champion is None else _oppose(spec, champion, trained, scorer)
    checklist = checks(spec.evaluation, measured, opponent)
    decision, reasons = decide(checklist)
    verdict = Verdict(
        word=decision,
        reasons=reasons,
        checks=checklist,
        metrics=measured.figures,
        device=scorer.device,
        champion=opponent,
        run_id=run_id,
        dataset_id=trained.dataset_id,
        step=trained.step,
        checkpoint=trained.checkpoint,
        export=trained.export,
        export_digest=trained.export_digest,
        state_digest=trained.state_digest,
        key=key,
        number=_next_number(store, run_id),
        settings=spec.evaluation,
        samples=scorer.samples,
        tasks=measured.tasks if isinstance(measured, Measured) else (),
    )
    manifest = load_manifest(store, trained.dataset_id) if trained.dataset_id else None
    store.put_if_absent(layout.verdict(run_id, key, "html"), draw(spec, verdict, manifest, store).encode())
    if not store.put_if_absent(layout.verdict(run_id, key), verdict.dump()):
        verdict = _read(store, run_id, key) or verdict  # another evaluation was first, on other hardware
    _mirror(spec, verdict, store)
    log.info("run %s: %s. %s", run_id, verdict.word.replace("_", " "), " ".join(verdict.reasons))
    return verdict


class _TextScorer:
    """Scores models of Holdfast's own loop on held-out text, and by the metrics and the command of the spec."""

    def __init__(self, spec: Spec, store: Store, trained: Trained, tasks: Sequence[TaskFiles]) -> None:
        self._spec, self._tasks = spec, tasks
        self._dataset = Dataset.open(store, trained.dataset_id, cache_dir())
        self._devices = scoring_devices(spec.cluster)
        self.device = self._devices[0].type
        self.samples: tuple[Sample, ...] = ()

    def score_candidate(self, store: Store, trained: Trained) -> OwnFigures:
        """The metrics of the run. Its samples are `samples` from here on."""
        evaluation = self._spec.evaluation
        model = ExportedModel.load(store, trained.export, self._devices, trained.export_digest)
        measured = score_model(
            model,
            self._dataset,
            evaluation.max_tokens,
            self._tasks,
            document_masks=self._spec.data.document_masks,
            metrics=evaluation.metrics,
        )
        self._context = model.decoder.shape.context
        if self._spec.data.kind == "prompts":
            answers = score_answers(self._spec, model, self._dataset, entered_folder(), trained.first_weights)
            measured = measured.model_copy(update=answers)
        if math.isfinite(measured.loss):
            self.samples = _samples(self._spec, model)
        return self._with_command(measured, store, trained.export, trained.export_digest)

    def score_champion(self, champion: Champion) -> tuple[OwnFigures, str]:
        """The metrics of a champion on the same text, and a sentence about it."""
        evaluation = self._spec.evaluation
        measured, note = score_champion(
            champion,
            self._dataset,
            evaluation.max_tokens,
            self._devices,
            self._context,
            [task for task in self._tasks if task.task.champion_tolerance is not None],
            self._spec.model.head,
            evaluation.metrics,
        )
        origin = open_store(champion.store_url)
        return self._with_command(measured, origin, champion.export, champion.export_digest), note

    def _with_command(self, measured: Measured, store: Store, export: str, expected: str) -> Measured:
        if not self._spec.evaluation.command:
            return measured
        values = score_export(self._spec.evaluation, store, export, expected)
        return measured.model_copy(update={"own": {**values, **measured.own}})


class _ExportScorer:
    """Scores exports of training scripts by the command and the functions of the spec."""

    samples: tuple[Sample, ...] = ()

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.device = spec.cluster.accelerator

    def score_candidate(self, store: Store, trained: Trained) -> OwnFigures:
        """The metrics of the run."""
        return self._score(store, trained.export, trained.export_digest)

    def score_champion(self, champion: Champion) -> tuple[OwnFigures | None, str]:
        """The metrics of a champion, and a sentence about it."""
        if all(metric.versus_champion == "ignore" for metric in self._spec.evaluation.metrics):
            return None, "No metric of the spec compares with the champion: it was not scored."
        measured = self._score(open_store(champion.store_url), champion.export, champion.export_digest)
        return measured, "Scored by the same code."

    def _score(self, store: Store, export: str, expected: str) -> OwnFigures:
        return OwnFigures(own=score_export(self._spec.evaluation, store, export, expected, functions=True))


def _mirror(spec: Spec, verdict: Verdict, store: Store) -> None:
    """Show the verdict in each tracker, blessed or not. Without a tracker it logs a warning, because the store has the
    record."""
    from holdfast.tracking import TrackingUnavailable, open_all

    for tracker in open_all(spec, verdict.run_id, verdict.dataset_id, store):
        try:
            tracker.log_evaluation(verdict.model_dump(mode="json"))
        except TrackingUnavailable as error:
            log.warning("the verdict is not in %s for now, it is safe in the store: %s", tracker.name, error)


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


def _next_number(store: Store, run_id: str) -> int:
    """One more than the highest number of a verdict on the run. Damaged verdicts have none."""
    numbers = [0]
    for info in store.list(layout.run(run_id, "evaluations/")):
        if info.key.endswith(".json"):
            with suppress(MissingError, DataError):
                numbers.append(read_json(store, info.key, _Numbered).number)
    return max(numbers) + 1


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


def _oppose(spec: Spec, champion: Champion, trained: Trained, scorer: _TextScorer | _ExportScorer) -> Opponent:
    """Score the champion in the same way. Raises UnscorableChampionError, unless the spec ignores such a champion."""
    opponent = f"champion {champion.model} version {champion.version}"
    measured: OwnFigures | None = None
    if _is_champion(trained, champion):
        note = f"The {opponent} is this very run: there is nothing to compare."
    elif spec.data.kind == "prompts":
        note = f"The {opponent} did not get the same prompts: answers are not compared."
    else:
        try:
            measured, note = scorer.score_champion(champion)
        except (MissingError, DataError, UserCodeError) as error:
            if spec.evaluation.unscorable_champion == "refuse":
                raise UnscorableChampionError(
                    f"the {opponent} could not be scored, so run {trained.run_id} was not compared with it: {error}. "
                    "Restore what is missing, or promote another version (holdfast models promote MODEL/VERSION), or "
                    "judge without it: evaluation.unscorable_champion: ignore"
                ) from error
            note = redact(f"The {opponent} could not be scored, so nothing was compared: {error}")  # it is published
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
