"""Generation of answers in lots: fixed sets of prompts, each with the same number of answers.

The tokens of a lot are a pure function of the weights, the prompts, the seed and the step. A token is the one whose
range of the cumulative distribution, in fp64, contains a number u. Each u is a digest of the seed, the place of the
prompt in the training sequence, the number of the answer, and the position. The rows of a lot never change, and an
answer that has ended stays in it as padding, because the bits of a matrix product depend on its height. Tokens of an
environment take the place of sampled ones.

Shape suffixes: as in `decoder`; P prompts of the lot, B = P x answers rows.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor

from holdfast.model.decoder import Decoder
from holdfast.rollouts.caches import LotCache, LotPositions, read_tokens
from holdfast.rollouts.packed import PackedDecoder, is_packable
from holdfast.rollouts.turns import Replies, turns_of
from holdfast.spec.rollout import Grpo

Ending = str  # "stop": the model ended the answer; "length": the limit did
STOP, LENGTH = "stop", "length"
BLOCK = 64  # tokens whose shares are summed up before a token is chosen


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


def generate_lot(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    places: Sequence[int],
    sampling: Sampling,
    replies: Replies | None = None,
) -> list[list[Generated]]:
    """The answers of one lot. See `LotGenerator.generate`."""
    return LotGenerator(decoder).generate(prompts, places, sampling, replies)


class LotGenerator:
    """Generates lots with the present weights of a decoder, which are packed once for all of them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[int],
        sampling: Sampling,
        replies: Replies | None = None,
    ) -> list[list[Generated]]:
        """The answers to each prompt. `places` are those of the prompts in the training sequence. `replies` answers the
        model where it ends a turn."""
        device = self._decoder.model.embed_tokens.weight.device
        rows, most = len(prompts) * sampling.answers, sampling.most_tokens
        u_TB = torch.tensor(
            [uniforms(sampling.seed, place, number, most) for place in places for number in range(sampling.answers)],
            dtype=torch.float64,
        ).T
        lot = _Lot(self._decoder, self._packed, prompts, sampling)
        answers_B = _Answers(rows, sampling, replies)
        logits_BV = lot.begin()
        sampler = TokenSampler(logits_BV, sampling.temperature)
        while True:
            token_B = answers_B.append(*sampler.sample(logits_BV, u_TB[answers_B.count]))
            if answers_B.complete:
                break
            logits_BV = lot.advance(token_B.to(device))
        answers = [answers_B.answer(row) for row in range(rows)]
        return [answers[first : first + sampling.answers] for first in range(0, rows, sampling.answers)]

    @cached_property
    def _packed(self) -> PackedDecoder | None:
        return PackedDecoder(self._decoder) if is_packable(self._decoder) else None


def sample_tokens(logits_BV: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `TokenSampler.sample`."""
    return TokenSampler(logits_BV, temperature).sample(logits_BV.clone(), u_B)


class TokenSampler:
    """Sampling by inversion of the cumulative distribution, in a buffer that all tokens of a lot use.

    Blocks of BLOCK tokens are summed up where the logits are, in one order. The CPU chooses a block by the sums, and
    then a token in it. So only these sums and one block of each row leave an accelerator.
    """

    def __init__(self, logits_BV: Tensor, temperature: float) -> None:
        """For logits like these. The arithmetic of a token is fp32, or fp64 if they are. Cumulative sums are fp64."""
        self._temperature = temperature
        (rows, vocabulary), kind = logits_BV.shape, torch.promote_types(logits_BV.dtype, torch.float32)
        self._parts_BCK = logits_BV.new_zeros(rows, -(-vocabulary // BLOCK), BLOCK, dtype=kind)  # the rest stays 0
        self._parts_BV = self._parts_BCK.flatten(1)[:, :vocabulary]
        self._rows_B = torch.arange(rows, device=logits_BV.device)

    def sample(self, logits_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
        """The token of each row at `u_B` (fp64 in [0, 1)), and the entropy of the distribution in nats. Both are on the
        CPU. The logits are overwritten."""
        parts_BV = self._parts_BV
        scaled_BV = logits_BV.to(parts_BV.dtype)
        if self._temperature != 1:
            scaled_BV.div_(self._temperature)
        torch.exp(scaled_BV.sub_(scaled_BV.amax(-1, keepdim=True)), out=parts_BV)
        mean_B = scaled_BV.mul_(parts_BV).sum(-1).cpu()
        if bool(mean_B.isnan().any()):  # a token is impossible
            mean_B = scaled_BV.masked_fill_(parts_BV == 0, 0.0).sum(-1).cpu()
        sums_BC = self._parts_BCK.sum(-1).cpu().cumsum(-1, dtype=torch.float64)  # never decreases
        whole_B1 = sums_BC[:, -1:].contiguous()
        entropy_B = (whole_B1.log() - mean_B[:, None] / whole_B1)[:, 0].clamp(min=0)  # the difference may round below 0
        goal_B1, unknown_B1 = u_B[:, None] * whole_B1, whole_B1.isnan()
        block_B1 = _place(sums_BC, goal_B1).masked_fill_(unknown_B1, 0)
        before_B1 = F.pad(sums_BC, (1, 0)).gather(1, block_B1)
        blocks_BK = self._parts_BCK[self._rows_B, block_B1[:, 0].to(self._rows_B.device)].cpu()
        token_B1 = block_B1 * BLOCK + _place(blocks_BK.cumsum(-1, dtype=torch.float64), goal_B1 - before_B1)
        return token_B1.masked_fill_(unknown_B1, 0)[:, 0], entropy_B


def _place(sums: Tensor, goal_B1: Tensor) -> Tensor:
    """The first place in each row whose sum is above the goal, and at most the first one whose sum is that of all,
    because a goal may round up to it."""
    return torch.minimum(
        torch.searchsorted(sums, goal_B1, right=True), torch.searchsorted(sums, sums[:, -1:].contiguous())
    )


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

    def __init__(
        self, decoder: Decoder, packed: PackedDecoder | None, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> None:
        self._decoder, self._packed, self._answers = decoder, packed, sampling.answers
        device = decoder.model.embed_tokens.weight.device
        self._lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(self._lengths_P.max())
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        self._prompts_PT = torch.tensor(padded, device=device)
        self._positions = LotPositions(self._lengths_P, sampling.answers, sampling.most_tokens)
        self._caches = [LotCache(self._positions) for _ in range(decoder.shape.layers)]

    def begin(self) -> Tensor:
        """Read the prompts. Returns the logits of each row's first token."""
        # A caller of `hidden` needs no mask: padding follows a prompt, and attention is causal.
        x_PTD = self._decoder.hidden(self._prompts_PT, cache=list(self._caches))
        last_P1D = x_PTD[torch.arange(len(x_PTD), device=x_PTD.device), self._lengths_P - 1][:, None]
        return self._decoder.head(last_P1D)[:, 0].repeat_interleave(self._answers, 0)

    def advance(self, token_B: Tensor) -> Tensor:
        """Read a token of each row. Returns the logits of the next one."""
        at_B = self._positions.next_positions
        if self._packed is None:
            logits_BV = read_tokens(self._decoder, self._caches, token_B, at_B)
        else:
            logits_BV = self._packed.read_tokens(self._caches, token_B, at_B)
        self._positions.advance()
        return logits_BV
