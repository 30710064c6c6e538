"""Rows of conversations: only marked targets count, in training and in scoring, and conversations do not see each
other.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from holdfast.dataset.vocabulary import ENDS, NO_TOKEN, UNCOUNTED
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import count_terms, micro_batches
from holdfast.objectives.next_token import NextToken
from holdfast.scoring.score import score
from tests.model.tiny_model import decoder, export, shape

# Two conversations of 5 and 4 tokens. One has an end-of-text token in the middle, as after an earlier turn.
FIRST, SECOND = [7, 0, 8, 9, 10], [11, 12, 13, 14]
COUNTED = [{3, 4}, {2, 3}]  # the positions of the assistant's tokens


def row() -> torch.Tensor:
    tokens_of_row = []
    for tokens, counted in zip((FIRST, SECOND), COUNTED, strict=True):
        part = [token if place in counted else token | UNCOUNTED for place, token in enumerate(tokens)]
        tokens_of_row += [*part[:-1], part[-1] | ENDS]
    return torch.tensor([[*tokens_of_row, 0 | UNCOUNTED | ENDS]])


def test_the_loss_is_that_of_transformers_on_each_conversation_alone(tmp_path: Path) -> None:
    ours = decoder(shape(kv_heads=2))
    export(tmp_path, ours)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    expected = 0.0
    for part, counted in zip((FIRST, SECOND), COUNTED, strict=True):
        labels = torch.tensor([[token if place in counted else IGNORED for place, token in enumerate(part)]])
        expected += float(theirs(torch.tensor([part]), labels=labels).loss) * len(counted)
    ((tokens, targets, documents, segments, _, scores),) = micro_batches(row(), 1, NO_TOKEN, torch.device("cpu"))
    assert scores is None
    assert documents is not None
    assert tokens.tolist() == [FIRST + SECOND]
    assert documents.tolist() == [[0] * 5 + [1] * 4]
    assert count_terms(NextToken(), row()) == 4
    assert abs(float(ours(tokens, targets, segments, reduction="sum")) - expected) < 1e-4
    measured = score(ours, [row().numpy()], np.ones(300, dtype=np.int64), document_masks=True)
    assert abs(measured.loss - expected / 4) < 1e-4
    assert (measured.tokens, measured.text_bytes) == (4, 4)


def test_rows_of_text_have_no_marks_and_all_of_them_counts() -> None:
    rows = torch.tensor([[*FIRST, *SECOND]])
    ((tokens, targets, documents, segments, _, scores),) = micro_batches(rows, 1, 0, torch.device("cpu"))
    assert scores is None
    assert documents is not None
    assert (tokens.tolist(), targets.tolist()) == (rows[:, :-1].tolist(), rows[:, 1:].tolist())
    assert documents.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]]
    assert segments.queries == (0, 2, 8)
    assert count_terms(NextToken(), rows) == 8
