"""Generation of answers in lots: fixed sets of prompts, each with the same number of answers.

The tokens of a lot are a pure function of the weights, the prompts, the seed and the step. A token is the one whose
range of the cumulative distribution, in fp64, contains a number u. Each u is a digest of the seed, the place of the
prompt in the training sequence, the number of the answer, and the position. The rows of a lot never change, and an
answer that has ended stays in it as padding, because the bits of a matrix product depend on its height.

Shape suffixes: as in `decoder`; P prompts of the lot, B = P x answers rows.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from holdfast.model.decoder import Decoder, LayerCache

Ending = str  # "stop": the model ended the answer; "length": the limit did
STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    answers: int  # to each prompt
    most_tokens: int  # of an answer
    temperature: float
    seed: int
    end_of_text: int


@dataclass(frozen=True)
class Generated:
    """One answer."""

    tokens: list[int]  # with the end-of-text token, if the model wrote it
    ending: Ending
    entropy: float  # mean over its tokens of the entropy of the distribution sampled from, in nats


def uniforms(seed: int, place: int, answer: int, count: int) -> list[float]:
    """`count` numbers in [0, 1) for the tokens of an answer, as multiples of 2^-53."""
    key = f"rollout\0{seed}\0{place}\0{answer}".encode()
    raw = np.frombuffer(blake3(key).digest(length=8 * count), dtype="<u8")
    return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()


@torch.no_grad()
def generate_lot(
    decoder: Decoder, prompts: Sequence[Sequence[int]], places: Sequence[int], sampling: Sampling
) -> list[list[Generated]]:
    """The answers to each prompt. `places` are those of the prompts in the training sequence."""
    device = decoder.model.embed_tokens.weight.device
    rows, most = len(prompts) * sampling.answers, sampling.most_tokens
    u_TB = torch.tensor(
        [uniforms(sampling.seed, place, number, most) for place in places for number in range(sampling.answers)],
        dtype=torch.float64,
    ).T
    lot = _Lot(decoder, prompts, sampling.answers, most)
    tokens_TB = torch.empty(most, rows, dtype=torch.int64)
    entropy_TB = torch.zeros(most, rows, dtype=torch.float64)
    ended_B = torch.zeros(rows, dtype=torch.bool)
    logits_BV = lot.begin()
    count = 0
    for at in range(most):
        token_B, entropy_TB[at] = sample_tokens(logits_BV, u_TB[at], sampling.temperature)
        tokens_TB[at] = token_B
        count = at + 1
        ended_B |= token_B == sampling.end_of_text
        if bool(ended_B.all()) or count == most:
            break
        logits_BV = lot.advance(token_B.to(device))
    answers = [
        _answer(tokens_TB[:count, row].tolist(), entropy_TB[:count, row].tolist(), sampling.end_of_text)
        for row in range(rows)
    ]
    return [answers[first : first + sampling.answers] for first in range(0, rows, sampling.answers)]


def sample_tokens(logits_BV: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token of each row by inversion of the cumulative distribution at `u_B` (fp64 in [0, 1)), and the entropy of
    the distribution in nats. On the CPU, whose sums have one order."""
    scaled_BV = logits_BV.cpu().double() / temperature
    logprobs_BV = scaled_BV.log_softmax(-1)
    shares_BV = logprobs_BV.exp()
    sums_BV = shares_BV.cumsum(-1)
    whole_B1 = sums_BV[:, -1:]
    token_B = ((sums_BV <= u_B[:, None] * whole_B1) & (sums_BV < whole_B1)).sum(-1)  # the product may round up to all
    return token_B, -(shares_BV * torch.where(shares_BV > 0, logprobs_BV, 0.0)).sum(-1)


def _answer(tokens: list[int], entropies: list[float], end: int) -> Generated:
    size = tokens.index(end) + 1 if end in tokens else len(tokens)
    return Generated(tokens[:size], STOP if end in tokens else LENGTH, sum(entropies[:size]) / size)


class _RowsCache(LayerCache):
    """Keys and values of rows of different lengths, in one buffer of all positions."""

    def __init__(self, answers: int, positions: int) -> None:
        super().__init__()
        self._answers, self._positions = answers, positions
        self.at_B: Tensor | None = None  # where the next token of each row is; None: before the first one

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """See LayerCache. The prompts come first, one row each. Then each row of an answer has its own copy."""
        if self.k_BGSK is None or self.v_BGSK is None:
            self.k_BGSK, self.v_BGSK = map(self._extended, (k_BGTK, v_BGTK))
            return k_BGTK, v_BGTK
        rows = torch.arange(len(k_BGTK), device=k_BGTK.device)
        self.k_BGSK[rows, :, self.at_B] = k_BGTK[:, :, 0]
        self.v_BGSK[rows, :, self.at_B] = v_BGTK[:, :, 0]
        return self.k_BGSK, self.v_BGSK

    def _extended(self, x_PGTK: Tensor) -> Tensor:
        prompts, groups, length, width = x_PGTK.shape
        x_BGSK = x_PGTK.new_zeros(prompts * self._answers, groups, self._positions, width)
        x_BGSK[:, :, :length] = x_PGTK.repeat_interleave(self._answers, 0)
        return x_BGSK


class _Lot:
    """A lot in the decoder: its caches, and the position of each row."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], answers: int, most: int) -> None:
        self._decoder, self._answers = decoder, answers
        device = decoder.model.embed_tokens.weight.device
        self._lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(self._lengths_P.max())
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        self._prompts_PT = torch.tensor(padded, device=device)
        self._at_B = self._lengths_P.repeat_interleave(answers)
        positions = longest + most
        self._cache = [_RowsCache(answers, positions) for _ in range(decoder.shape.layers)]
        self._positions_S = torch.arange(positions, device=device)

    def begin(self) -> Tensor:
        """Read the prompts. Returns the logits of each row's first token."""
        # A caller of `hidden` needs no mask: padding follows a prompt, and attention is causal.
        x_PTD = self._decoder.hidden(self._prompts_PT, cache=list[LayerCache](self._cache))
        last_P1D = x_PTD[torch.arange(len(x_PTD), device=x_PTD.device), self._lengths_P - 1][:, None]
        return self._decoder.head(last_P1D)[:, 0].repeat_interleave(self._answers, 0)

    def advance(self, token_B: Tensor) -> Tensor:
        """Read a token of each row. Returns the logits of the next one."""
        decoder, at_B = self._decoder, self._at_B
        x_BTD = decoder.embed(token_B[:, None])
        main = decoder.cos_TK[at_B][:, None, None], decoder.sin_TK[at_B][:, None, None]
        local = main
        if decoder.shape.preset.local_rope:
            local = decoder.local_cos_TK[at_B][:, None, None], decoder.local_sin_TK[at_B][:, None, None]
        before_BS = self._positions_S <= at_B[:, None]
        for shape, layer, cache in zip(decoder.layer_shapes, decoder.model.layers, self._cache, strict=True):
            window: int | None = getattr(layer.self_attn, "window")  # noqa: B009 - a module's attribute
            recent_BS = before_BS if window is None else before_BS & (self._positions_S > at_B[:, None] - window)
            cache.at_B, cache.seen_BS = at_B, recent_BS
            x_BTD, _ = layer(x_BTD, *(local if shape.rope == "local" else main), None, cache)
        self._at_B = at_B + 1
        return decoder.head(decoder.model.norm(x_BTD))[:, 0]
