"""Fast encoding gives exactly the tokenizer's tokens, and tokenizer training does not depend on threads."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.corpus.encode import CUT, Encoder, pieces
from holdfast.corpus.tokenizer import train
from holdfast.spec.data import Tokenizer
from tests.corpus.conftest import prose

TOKENIZER = train(Tokenizer(vocabulary=400), iter([prose(number) for number in range(50)]))
ENCODER = Encoder(TOKENIZER, "uint16")

ASCII = st.text(st.characters(min_codepoint=0, max_codepoint=127))
WORDY = st.lists(
    st.sampled_from(
        ["the", "a", " ", "  ", "\n", "\t", " x", "'s", "'", "é", "日本", "\u00a0", "\u2028", "\x1c", "\x85", "e\u0301",
         "<|endoftext|>", "don't", "12", "ß", "½", " ", "word", " word", "word "]
    )
).map("".join)  # fmt: skip


@pytest.mark.slow
@given(st.one_of(ASCII, st.text(), WORDY))
@settings(max_examples=2000)
def test_fast_and_slow_give_the_same_tokens(text: str) -> None:
    assert ENCODER._fast
    assert ENCODER.encode(text) == ENCODER.slow(text)
    assert ENCODER.decode(ENCODER.encode(text)) == text


@given(WORDY)
@settings(max_examples=500)
def test_pieces_are_the_text_cut_only_where_words_are(text: str) -> None:
    cuts = {match.start() for match in CUT.finditer(text)}
    at = 0
    for piece in pieces(text):
        assert piece
        assert at == 0 or at in cuts
        at += len(piece)
    assert "".join(pieces(text)) == text


def test_text_that_spells_the_end_of_text_is_text() -> None:
    end = ENCODER.tokenizer.token_to_id("<|endoftext|>")
    assert end not in np.frombuffer(ENCODER.encode("one <|endoftext|> two"), dtype="<u2")


@pytest.mark.parametrize("threads", ["1", "3"])
def test_training_gives_the_same_bytes_with_any_number_of_threads(threads: str) -> None:
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from tests.corpus.test_encode import *;"
        "print(hashlib.sha256(TOKENIZER.encode()).hexdigest())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == hashlib.sha256(TOKENIZER.encode()).hexdigest()
