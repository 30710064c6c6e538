"""Scores of exported models on the held-out text of a dataset: a candidate in its own tokens, a champion on the same
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from holdfast.corpus.chat import ChatTemplate
from holdfast.corpus.model_template import read_model_template
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import bytes_of_tokens, prepended_bytes, vocabulary_size
from holdfast.model.decoder import Decoder
from holdfast.model.exported import exported_files
from holdfast.model.files import TOKENIZER_BYTES, read_bytes
from holdfast.model.hugging_face import load_exported
from holdfast.scoring.score import Tokens, own_metrics, retokenise, rewindow, score
from holdfast.scoring.task_files import TaskFiles
from holdfast.scoring.tasks import score_tasks
from holdfast.scoring.verdict import Measured
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.operations import Metric
from holdfast.store import Store, open_store
from holdfast.telemetry import ConsoleProgress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from holdfast.tracking import Champion


@dataclass(frozen=True)
class ExportedModel:
    """A loaded exported model."""

    decoder: Decoder
    tokenizer: Tokenizer
    tokenizer_json: str
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, store: Store, export: str, devices: Sequence[torch.device], expected: str = "") -> ExportedModel:
        """Load the export under a key prefix of the store directly to the devices, and check every byte.

        `expected` is the digest that the export must have. Raises MissingError and DataError.
        """
        files = exported_files(store, export, expected)
        decoder, tokenizer = load_exported(files, devices)
        tokenizer_json = (read_bytes(files, "tokenizer.json", TOKENIZER_BYTES) or b"").decode()
        return cls(decoder, tokenizer, tokenizer_json, read_model_template(files))


def score_model(
    model: ExportedModel,
    dataset: Dataset,
    max_tokens: int,
    tasks: Sequence[TaskFiles] = (),
    *,
    document_masks: bool,
    metrics: Sequence[Metric] = (),
) -> Measured:
    """Score a model that was trained on the dataset's tokens: at most `max_tokens` held-out targets, `tasks`, and
    `metrics` of user code on the same targets.

    Raises DataError without held-out text.
    """
    scalar = model.decoder.score is not None
    context = model.decoder.shape.context
    rows = _held_out(dataset, context, max_tokens, "score", every_answer=scalar)
    scores = score(
        model.decoder,
        rows,
        dataset.token_bytes(),
        document_masks=document_masks,
        prepended_bytes=dataset.prepended_bytes(),
    )
    own = own_metrics(model.decoder, lambda: dataset.validation(context, max_tokens), metrics)
    scored = score_tasks(model.decoder, model.tokenizer, tasks, model.template)
    return scores.model_copy(update={"tasks": scored, "own": own})


def score_champion(
    champion: Champion,
    dataset: Dataset,
    max_tokens: int,
    devices: Sequence[torch.device],
    context: int | None = None,
    tasks: Sequence[TaskFiles] = (),
    head: str = "tokens",
    metrics: Sequence[Metric] = (),
) -> tuple[Measured, str]:
    """Score a champion on the candidate's text, on `tasks`, and with `metrics` of user code. Returns the metrics and a
    sentence on how it read the text.

    The text is that of `dataset.validation(context, max_tokens)`; the default context is the champion's. `head` is the
    candidate's (`model.head`). The champion attends within documents if it was trained with document masks. Raises
    MissingError when the champion no longer exists, and DataError without held-out text or for another head.
    """
    store = open_store(champion.store_url)
    model = ExportedModel.load(store, champion.export, devices, champion.export_digest)
    if model.decoder.shape.head != head:
        raise DataError(f"its head is for {model.decoder.shape.head}, and this model's is for {head}")
    context = context or model.decoder.shape.context
    rows, note = _same_text(dataset, max_tokens, context, model)
    size = max(model.decoder.vocabulary, vocabulary_size(model.tokenizer_json))
    scores = score(
        model.decoder,
        rows,
        bytes_of_tokens(model.tokenizer_json, size),
        document_masks=_document_masks(store, champion),
        prepended_bytes=prepended_bytes(model.tokenizer_json, size),
    )
    own = own_metrics(model.decoder, lambda: _same_text(dataset, max_tokens, context, model)[0], metrics)
    scored = score_tasks(model.decoder, model.tokenizer, tasks, model.template)
    return scores.model_copy(update={"tasks": scored, "own": own}), note


def _same_text(dataset: Dataset, max_tokens: int, context: int, model: ExportedModel) -> tuple[Iterator[Tokens], str]:
    """The candidate's held-out targets in the champion's tokens and context."""
    rows = _held_out(dataset, context, max_tokens, "champion", every_answer=model.decoder.score is not None)
    our_tokenizer, their_context = dataset.tokenizer_json(), model.decoder.shape.context
    if model.tokenizer_json == our_tokenizer:
        if their_context == context:
            return rows, "Scored on the same tokens."
        return rewindow(rows, their_context), f"Scored on the same tokens, in its context of {their_context}."
    if dataset.manifest.chat is not None:
        raise DataError("its tokenizer is another one, and what counts of a conversation is known in these tokens only")
    their_end = model.decoder.end_of_text
    if their_end is None:
        raise DataError("its config.json has no eos_token_id, which separates documents")
    from tokenizers import Tokenizer

    retokenised = retokenise(
        rows, Tokenizer.from_str(our_tokenizer), dataset.end_of_text, model.tokenizer, their_end, their_context
    )
    return retokenised, "Scored on the same text in its own tokens: its tokenizer is another one."


def _held_out(dataset: Dataset, context: int, max_tokens: int, phase: str, *, every_answer: bool) -> Iterator[Tokens]:
    """`dataset.validation`, with progress reports."""
    rows = dataset.validation(context, max_tokens, every_answer=every_answer)
    total, done = min(max_tokens, dataset.tokens("validation")), 0
    with ConsoleProgress() as progress:
        for batch in rows:
            yield batch
            done += batch[:, 1:].size
            progress(phase, min(done, total), total)


def _document_masks(store: Store, champion: Champion) -> bool:
    """Whether a champion was trained with document masks; False when its record does not exist."""
    from holdfast.tracking.registrations import described_run

    try:
        spec = described_run(store, champion.run_id, champion.run_digest).get("spec")
    except MissingError:
        return False
    data = spec.get("data") if isinstance(spec, dict) else None
    return isinstance(data, dict) and bool(data.get("document_masks", False))
