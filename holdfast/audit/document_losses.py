"""The loss of each document at a past step: what data made a spike.

The step is replayed, and the losses of its tokens are added up by document. A document that is cut has one entry for
each part in the batch. The mean of the documents' losses, weighted by their tokens, is the loss of the step.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.replay_job import ReplayResult, replay_steps
from holdfast.audit.token_losses import BatchLosses, read_losses
from holdfast.corpus.batch import Batch
from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import Spec
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.rules.objective import objective_name
from holdfast.store import Store
from holdfast.telemetry import read_history

TOLERANCE = 1e-6  # relative; the step adds its token losses in fp32, in the order of its layout
CHARACTERS = 60  # of the beginning of a document
DECODED = 4 * CHARACTERS  # tokens: a character has at most four bytes, and a token at least one


@dataclass(frozen=True)
class DocumentLoss:
    """The loss of a document, or of the part of it in one row."""

    loss: float | None  # mean over its counted tokens, in nats; None if it is not finite
    counted: int  # its tokens that count in the loss
    share: float | None  # of the loss of the step; None if that is not finite
    row: int  # of the global batch
    tokens: tuple[int, int]  # of the row: [from, to)
    source: str
    where: str  # the file, and its line or row if it has several; empty if unknown
    text: str  # its first characters


@dataclass(frozen=True)
class StepLosses:
    """The losses of the documents of a step."""

    step: int  # as in the history: the first step is 1
    recorded: float | None  # the loss in the history; None if it is not finite
    loss: float | None  # the mean of the documents' losses, weighted by their tokens; None if it is not finite
    agrees: bool  # whether both are the same within TOLERANCE
    counted: int  # tokens that count in the loss
    documents: tuple[DocumentLoss, ...]  # the highest loss first
    note: str  # why no file is named; empty if files are named


def require_token_losses(spec: Spec) -> None:
    """Raise SpecError for a run whose loss is not a mean of token losses that Holdfast computes."""
    message = "the loss of its steps is not the mean of its tokens' cross-entropies, so a document has no part of it"
    remedy = "use `holdfast audit batch` to see the data of a step"
    if spec.train.script is not None:
        message, remedy = "Holdfast does not see the loss of each token in a script", "log them in the script"
        raise SpecError([Problem("train.script", spec.train.script, message, remedy)])
    if spec.training.objective.is_own:
        raise SpecError([Problem("training.objective.use", spec.training.objective.use, message, remedy)])
    if (name := objective_name(spec)) != "next_token":
        raise SpecError([Problem("training.objective", name, message, remedy)])


def replay_losses(
    store: Store,
    run_id: str,
    spec: Spec,
    batch: Batch,
    *,
    anyway: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> tuple[ReplayResult, StepLosses]:
    """Replay the step of `batch`, which is whole, and add up the losses of its documents. See `replay_steps`."""
    require_token_losses(spec)
    step = batch.step
    with temporary_folder("losses") as folder:
        result = replay_steps(store, run_id, spec, step, step, anyway=anyway, progress=progress, losses=Path(folder))
        losses = read_losses(Path(folder), len(batch.rows), spec.model.context)
    (recorded,) = (row["loss"] for row in read_history(store, run_id, after=step - 1) if row["step"] == step)
    decode = load_tokenizer(Dataset.open(store, batch.dataset_id, cache_dir()).tokenizer_json()).decode
    return result, losses_of(batch, losses, recorded, lambda ids: decode(ids, skip_special_tokens=False))


def losses_of(
    batch: Batch, losses: BatchLosses, recorded: float | None, decode: Callable[[list[int]], str]
) -> StepLosses:
    """The losses of the documents of `batch`, and their comparison with the `recorded` loss of the step."""
    total, counted = math.fsum(losses.losses[losses.counted].tolist()), int(losses.counted.sum())
    documents = sorted(_documents(batch, losses, total, decode), key=_highest_first)
    summed = [math.nan if document.loss is None else document.loss * document.counted for document in documents]
    loss = math.fsum(summed) / max(1, counted)
    agrees = math.isclose(loss, recorded, rel_tol=TOLERANCE) if recorded is not None else not math.isfinite(loss)
    return StepLosses(batch.step, recorded, _finite(loss), agrees, counted, tuple(documents), batch.note)


def _documents(
    batch: Batch, losses: BatchLosses, total: float, decode: Callable[[list[int]], str]
) -> Iterator[DocumentLoss]:
    for index, row in enumerate(batch.rows):
        for passage in row.passages:
            first, last = passage.tokens
            targets = slice(max(first, 1) - 1, last - 1)  # the first token of a row is no target in it
            chosen = losses.losses[index, targets][losses.counted[index, targets]]
            if not len(chosen):
                continue
            summed = math.fsum(chosen.tolist())
            share = summed / total if total else 0.0
            text = decode(list(row.tokens[first : min(last, first + DECODED)]))[:CHARACTERS]
            place = (row.number, passage.tokens, row.source, passage.where, text)
            yield DocumentLoss(_finite(summed / len(chosen)), len(chosen), _finite(share), *place)


def _highest_first(document: DocumentLoss) -> tuple[float, int, tuple[int, int]]:
    return (-math.inf if document.loss is None else -document.loss, document.row, document.tokens)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
