"""Generation of answers in lots: fixed sets of prompts, each with the same number of answers.

The tokens of a lot are a pure function of the weights, the prompts, the seed and the step. A token is the one whose
range of the cumulative distribution, in fp64, contains a number u. Each u is a digest of the seed, the place of the
prompt in the training sequence, the number of the answer, and the position. The rows of a lot never change, and an
answer that has ended stays in it as padding, because the bits of a matrix product depend on its height. Tokens of an
environment take the place of sampled ones.

Shape suffixes: as in `decoder`; P prompts of the lot, B = P x answers rows.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from holdfast.model.decoder import Decoder, LayerCache
from holdfast.rollouts.caches import LotCache, LotPositions, read_tokens
from holdfast.rollouts.turns import Replies, turns_of
from holdfast.spec.rollout import Grpo

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
    turn_tokens: int | None = None  # most tokens of a turn, after which an environment replies


@dataclass(frozen=True)
class Generated:
    """One answer."""

    tokens: list[int]  # with the end-of-text token, if the model wrote it
    ending: Ending
    entropy: float | None  # mean over its sampled tokens of that of the distribution, in nats; None: unknown
    replies: list[tuple[int, int]] = field(default_factory=list)  # the ranges of tokens that an environment wrote


def sampling_of(settings: Grpo, answers: int, seed: int, end_of_text: int) -> Sampling:
    """The sampling of `training.grpo`, with `answers` answers to each prompt."""
    turn_tokens = None if settings.environment is None else settings.environment.turn_tokens
    return Sampling(answers, settings.answer_tokens, settings.temperature, seed, end_of_text, turn_tokens)


def uniforms(seed: int, place: int, answer: int, count: int) -> list[float]:
    """`count` numbers in [0, 1) for the tokens of an answer, as multiples of 2^-53."""
    key = f"rollout\0{seed}\0{place}\0{answer}".encode()
    raw = np.frombuffer(blake3(key).digest(length=8 * count), dtype="<u8")
    return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()


@torch.no_grad()
def generate_lot(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    places: Sequence[int],
    sampling: Sampling,
    replies: Replies | None = None,
) -> list[list[Generated]]:
    """The answers to each prompt. `places` are those of the prompts in the training sequence. `replies` answers the
    model where it ends a turn."""
    device = decoder.model.embed_tokens.weight.device
    rows, most = len(prompts) * sampling.answers, sampling.most_tokens
    u_TB = torch.tensor(
        [uniforms(sampling.seed, place, number, most) for place in places for number in range(sampling.answers)],
        dtype=torch.float64,
    ).T
    lot = _Lot(decoder, prompts, sampling.answers, most)
    answers_B = _Answers(rows, sampling, replies)
    logits_BV = lot.begin()
    while True:
        token_B = answers_B.append(*sample_tokens(logits_BV, u_TB[answers_B.count], sampling.temperature))
        if answers_B.complete:
            break
        logits_BV = lot.advance(token_B.to(device))
    answers = [answers_B.answer(row) for row in range(rows)]
    return [answers[first : first + sampling.answers] for first in range(0, rows, sampling.answers)]


def sample_tokens(logits_BV: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token of each row by inversion of the cumulative distribution at `u_B` (fp64 in [0, 1)), and the entropy of
    the distribution in nats. On the CPU, whose sums have one order."""
    scaled_BV = logits_BV.cpu().double()
    if temperature != 1:
        scaled_BV = scaled_BV / temperature
    scaled_BV = scaled_BV - scaled_BV.amax(-1, keepdim=True)
    parts_BV = scaled_BV.exp()
    products_BV = scaled_BV.mul_(parts_BV)
    mean_B = products_BV.sum(-1)
    if bool(mean_B.isnan().any()):  # a token is impossible
        mean_B = products_BV.masked_fill_(parts_BV == 0, 0.0).sum(-1)
    sums_BV = parts_BV.cumsum_(-1)  # never decreases
    whole_B1 = sums_BV[:, -1:].contiguous()
    entropy_B = (whole_B1.log() - mean_B[:, None] / whole_B1)[:, 0].clamp(min=0)  # the difference may round below 0
    below_B1 = torch.searchsorted(sums_BV, u_B[:, None] * whole_B1, right=True)
    last_B1 = torch.searchsorted(sums_BV, whole_B1)  # the product may round up to all
    token_B1 = torch.minimum(below_B1, last_B1)
    return token_B1.masked_fill_(whole_B1.isnan(), 0)[:, 0], entropy_B


class _Answers:
    """The answers of a lot while they are generated."""

    def __init__(self, rows: int, sampling: Sampling, replies: Replies | None) -> None:
        self._sampling, self._replies_of = sampling, replies
        self._tokens_TB = torch.empty(sampling.most_tokens, rows, dtype=torch.int64)
        self._entropy_TB = torch.zeros(sampling.most_tokens, rows, dtype=torch.float64)
        self._given_TB = torch.full((sampling.most_tokens, rows), -1)  # tokens of replies
        self._ended_B = torch.zeros(rows, dtype=torch.bool)
        self._endings: list[tuple[int, Ending]] = [(sampling.most_tokens, LENGTH)] * rows  # with sizes
        self._replies: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        self._turn_B = torch.zeros(rows, dtype=torch.int64)  # where the turn of the model began
        self.count = 0  # tokens of each row

    @property
    def complete(self) -> bool:
        """Whether all answers have ended."""
        return self.count == len(self._tokens_TB) or bool(self._ended_B.all())

    def append(self, sampled_B: Tensor, entropy_B: Tensor) -> Tensor:
        """Append a token to each row: that of a reply, or else the sampled one. Returns them."""
        at, given_B = self.count, self._given_TB[self.count]
        token_B = torch.where(given_B < 0, sampled_B, given_B)
        self._tokens_TB[at], self._entropy_TB[at] = token_B, entropy_B
        self.count += 1
        ends_B = token_B == self._sampling.end_of_text
        if (most := self._sampling.turn_tokens) is not None:
            ends_B |= self.count - self._turn_B >= most
        stops_B = ends_B & (given_B < 0) & ~self._ended_B
        for row in stops_B.nonzero()[:, 0].tolist():
            self._end_turn(row)
        return token_B

    def answer(self, row: int) -> Generated:
        """The answer of a row."""
        size, ending = self._endings[row]
        sampled_T = self._given_TB[:size, row] < 0
        entropies = self._entropy_TB[:size, row][sampled_T].tolist()
        mean = sum(entropies) / len(entropies)
        return Generated(self._tokens_TB[:size, row].tolist(), ending, mean, self._replies[row])

    def _end_turn(self, row: int) -> None:
        """Give the reply to a turn of the model, or end the answer."""
        begin, reply = self.count, None
        if self._replies_of is not None:
            turns = turns_of(self._tokens_TB[:begin, row].tolist(), self._replies[row])
            reply = self._replies_of(*divmod(row, self._sampling.answers), turns)
        end = begin + len(reply or ())
        if reply is None or end >= len(self._tokens_TB):
            self._ended_B[row] = True
            ended = reply is None and int(self._tokens_TB[begin - 1, row]) == self._sampling.end_of_text
            self._endings[row] = begin, STOP if ended else LENGTH
            return
        self._given_TB[begin:end, row] = torch.tensor(reply, dtype=torch.int64)
        self._replies[row].append((begin, end))
        self._turn_B[row] = end


class _Lot:
    """A lot in the decoder: its caches, and the position of each row."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], answers: int, most: int) -> None:
        self._decoder, self._answers = decoder, answers
        device = decoder.model.embed_tokens.weight.device
        self._lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(self._lengths_P.max())
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        self._prompts_PT = torch.tensor(padded, device=device)
        self._positions = LotPositions(self._lengths_P, answers, most)
        self._caches: list[LayerCache] = [LotCache(self._positions) for _ in range(decoder.shape.layers)]

    def begin(self) -> Tensor:
        """Read the prompts. Returns the logits of each row's first token."""
        # A caller of `hidden` needs no mask: padding follows a prompt, and attention is causal.
        x_PTD = self._decoder.hidden(self._prompts_PT, cache=self._caches)
        last_P1D = x_PTD[torch.arange(len(x_PTD), device=x_PTD.device), self._lengths_P - 1][:, None]
        return self._decoder.head(last_P1D)[:, 0].repeat_interleave(self._answers, 0)

    def advance(self, token_B: Tensor) -> Tensor:
        """Read a token of each row. Returns the logits of the next one."""
        logits_BV = read_tokens(self._decoder, self._caches, token_B, self._positions.next_positions)
        self._positions.advance()
        return logits_BV
