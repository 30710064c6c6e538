"""The evaluation itself: fetch the model, score it and the champion on the same text, write verdict and report.

Promises that the same question is answered once: the verdict of a run under the same settings and the same champion is
read back, not measured again. The report is written first and the verdict last: a verdict is the commit.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ValidationError

from holdfast.components.dataset import Dataset
from holdfast.components.dataset.vocabulary import bytes_of_tokens, vocabulary_size
from holdfast.components.evaluate.report import draw
from holdfast.components.evaluate.score import Tokens, retokenise, rewindow, score
from holdfast.components.evaluate.verdict import (
    Measured,
    Opponent,
    Sample,
    Verdict,
    checks,
    decide,
    key_against,
    settings_key,
)
from holdfast.components.model.decoder import Decoder
from holdfast.components.model.exported import fetch_exported
from holdfast.components.model.generate import generate
from holdfast.components.model.hugging_face import load_exported
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.spec.tree import Spec
from holdfast.components.store import Store, layout, open_store
from holdfast.components.telemetry import ConsoleProgress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from holdfast.components.tracking import Champion

log = logging.getLogger("holdfast.evaluate")


class Trained(BaseModel):
    """What this step reads of `result.json`."""

    run_id: str
    dataset_id: str
    step: int
    checkpoint: str
    export: str
    state_digest: str
    seconds: float
    tokens: int = 0
    parameters: int = 0


def evaluate(spec: Spec, run_id: str, store: Store) -> Verdict:
    """Score the finished run `run_id` and write its verdict and report, or return the verdict that there is.

    Raises MissingError when the run has not finished or its files are gone, DataError when there is no held-out text.
    """
    trained = _trained(store, run_id)
    champion = _champion(spec)
    settings = settings_key(spec)
    if champion is not None and champion.run_id == run_id and (earlier := _blessed(store, run_id, settings)):
        return earlier
    key = key_against(spec, None if champion is None else champion.version)
    if (known := _read(store, run_id, key)) is not None:
        log.info("run %s: %s, as found before", run_id, known.word)
        _mirror(spec, known, store)  # whoever wrote it may have died before this
        return known

    dataset = Dataset.open(store, trained.dataset_id, cache_dir())
    with _exported(store, trained.export) as folder:
        decoder, tokenizer = _load(folder)
        measured = score(
            decoder,
            _held_out(dataset, decoder.shape.context, spec.evaluation.max_tokens, "score"),
            dataset.token_bytes(),
            document_masks=spec.data.document_masks,
        )
        samples = _samples(spec, decoder, tokenizer) if math.isfinite(measured.loss) else ()
    opponent = None
    if champion is not None:
        opponent = _oppose(spec, champion, run_id, dataset, context=decoder.shape.context)
    made = checks(spec.evaluation, measured, opponent)
    word, reasons = decide(made)
    verdict = Verdict(
        word=word,
        reasons=reasons,
        checks=made,
        metrics=measured.model_dump(),
        champion=opponent,
        run_id=run_id,
        dataset_id=trained.dataset_id,
        step=trained.step,
        checkpoint=trained.checkpoint,
        export=trained.export,
        state_digest=trained.state_digest,
        key=key,
        settings=spec.evaluation,
        samples=samples,
    )
    store.put_if_absent(layout.verdict(run_id, key, "html"), draw(spec, verdict, dataset.manifest, store).encode())
    if not store.put_if_absent(layout.verdict(run_id, key), verdict.dump()):
        verdict = _read(store, run_id, key) or verdict  # another evaluation came first, on other hardware
    _mirror(spec, verdict, store)
    log.info("run %s: %s. %s", run_id, verdict.word.replace("_", " "), " ".join(verdict.reasons))
    return verdict


def _mirror(spec: Spec, verdict: Verdict, store: Store) -> None:
    """Show the verdict in MLflow too, blessed or not. MLflow away: a warning, for the store has the truth."""
    from holdfast.components.tracking import RunTracker, TrackingUnavailable

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


def _blessed(store: Store, run_id: str, settings: str) -> Verdict | None:
    """The verdict under these settings that made the run champion."""
    folder = layout.run(run_id, "evaluations/")
    for info in store.list(f"{folder}{settings}-"):
        if info.key.endswith(".json"):
            verdict = _read(store, run_id, info.key.removeprefix(folder).removesuffix(".json"))
            if verdict is not None and verdict.blessed:
                return verdict
    return None


def _champion(spec: Spec) -> Champion | None:
    if spec.evaluation.versus_champion == "ignore":
        return None
    from holdfast.components.tracking import champion

    return champion(spec.registered_model)


def _oppose(spec: Spec, champion: Champion, run_id: str, dataset: Dataset, *, context: int) -> Opponent:
    """Score the champion on the text that `dataset.validation(context, ...)` gives."""
    who = f"champion {champion.model} version {champion.version}"

    def opponent(measured: Measured | None, note: str) -> Opponent:
        return Opponent(
            model=champion.model, version=champion.version, run_id=champion.run_id, measured=measured, note=note
        )

    if champion.run_id == run_id:
        return opponent(None, f"The {who} is this very run: there is nothing to compare.")
    try:
        measured, note = _measure(champion, dataset, spec.evaluation.max_tokens, context)
    except (MissingError, DataError) as error:
        note = f"The {who} could not be scored, so nothing was compared: {error}"
        log.warning("%s", note)
        return opponent(None, note)
    return opponent(measured, note)


def score_champion(champion: Champion, dataset_id: str, store: Store, max_tokens: int) -> Measured:
    """The figures of a champion on the held-out split of a dataset in `store`, at most `max_tokens` targets of it.

    Raises MissingError when the champion or the dataset is gone, DataError when there is no held-out text.
    """
    return _measure(champion, Dataset.open(store, dataset_id, cache_dir()), max_tokens)[0]


def _measure(champion: Champion, dataset: Dataset, max_tokens: int, context: int | None = None) -> tuple[Measured, str]:
    """The champion on the text that `dataset.validation(context, ...)` gives (its own context by default)."""
    store = open_store(champion.store_url)
    with _exported(store, champion.export) as folder:
        decoder, tokenizer = _load(folder)
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    context = context or decoder.shape.context
    rows, note = _same_text(dataset, max_tokens, context, decoder, tokenizer, tokenizer_json)
    measured = score(
        decoder,
        rows,
        bytes_of_tokens(tokenizer_json, max(decoder.vocabulary, vocabulary_size(tokenizer_json))),
        document_masks=_document_masks(store, champion.run_id),
    )
    return measured, note


def _same_text(
    dataset: Dataset, max_tokens: int, context: int, decoder: Decoder, tokenizer: Tokenizer, tokenizer_json: str
) -> tuple[Iterator[Tokens], str]:
    """The candidate's held-out targets as the champion reads them."""
    rows = _held_out(dataset, context, max_tokens, "champion")
    ours = dataset.tokenizer_json()
    if tokenizer_json == ours:
        if decoder.shape.context == context:
            return rows, "Scored on the same tokens."
        return rewindow(
            rows, decoder.shape.context
        ), f"Scored on the same tokens, in its context of {decoder.shape.context}."
    if decoder.end_of_text is None:
        raise DataError("its config.json has no eos_token_id, which separates documents")
    from tokenizers import Tokenizer

    their_end = decoder.end_of_text
    again = retokenise(rows, Tokenizer.from_str(ours), dataset.end_of_text, tokenizer, their_end, decoder.shape.context)
    return again, "Scored on the same text in its own tokens: its tokenizer is another one."


def _held_out(dataset: Dataset, context: int, max_tokens: int, phase: str) -> Iterator[Tokens]:
    """`dataset.validation`, saying how far it is read."""
    rows = dataset.validation(context, max_tokens)
    total, done = min(max_tokens, dataset.tokens("validation")), 0
    with ConsoleProgress() as progress:
        for batch in rows:
            yield batch
            done += batch[:, 1:].size
            progress(phase, min(done, total), total)


def _document_masks(store: Store, run_id: str) -> bool:
    """Whether a run was trained with document masks; False when its record is gone."""
    try:
        described = json.loads(store.get(layout.run(run_id, "run.json")))
    except MissingError:
        return False
    return bool(described.get("spec", {}).get("data", {}).get("document_masks", False))


def _samples(spec: Spec, decoder: Decoder, tokenizer: Tokenizer) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            prompt=prompt,
            text=generate(
                decoder,
                tokenizer,
                prompt,
                tokens=spec.evaluation.sample_tokens,
                temperature=spec.evaluation.temperature,
                seed=spec.training.seed,
            ),
        )
        for prompt in spec.evaluation.prompts
    )


def _load(folder: Path) -> tuple[Decoder, Tokenizer]:
    decoder, tokenizer = load_exported(folder)
    return decoder.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


@contextmanager
def _exported(store: Store, export: str) -> Iterator[Path]:
    """The folder of an export: where it lies, or a copy for as long as it is needed. Raises MissingError."""
    with tempfile.TemporaryDirectory(prefix="holdfast-evaluate-") as copies:
        yield fetch_exported(store, export, Path(copies))
