"""Advantages of answers, and the rows of a batch that a step learns from.

Advantages are computed in fp64 on the CPU from the rewards of whole groups, so they do not depend on ranks. A group
whose answers all have the same reward has the advantage 0, and still counts in the divisors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED
from holdfast.objectives.interface import with_scores
from holdfast.rollouts.records import Unit
from holdfast.spec.parallel import Parallel

EPSILON = 1e-4  # added to the standard deviation, as in `trl`
WIDTH = 16  # rows are a multiple of it long, so that few shapes occur


def advantages_of(rewards: Sequence[float], scaled: bool) -> Tensor:
    """The advantages of a group of answers: fp64 [answers]. `scaled` divides by their standard deviation."""
    values = torch.tensor(rewards, dtype=torch.float64)
    centered = values - values.mean()
    if bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return centered / (values.std() + EPSILON) if scaled else centered


def has_signal(unit: Unit) -> bool:
    """Whether the answers of a unit have different rewards."""
    return len({answer.reward for answer in unit.answers}) > 1


def has_whole_rows(parallel: Parallel) -> bool:
    """Whether each row must have `model.context` tokens. Pipeline stages, and ranks that share a sequence, take no
    other width."""
    return parallel.context > 1 or parallel.pipeline > 1 or WIDTH % parallel.tensor > 0


def rows_of(
    units: Sequence[Unit], prompts: Sequence[Sequence[int]], scaled: bool, context: int, filler: int
) -> tuple[Tensor, Tensor]:
    """The words and the advantages of a batch of answers, one row for each, in the order of units: int64 and fp32
    [answers, width]. The width is the smallest multiple of WIDTH, plus 1, that the longest row fits into, and at most
    `context` + 1. `prompts` are the tokens of each unit's prompt, and `filler` is the token after an answer."""
    longest = max(
        len(prompt) + len(answer.tokens) for unit, prompt in zip(units, prompts, strict=True) for answer in unit.answers
    )
    width = min(-(-(longest - 1) // WIDTH) * WIDTH, context) + 1
    words = torch.full((sum(len(unit.answers) for unit in units), width), filler_word(filler))
    advantages = torch.zeros(words.shape)
    row = 0
    for unit, prompt in zip(units, prompts, strict=True):
        values = advantages_of([answer.reward for answer in unit.answers], scaled)
        for answer, value in zip(unit.answers, values.tolist(), strict=True):
            begin, end = len(prompt), len(prompt) + len(answer.tokens)
            words[row, :begin] = torch.tensor(prompt) | UNCOUNTED
            words[row, begin:end] = torch.tensor(answer.tokens)
            words[row, end - 1] |= ENDS
            advantages[row, begin:end] = value
            for first, last in answer.replies:
                words[row, begin + first : begin + last] |= UNCOUNTED
                advantages[row, begin + first : begin + last] = 0
            row += 1
    return words, advantages


def filler_word(token: int) -> int:
    """The word after an answer."""
    return token | UNCOUNTED | ENDS


def widened(values: Tensor, width: int, filler: int = 0) -> Tensor:
    """Values of answers [answers, any width] with columns of `filler` up to `width`."""
    return torch.cat((values, values.new_full((len(values), max(width - values.shape[1], 0)), filler)), 1)


def scored_rows(words: Tensor, advantages: Tensor, logprobs: Tensor | None) -> Tensor:
    """The rows of a step: int64 [answers, width, 2]. `logprobs` are those of the answers' tokens before the first
    update on them, [answers, width]; None for the first update."""
    return with_scores(words, advantages, torch.zeros_like(advantages) if logprobs is None else logprobs)
