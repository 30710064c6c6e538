"""Loss on held-out text, and the same text for two models with different tokenizers and contexts.

Sums are in double precision and in a fixed order. The memory for logits is bounded for any context and vocabulary. A
champion is scored on exactly the candidate's text. The evaluate step makes the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.code.load import describe
from holdfast.code.resolve import bind, entered_folder
from holdfast.corpus.encode import load_tokenizer, settled
from holdfast.dataset.vocabulary import ENDS, ID, NO_TOKEN, UNCOUNTED
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder, numbered
from holdfast.model.token_logprobs import CHUNK, token_logprobs
from holdfast.objectives.interface import ObjectiveInputs, micro_batches
from holdfast.objectives.preference import RewardModel
from holdfast.scoring.own import number_of
from holdfast.scoring.verdict import Measured
from holdfast.spec.errors import DataError, UserCodeError
from holdfast.spec.operations import Metric

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int64]
ACTIVATION_BYTES = 512 * 2**20  # of a layer's widest array in fp32; several exist at the same time
LOGITS_BYTES = 256 * 2**20  # of one array of logits in fp32; two or three exist at the same time


@torch.inference_mode()
def score(
    decoder: Decoder,
    rows: Iterable[Tokens],
    token_bytes: Tokens,
    *,
    document_masks: bool,
    prepended_bytes: Tokens | None = None,
) -> Measured:
    """Mean cross-entropy over the counted targets of `rows` ([n, T + 1] each: inputs [:, :-1], targets [:, 1:]).

    A model with a scalar head is scored on the pairs of `rows` instead (see `RewardModel`): the loss is their mean.

    - `token_bytes`: UTF-8 bytes of each token.
    - `prepended_bytes`: those of them that are not text where the token begins a document.
    - `document_masks`: attention stays inside a document, as in training. Documents end with the end-of-text token, or
      at the marks in rows that have them (see `dataset.vocabulary`).

    Raises DataError without any target.
    """
    device = decoder.model.embed_tokens.weight.device
    if decoder.score is not None:
        return _score_pairs(decoder, rows, token_bytes, device)
    nats, tokens, text_bytes = 0.0, 0, 0
    for row in (part for batch in rows for part in _affordable(batch, decoder)):
        marked = bool((row > ID).any())
        is_counted = (row[:, 1:] & UNCOUNTED) == 0
        inputs, targets = (
            torch.from_numpy(np.ascontiguousarray(part & ID)).to(device) for part in (row[:, :-1], row[:, 1:])
        )
        ends = None
        if document_masks and marked:
            ends = (row[:, :-1] & ENDS) != 0
        elif document_masks and decoder.end_of_text is not None:
            ends = row[:, :-1] == decoder.end_of_text
        segments = None if ends is None else Segments.of_documents(numbered(torch.from_numpy(ends)))
        losses = _losses(decoder, inputs, targets, segments).double().cpu()
        nats += float(losses[torch.from_numpy(is_counted).flatten()].sum())
        tokens += int(is_counted.sum())
        text_bytes += int(token_bytes[(row[:, 1:] & ID)[is_counted]].sum())
        if prepended_bytes is not None and decoder.end_of_text is not None and not marked:
            begins = is_counted & (row[:, :-1] == decoder.end_of_text)
            text_bytes -= int(prepended_bytes[row[:, 1:][begins]].sum())
    if not tokens:
        raise DataError("nothing is left of the held-out text in this model's tokens; hold out more of it")
    loss = nats / tokens
    return Measured(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else (math.inf if loss >= 700 else math.nan),
        bits_per_byte=nats / math.log(2) / text_bytes if text_bytes else math.nan,
        tokens=tokens,
        text_bytes=text_bytes,
    )


def _score_pairs(decoder: Decoder, rows: Iterable[Tokens], token_bytes: Tokens, device: torch.device) -> Measured:
    """The mean ranking loss of the pairs of `rows`, and the share of them in the right order."""
    objective, sums, pairs, tokens, text_bytes = RewardModel(), torch.zeros(3, dtype=torch.float64), 0, 0, 0
    for row in (part for batch in rows for part in _affordable(batch, decoder)):
        marked = torch.from_numpy(np.ascontiguousarray(row))
        for batch in micro_batches(marked, len(marked), NO_TOKEN, device):
            rewards = decoder(batch.tokens, segments=batch.segments)
            sums += objective.sums(ObjectiveInputs(rewards), batch).double().cpu()
        pairs += int(objective.counts(marked)[0])
        is_counted = (row[:, 1:] & UNCOUNTED) == 0
        tokens += int(is_counted.sum())
        text_bytes += int(token_bytes[(row[:, 1:] & ID)[is_counted]].sum())
    if not pairs:
        raise DataError("no pair is held out; hold out more of them (data.validation_fraction)")
    loss = float(sums[0]) / pairs
    return Measured(
        loss=loss,
        perplexity=math.exp(min(loss, 700)),
        bits_per_byte=float(sums[0]) / math.log(2) / text_bytes if text_bytes else math.nan,
        tokens=tokens,
        text_bytes=text_bytes,
        reward_accuracy=float(sums[1]) / pairs,
    )


def own_metrics(decoder: Decoder, rows: Callable[[], Iterable[Tokens]], metrics: Sequence[Metric]) -> dict[str, float]:
    """The metrics of user code on the counted targets of `rows`, by name. Raises UserCodeError for a metric that fails,
    or returns no number."""
    values: dict[str, float] = {}
    for metric in (metric for metric in metrics if metric.use is not None):
        function = bind(metric)
        try:
            with torch.inference_mode():
                value = function(decoder, _metric_batches(decoder, rows()))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UserCodeError(f"{metric.use}: failed: {describe(error, Path(entered_folder()))}") from error
        values[metric.label] = number_of(value, metric)
    return values


def _metric_batches(decoder: Decoder, rows: Iterable[Tokens]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, targets and whether each target counts: [n, T] each, on the device of the model. The logits of a batch
    fit LOGITS_BYTES, unless one row has more."""
    device = decoder.model.embed_tokens.weight.device
    for batch in rows:
        most = max(1, LOGITS_BYTES // (4 * decoder.vocabulary * max(1, batch.shape[1] - 1)))
        for start in range(0, len(batch), most):
            row = batch[start : start + most]
            counted = torch.from_numpy((row[:, 1:] & UNCOUNTED) == 0).to(device)
            inputs, targets = (
                torch.from_numpy(np.ascontiguousarray(part & ID)).to(device) for part in (row[:, :-1], row[:, 1:])
            )
            yield inputs, targets, counted


def _affordable(batch: Tokens, decoder: Decoder) -> Iterator[Tokens]:
    """Split a batch into groups of rows that fit ACTIVATION_BYTES, at least one row each."""
    positions = max(1, ACTIVATION_BYTES // (4 * decoder.shape.ffn_width))
    rows = max(1, positions // max(1, batch.shape[1] - 1))
    return (batch[start : start + rows] for start in range(0, len(batch), rows))


def _losses(decoder: Decoder, inputs: Tensor, targets: Tensor, segments: Segments | None) -> Tensor:
    """The cross-entropy of each target, in nats, fp32. LOGITS_BYTES limits the positions of a chunk.

    The chunk depends on the vocabulary alone. Another size would change the last bits, because matrix products of
    another height sum in another order.
    """
    chunk = max(1, min(CHUNK, LOGITS_BYTES // (4 * decoder.vocabulary)))
    return -token_logprobs(decoder.hidden(inputs, segments), decoder.head_weight, targets, chunk=chunk).flatten()


def rewindow(rows: Iterable[Tokens], context: int) -> Iterator[Tokens]:
    """The same targets, in order, in windows of another length: [1, at most context + 1] each."""
    pending = np.zeros(0, dtype=np.int64)
    for row in (row for batch in rows for row in batch):
        if len(pending) and pending[-1] == row[0]:  # the next row continues this one
            pending = np.concatenate([pending, row[1:]])
        else:
            yield from _windows(pending, context, last=True)
            pending = row
        yield from _windows(pending, context, last=False)
        pending = pending[(len(pending) - 1) // context * context :]
    yield from _windows(pending, context, last=True)


def retokenise(
    rows: Iterable[Tokens], ours: Tokenizer, our_end: int, theirs: Tokenizer, their_end: int, context: int
) -> Iterator[Tokens]:
    """The text of the targets of `rows` in another tokenizer's tokens, in windows [1, at most context + 1].

    Text that spells a special token stays text. A character that the first or the last target cuts is left out.
    """
    theirs = load_tokenizer(settled(theirs.to_str(), theirs.id_to_token(their_end) or ""))
    pending = np.array([their_end], dtype=np.int64)
    for text, ended in _texts(rows, ours, our_end):
        tokens = theirs.encode(text, add_special_tokens=False).ids + [their_end] * ended
        pending = np.concatenate([pending, np.array(tokens, dtype=np.int64)])
        yield from _windows(pending, context, last=False)
        pending = pending[(len(pending) - 1) // context * context :]
    yield from _windows(pending, context, last=True)


def _windows(tokens: Tokens, context: int, *, last: bool) -> Iterator[Tokens]:
    """Whole windows that share only their end tokens; with `last`, the rest as well."""
    covered = (len(tokens) - 1) // context * context if len(tokens) else 0
    for start in range(0, covered, context):
        yield tokens[None, start : start + context + 1]
    if last and len(tokens) - covered > 1:
        yield tokens[None, covered:]


def _texts(rows: Iterable[Tokens], tokenizer: Tokenizer, end: int) -> Iterator[tuple[str, bool]]:
    """The documents of the targets, and whether an end-of-text token ends each of them."""
    parts: list[Tokens] = []
    for row in (row[1:] for batch in rows for row in batch):
        start = 0
        for stop in np.flatnonzero(row == end).tolist():
            yield _text([*parts, row[start:stop]], tokenizer), True
            parts, start = [], stop + 1
        parts.append(row[start:])
    if any(len(part) for part in parts):
        yield _text(parts, tokenizer), False


def _text(parts: list[Tokens], tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(np.concatenate(parts).tolist(), skip_special_tokens=False)
    return text.strip("\ufffd")
