"""Text generation: sampling one token at a time, for reports and for inspection of a model.

The same model, prompt and seed give the same text on the same hardware. For fast serving, use a server that loads the
Hugging Face layout.
"""

# ruff: noqa: N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from holdfast.model.decoder import Decoder
from holdfast.model.layers import LayerCache
from holdfast.spec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ONE_THREAD_PARAMETERS = 20_000_000  # below this, one core reads the weights in less than ten milliseconds


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    ends: Collection[int] = (),
) -> str:
    """The model's continuation of `prompt`: at most `tokens` tokens, fewer if the model ends the text, or writes one of
    the tokens `ends`.

    Temperature 0 takes the likeliest token. An empty prompt begins a new text. Of a prompt longer than the context, the
    end is used. Raises DataError for an empty prompt if the model has no end-of-text token.
    """
    if decoder.score is not None:
        raise DataError("a model with a scalar head gives rewards and writes no text; use one that predicts tokens")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not prompt_ids:
        if decoder.end_of_text is None:
            raise DataError("an empty prompt needs a model with an end-of-text token; give a prompt")
        prompt_ids = [decoder.end_of_text]
    generated: list[int] = []
    with fitting_threads(decoder):
        for token in sample(decoder, prompt_ids, temperature=temperature, seed=seed):
            if len(generated) == tokens or token == decoder.end_of_text or token in (*decoder.stops, *ends):
                break
            generated.append(token)
    return tokenizer.decode(prompt_ids + generated)[len(tokenizer.decode(prompt_ids)) :]


@contextmanager
def fitting_threads(decoder: Decoder) -> Iterator[None]:
    """Use one thread for a small model. A token takes a thousand tiny operations. Threads that synchronize after
    each of them take ten times as long, or more if other processes use the cores."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in decoder.parameters()) < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def sample(decoder: Decoder, prompt: list[int], *, temperature: float, seed: int) -> Iterator[int]:
    """Tokens after a prompt, endlessly. When the context is full, its second half is read again and kept."""
    device = decoder.model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt[-decoder.shape.context :])
    cache: list[LayerCache] = []
    while True:
        if not cache or cache[0].positions == decoder.shape.context:
            if cache:
                text = text[-(decoder.shape.context // 2) :]
            cache = [LayerCache() for _ in range(decoder.shape.layers)]
            unread = text
        last_B1D = decoder.hidden(torch.tensor([unread], device=device), cache=cache)[:, -1:]
        logits_V = decoder.head(last_B1D)[0, 0].float().cpu()  # the logits of a whole prompt would take gigabytes
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
        text.append(token)
        unread = [token]
        yield token
