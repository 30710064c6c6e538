"""Measuring a model on held-out text, and giving two models the same text whatever their tokenizers and contexts.

Promises that sums are in double precision and in a fixed order, that the memory for logits is bounded whatever context
and vocabulary are, and that a champion is scored on the very text that the candidate is scored on. Leaves judging to
the evaluate step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from holdfast.corpus.encode import load_tokenizer, settled
from holdfast.dataset.marks import ENDS, ID, UNCOUNTED
from holdfast.model.decoder import Decoder, document_ids, numbered
from holdfast.scoring.measured import Measured
from holdfast.spec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int64]
ACTIVATION_BYTES = 512 * 2**20  # of the widest array of a layer in fp32; some of them are there at once
LOGITS_BYTES = 256 * 2**20  # of one array of logits in fp32; two or three of them are there at once


@torch.inference_mode()
def score(
    decoder: Decoder,
    rows: Iterable[Tokens],
    token_bytes: Tokens,
    *,
    document_masks: bool,
    prepended_bytes: Tokens | None = None,
) -> Measured:
    """Mean cross-entropy over the targets of `rows` ([n, T + 1] each: inputs [:, :-1], targets [:, 1:]) that count.

    `token_bytes`: UTF-8 bytes of each token; `prepended_bytes`: of these, those that are no text where the token begins
    a document. `document_masks`: attention stays inside a document, as in training, and
    documents end with the end-of-text token, or in rows with marks (see `dataset.marks`) where they say so. Raises
    DataError when there is not one target.
    """
    device = decoder.model.embed_tokens.weight.device
    nats, tokens, text_bytes = 0.0, 0, 0
    for row in (part for batch in rows for part in _affordable(batch, decoder)):
        marked = bool((row > ID).any())
        counted = (row[:, 1:] & UNCOUNTED) == 0
        inputs, targets = (
            torch.from_numpy(np.ascontiguousarray(part & ID)).to(device) for part in (row[:, :-1], row[:, 1:])
        )
        masks = None
        if document_masks and marked:
            masks = numbered(torch.from_numpy((row[:, :-1] & ENDS) != 0).to(device))
        elif document_masks and decoder.end_of_text is not None:
            masks = document_ids(inputs, decoder.end_of_text)
        losses = _losses(decoder, inputs, targets, masks).double().cpu()
        nats += float(losses[torch.from_numpy(counted).flatten()].sum())
        tokens += int(counted.sum())
        text_bytes += int(token_bytes[(row[:, 1:] & ID)[counted]].sum())
        if prepended_bytes is not None and decoder.end_of_text is not None and not marked:
            begins = counted & (row[:, :-1] == decoder.end_of_text)
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


def _affordable(batch: Tokens, decoder: Decoder) -> Iterator[Tokens]:
    """The rows of a batch, as many at a time as ACTIVATION_BYTES allow, one at least."""
    positions = max(1, ACTIVATION_BYTES // (4 * decoder.shape.ffn_width))
    rows = max(1, positions // max(1, batch.shape[1] - 1))
    return (batch[start : start + rows] for start in range(0, len(batch), rows))


def _losses(decoder: Decoder, inputs: Tensor, targets: Tensor, masks: Tensor | None) -> Tensor:
    """The cross-entropy of each target, in nats, fp32. Logits are made for as many positions at once as LOGITS_BYTES
    allow. How many that is depends on the vocabulary alone: with another number the last bits would be others, for
    matrix products of another height are summed in another order."""
    positions = decoder.hidden(inputs, masks).flatten(0, 1)
    most = max(1, LOGITS_BYTES // (4 * decoder.vocabulary))
    parts = zip(positions.split(most), targets.flatten().split(most), strict=True)
    return torch.cat([F.cross_entropy(decoder.head(x).float(), wanted, reduction="none") for x, wanted in parts])


def rewindow(rows: Iterable[Tokens], context: int) -> Iterator[Tokens]:
    """The same targets, in order, in windows of another length: [1, at most context + 1] each."""
    pending = np.zeros(0, dtype=np.int64)
    for row in (row for batch in rows for row in batch):
        if len(pending) and pending[-1] == row[0]:  # the next row begins where this one ended
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
    """The text of the targets of `rows` in another tokenizer's tokens, in windows [1, at most context + 1]. Text that
    spells one of its special tokens stays text.

    A character that the first or the last target cuts in two is left out.
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
    """Whole windows that share their end tokens only; with `last` the rest as well."""
    whole = (len(tokens) - 1) // context * context if len(tokens) else 0
    for start in range(0, whole, context):
        yield tokens[None, start : start + context + 1]
    if last and len(tokens) - whole > 1:
        yield tokens[None, whole:]


def _texts(rows: Iterable[Tokens], tokenizer: Tokenizer, end: int) -> Iterator[tuple[str, bool]]:
    """The documents of the targets, and whether each is ended there by an end-of-text token."""
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
