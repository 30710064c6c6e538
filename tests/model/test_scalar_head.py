"""A scalar head: export for `transformers`, import, and scores of pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from holdfast.checkpoint import TensorBox
from holdfast.dataset.vocabulary import ENDS, UNCOUNTED
from holdfast.engines.weights import AdaptedState, ImportedState, SeededState
from holdfast.model.hugging_face import load_exported
from holdfast.scoring.score import score
from holdfast.spec.errors import DataError, SpecError
from tests.model.tiny_model import decoder, export, shape

TOKENS = torch.arange(24).view(2, 12) * 7 % 300


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_transformers_loads_a_reward_model_and_gives_its_rewards(tmp_path: Path, family: str) -> None:
    window = {"sliding_window": 16} if family == "gemma3_text" else {}
    ours = decoder(shape(family=family, head="scalar", **window)).eval()
    export(tmp_path, ours)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(theirs).__name__.endswith("ForSequenceClassification")
    with torch.no_grad():
        for row in TOKENS:
            assert torch.equal(theirs(row[None]).logits[0], ours(row[None])[0, -1:])
    loaded, _ = load_exported(tmp_path)
    assert loaded.shape.head == "scalar"
    assert torch.equal(loaded(TOKENS), ours(TOKENS))


@pytest.mark.parametrize("head", ["tokens", "scalar"])
def test_a_scalar_head_is_new_unless_the_weights_have_one(tmp_path: Path, head: str) -> None:
    built = decoder(shape(head=head), seed=3)
    export(tmp_path, built)
    model = shape(head="scalar")
    state = AdaptedState(ImportedState(str(tmp_path), model, 300), SeededState(model, 5))
    data = torch.full((1, 32), torch.nan)
    state.fill([TensorBox("score.weight", (1, 32), (0, 0), data)])
    expected = decoder(model, seed=5 if head == "tokens" else 3).score
    assert expected is not None
    assert torch.equal(data, expected.weight)


def test_a_reward_model_without_a_head_for_tokens_is_refused_as_their_base(tmp_path: Path) -> None:
    export(tmp_path, decoder(shape(head="scalar", tie_embeddings=False)))
    with pytest.raises(SpecError, match=r"(?s)model\.head: is not in the weights.*write head: scalar"):
        ImportedState(str(tmp_path), shape(tie_embeddings=False), 300)


def test_pairs_in_the_right_order_are_counted() -> None:
    ours = decoder(shape(head="scalar")).double().eval()  # a packed row is computed as another sum than lone texts
    row = np.array([[1 | UNCOUNTED, 2, 3 | ENDS, 1 | UNCOUNTED, 4 | ENDS, *[0 | UNCOUNTED | ENDS] * 12]])
    swapped = np.concatenate((row[:, 3:5], row[:, :3], row[:, 5:]), axis=1)
    lengths = np.ones(300, dtype=np.int64)
    first, second = (score(ours, [rows], lengths, document_masks=True) for rows in (row, swapped))
    with torch.no_grad():
        margin = float(ours(torch.tensor([[1, 2, 3]]))[0, -1] - ours(torch.tensor([[1, 4]]))[0, -1])
    assert first.loss == pytest.approx(np.log1p(np.exp(-margin)), abs=1e-6)
    assert second.loss == pytest.approx(np.log1p(np.exp(margin)), abs=1e-6)
    assert {first.reward_accuracy, second.reward_accuracy} == {0.0, 1.0}
    assert (first.tokens, first.text_bytes) == (3, 3)
    with pytest.raises(DataError, match="no pair is held out"):
        score(ours, [row[:, 5:]], lengths, document_masks=True)
