"""Generation: seeded, limited by the context, and the model's own text."""

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate, sample
from holdfast.spec.errors import DataError
from tests.model.tiny_model import END, decoder, shape, tokenizer_json


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def greedy_by_forward(built: Decoder, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(built(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def take(built: Decoder, prompt: list[int], count: int, temperature: float = 0, seed: int = 0) -> list[int]:
    return [
        token for token, _ in zip(sample(built, prompt, temperature=temperature, seed=seed), range(count), strict=False)
    ]


def test_greedy_sampling_with_the_cache_is_what_whole_forwards_give() -> None:
    built = decoder(shape(kv_heads=2))
    assert take(built, [5, 6, 7], 29) == greedy_by_forward(built, [5, 6, 7], 29)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tokenizer: Tokenizer) -> None:
    built = decoder(shape())
    texts = [generate(built, tokenizer, "def", tokens=20, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_an_empty_prompt_starts_a_new_text(tokenizer: Tokenizer) -> None:
    built = decoder(shape())
    assert generate(built, tokenizer, "", tokens=8, temperature=1.0)
    built.end_of_text = None
    with pytest.raises(DataError, match="give a prompt"):
        generate(built, tokenizer, "", tokens=8)


def test_a_prompt_longer_than_the_context_is_cut_from_the_left() -> None:
    built = decoder(shape())
    long = list(range(1, 200))
    assert take(built, long, 10) == take(built, long[-32:], 10)


@pytest.mark.parametrize("length", [1, 16, 31, 32])
def test_generation_continues_from_the_later_half_of_a_full_context(length: int) -> None:
    built = decoder(shape())
    prompt = torch.randint(1, 30, (length,), generator=torch.Generator().manual_seed(length)).tolist()

    def by_whole_forwards(half: Callable[[list[int]], list[int]]) -> list[int]:
        window, generated = list(prompt), list[int]()
        while len(generated) < 90:
            token, full = int(built(torch.tensor([window]))[0, -1].argmax()), len(window) == built.shape.context
            window.append(token)
            window = half(window) if full else window
            generated.append(token)
        return generated

    size = built.shape.context // 2
    assert take(built, prompt, 90) == by_whole_forwards(lambda text: text[-size:])
    if length == 32:  # whose halves differ
        assert by_whole_forwards(lambda text: text[:size]) != by_whole_forwards(lambda text: text[-size:])


def test_the_text_ends_with_the_end_of_text_and_does_not_show_it(tokenizer: Tokenizer) -> None:
    built = decoder(shape())
    greedy = take(built, tokenizer.encode("fox").ids, 1)[0]
    built.end_of_text = greedy
    assert generate(built, tokenizer, "fox", tokens=20, temperature=0) == ""
    assert END not in generate(decoder(shape()), tokenizer, "fox" + END, tokens=4)


def test_the_prompt_is_not_repeated(tokenizer: Tokenizer) -> None:
    built = decoder(shape())
    output = generate(built, tokenizer, "the quick", tokens=5, temperature=0)
    ids = tokenizer.encode("the quick").ids
    assert "the quick" + output == tokenizer.decode(ids + take(built, ids, 5))
