"""Small models and a real tokenizer for the model tests."""

import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.spec.model import Model
from tests.model.exporting import write_hugging_face

END = "<|endoftext|>"
TEXT = ["def add(a, b):\n    return a + b\n", "the quick brown fox jumps over the lazy dog", "äöü ß € 你好 🙂"] * 20


@functools.cache
def tokenizer_json(vocabulary: int = 300) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def shape(**changes: object) -> Model:
    return Model(**{"layers": 2, "hidden": 32, "heads": 4, "context": 32, "init_std": 0.3, **changes})


def decoder(model: Model, vocabulary: int = 300, seed: int = 0) -> Decoder:
    built = Decoder.empty(model, vocabulary, end_of_text=0)
    initialise(built, seed)
    return built


def export(folder: Path, built: Decoder, **options: Any) -> list[str]:
    return write_hugging_face(
        folder,
        built.shape,
        built.vocabulary,
        built.state_dict().items(),
        tokenizer_json=tokenizer_json(built.vocabulary),
        end_of_text=END,
        **options,
    )
