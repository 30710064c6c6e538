"""Scoring: the right sums over the right targets, and the same text for models with different tokenizers."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import bytes_of_tokens, prepended_bytes
from holdfast.scoring.score import retokenise, rewindow, score
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.evaluate import world
from tests.evaluate.conftest import store
from tests.model.tiny_model import END, decoder, shape, tokenizer_json

__all__ = ["store"]


@pytest.fixture
def dataset(store: Store, tmp_path: Path) -> Dataset:
    return Dataset.open(store, world.DATASET, tmp_path / "cache")


def id_of(tokenizer: Tokenizer, text: str = END) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token


def targets(rows: list[np.ndarray]) -> list[int]:
    return [token for batch in rows for row in batch for token in row[1:].tolist()]


def test_the_figures_are_those_of_the_definition(store: Store, dataset: Dataset) -> None:
    decoder = world.trained(5)
    rows = list(dataset.validation(32, 400))
    measured = score(decoder, rows, dataset.token_bytes(), document_masks=False)
    nats, count, size = 0.0, 0, 0
    for row in np.concatenate(rows):
        logits = decoder(torch.from_numpy(row[None, :-1])).detach().double().log_softmax(-1)[0]
        nats -= sum(float(logits[place, token]) for place, token in enumerate(row[1:]))
        count += len(row) - 1
        size += sum(int(dataset.token_bytes()[token]) for token in row[1:])
    assert (measured.tokens, measured.text_bytes) == (count, size)
    assert abs(measured.loss - nats / count) < 1e-6
    assert measured.perplexity == math.exp(measured.loss)
    assert abs(measured.bits_per_byte - nats / math.log(2) / size) < 1e-6


def test_scoring_twice_gives_the_same_bits(store: Store, dataset: Dataset) -> None:
    decoder = world.trained(5)
    twice = [
        score(decoder, dataset.validation(32, 400), dataset.token_bytes(), document_masks=masks)
        for masks in (False, False, True)
    ]
    assert twice[0] == twice[1] != twice[2]


def test_a_model_of_nan_scores_nan(store: Store, dataset: Dataset) -> None:
    decoder = world.trained(0)
    with torch.no_grad():
        decoder.model.norm.weight[0] = math.nan
    measured = score(decoder, dataset.validation(32, 100), dataset.token_bytes(), document_masks=False)
    assert all(math.isnan(value) for value in (measured.loss, measured.perplexity, measured.bits_per_byte))


@pytest.mark.parametrize("context", [1, 7, 16, 32, 33, 64, 10_000])
def test_other_windows_hold_the_same_targets_and_lose_no_context_between_rows(dataset: Dataset, context: int) -> None:
    rows = list(dataset.validation(32, 600))
    windows = list(rewindow(rows, context))
    assert targets(windows) == targets(rows)
    assert all(1 < window.shape[1] <= context + 1 for window in windows)
    assert all(left[0, -1] == right[0, 0] for left, right in pairwise(windows)), "one source: one text"


def test_rows_of_two_sources_are_not_glued_together() -> None:
    rows = [np.array([[1, 2, 3], [3, 4, 5]]), np.array([[9, 8, 7]])]
    assert [window.tolist() for window in rewindow(rows, 3)] == [[[1, 2, 3, 4]], [[4, 5]], [[9, 8, 7]]]


@pytest.mark.parametrize("context", [5, 32, 1000])
def test_another_tokenizer_reads_the_same_text(dataset: Dataset, context: int) -> None:
    ours, theirs = (Tokenizer.from_str(tokenizer_json(size)) for size in (300, 270))
    rows = list(dataset.validation(32, 600))
    retokenised = list(retokenise(rows, ours, id_of(ours), theirs, id_of(theirs), context))
    text = ours.decode(targets(rows), skip_special_tokens=False)
    assert theirs.decode(targets(retokenised), skip_special_tokens=False) == text
    sizes = [
        int(bytes_of_tokens(tokenizer_json(size), size)[targets(some_rows)].sum())
        for size, some_rows in ((300, rows), (270, retokenised))
    ]
    assert sizes[0] == sizes[1]
    assert len(targets(retokenised)) > len(targets(rows))


def test_a_character_cut_in_two_is_left_out() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(257))  # bytes only
    end = id_of(tokenizer)
    ids = tokenizer.encode("€uro €").ids
    # The first token is input only: the text begins and ends inside a character.
    rows = [np.array([[ids[0], *ids[1:-1]]])]
    retokenised = list(retokenise(rows, tokenizer, end, tokenizer, end, 100))
    assert tokenizer.decode(targets(retokenised)) == "uro "


def test_a_text_of_which_nothing_is_left_is_no_text(store: Store, dataset: Dataset) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(257))  # bytes only
    end = id_of(tokenizer)
    rows = [np.array([tokenizer.encode("€").ids[:2]])]  # one byte of a character
    retokenised = retokenise(rows, tokenizer, end, tokenizer, end, 100)
    with pytest.raises(DataError, match="hold out more"):
        score(world.trained(0), retokenised, dataset.token_bytes(), document_masks=False)


def sentence_pieces(way: str) -> Tokenizer:
    """A tokenizer of letters that adds a space before each text and removes it again."""
    letters = ["\u2581", *(chr(97 + number) for number in range(26))]
    vocabulary = {"<unk>": 0, "</s>": 1, **{letter: 2 + number for number, letter in enumerate(letters)}}
    merges = [("\u2581", letter) for letter in letters]
    vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    if way == "Prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=way)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=way)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("way", ["Prepend", "always", "first", "never"])
def test_bytes_prepended_by_a_tokenizer_do_not_count_as_text(way: str) -> None:
    tokenizer, texts = sentence_pieces(way), ["a fox", "dogs", "b  c", "a"]
    ids = [1]
    for text in texts:
        text_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(text_ids) == text
        ids += [*text_ids, 1]
    size = tokenizer.get_vocab_size()
    model = decoder(shape(), size)
    model.end_of_text = 1
    raw = tokenizer.to_str()
    measured = score(model, [np.array([ids])], bytes_of_tokens(raw, size), document_masks=False,
                     prepended_bytes=prepended_bytes(raw, size))  # fmt: skip
    assert measured.text_bytes == sum(map(len, texts))
    assert prepended_bytes(tokenizer_json(300), 300).sum() == 0


def test_text_that_spells_a_special_token_of_another_tokenizer_stays_text() -> None:
    ours, theirs = Tokenizer.from_str(tokenizer_json(300)), Tokenizer.from_str(tokenizer_json(270))
    theirs.add_tokens(["<|EOT|>"])
    end, their_end = id_of(ours), id_of(theirs, "<|EOT|>")
    theirs.add_special_tokens(["<|other|>"])
    text = "a <|EOT|> and <|other|>"
    rows = [np.array([[end, *ours.encode(text).ids, end]])]
    retokenised = targets(list(retokenise(rows, ours, end, theirs, their_end, 100)))
    assert retokenised.count(their_end) == 1
    assert theirs.token_to_id("<|other|>") not in retokenised
    assert theirs.decode(retokenised[:-1]) == text
