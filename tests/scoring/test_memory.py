"""Scoring takes bounded memory: for logits, for activations, and no second copy of the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.model import files, hugging_face
from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate
from holdfast.model.hugging_face import load_exported
from holdfast.model.token_logprobs import token_logprobs
from holdfast.scoring import score as score_module
from holdfast.scoring.score import score
from tests.model.tiny_model import decoder, export, shape

TOKENS = np.random.default_rng(1).integers(0, 300, (5, 33))
LENGTHS = np.ones(300, dtype=np.int64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [7, 32, 1000])
def test_logits_are_computed_in_chunks_of_positions(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built = decoder(shape())
    inputs, targets = torch.from_numpy(TOKENS[:, :-1]), torch.from_numpy(TOKENS[:, 1:])
    with torch.no_grad():
        whole = float(built(inputs, targets, reduction="none").double().sum()) / targets.numel()
    monkeypatch.setattr(score_module, "LOGITS_BYTES", rows * 300 * 4)
    chunks: list[int] = []

    def watched(*arguments: Tensor, chunk: int) -> Tensor:
        chunks.append(chunk)
        return token_logprobs(*arguments, chunk=chunk)

    monkeypatch.setattr(score_module, "token_logprobs", watched)
    measured = score(built, [TOKENS], LENGTHS, document_masks=False)
    assert chunks == [rows]
    assert measured == score(built, [TOKENS], LENGTHS, document_masks=False)
    if rows == 1000:  # all rows together, as in training
        assert measured.loss == whole


def test_rows_pass_the_layers_in_batches_that_fit_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    built, shapes = decoder(shape()), []
    hidden = Decoder.hidden

    def watched(self: Decoder, tokens: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return hidden(self, tokens, *rest)

    whole = score(built, [TOKENS], LENGTHS, document_masks=True)
    monkeypatch.setattr(Decoder, "hidden", watched)
    monkeypatch.setattr(score_module, "ACTIVATION_BYTES", 2 * 32 * built.shape.ffn_width * 4)
    assert score(built, [TOKENS], LENGTHS, document_masks=True) == whole
    assert shapes == [(2, 32), (2, 32), (1, 32)]
    monkeypatch.setattr(score_module, "ACTIVATION_BYTES", 1)
    assert score(built, [TOKENS], LENGTHS, document_masks=True) == whole


def test_weights_are_copied_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = decoder(shape(tie_embeddings=False))
    export(tmp_path, built, max_shard_bytes=20_000)
    largest: list[int] = []
    read = files.Folder.read_into

    def watched(self: files.Folder, name: str, start: int, target: memoryview) -> None:
        if name.endswith(".safetensors"):
            largest.append(target.nbytes)
        read(self, name, start, target)

    headers = 2 * len(list(tmp_path.glob("*.safetensors")))
    monkeypatch.setattr(files.Folder, "read_into", watched)
    monkeypatch.setattr(hugging_face, "SLAB_BYTES", 1000)
    loaded, _ = load_exported(tmp_path)
    assert all(torch.equal(tensor, built.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert max(largest[headers:]) <= 1000


def test_layers_over_several_devices_give_the_same_figures(tmp_path: Path) -> None:
    built = decoder(shape(layers=5, tie_embeddings=False))
    export(tmp_path, built)
    spread, tokenizer = load_exported(tmp_path, (CPU, torch.device("cpu", 0), CPU))
    alone, _ = load_exported(tmp_path)
    assert score(spread, [TOKENS], LENGTHS, document_masks=True) == score(alone, [TOKENS], LENGTHS, document_masks=True)
    outputs = [generate(model, tokenizer, "def add(", tokens=9, seed=3) for model in (spread, alone)]
    assert outputs[0] == outputs[1]
    assert not [name for name, tensor in spread.named_buffers() if tensor.is_meta]
