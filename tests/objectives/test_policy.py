"""The objective of generated answers compared with numbers that `trl` computed.

`trl_grpo.json` was written by trl 1.16.0 with torch 2.13 on a CPU, in an environment outside the project. Random
log-probabilities of 6 answers under a model, before an update (`old`), and under a reference model are passed to
`GRPOTrainer._compute_loss`. A stub takes the place of the model, and returns these numbers. The clipping is 0.2 and
0.28. The gradient is that of the loss with respect to each token's log-probability.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import ObjectiveInputs, count_terms, metrics_of, micro_batches, weighted, with_scores
from holdfast.objectives.policy import policy_objective
from holdfast.rollouts.advantages import advantages_of
from holdfast.spec.rollout import Grpo

TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_grpo.json").read_text(encoding="utf-8"))
CPU, WITHIN, WIDTH = torch.device("cpu"), 1e-6, 12


def rows(advantages: list[float]) -> Tensor:
    """A row for each answer: two tokens of prompt, the answer, and filler."""
    words = torch.full((6, WIDTH), UNCOUNTED | ENDS)
    scores, old = torch.zeros(6, WIDTH), torch.zeros(6, WIDTH)
    for row, values in enumerate(TRL["old"]):
        end = 2 + len(values)
        words[row, :2] = 7 | UNCOUNTED
        words[row, 2:end] = torch.arange(len(values)) + 20
        words[row, end - 1] |= ENDS
        scores[row, 2:end], old[row, 2:end] = advantages[row], torch.tensor(values)
    return with_scores(words, scores, old)


def placed(values: list[list[float]], targets: Tensor) -> Tensor:
    losses = torch.zeros(targets.shape)
    losses[targets != IGNORED] = -torch.tensor([x for each in values for x in each])
    return losses


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("size", [1, 4])
def test_the_policy_objective_is_that_of_trl(kind: Any, beta: float, updates: int, scaled: bool, size: int) -> None:
    expected = TRL[f"{kind} {beta} {'old' if updates > 1 else 'new'} {'scaled' if scaled else 'plain'}"]
    settings = Grpo(
        normalization=kind, kl_weight=beta, updates=updates, clip_high=0.28, answer_tokens=TRL["answer_tokens"]
    )
    objective = policy_objective(settings)
    groups = [advantages_of(TRL["rewards"][first : first + 3], scaled).tolist() for first in (0, 3)]
    advantages = [value for group in groups for value in group]
    assert advantages == pytest.approx(TRL["advantages scaled" if scaled else "advantages"], abs=WITHIN)

    batch_rows = rows(advantages)
    counts, totals = count_terms(objective, batch_rows), torch.zeros(len(objective.terms))
    gradients: list[list[float]] = []
    for number, batch in enumerate(micro_batches(batch_rows, size, -1, CPU)):
        own = slice(number * size, (number + 1) * size)
        losses = placed(TRL["policy"][own], batch.targets).requires_grad_()
        reference = placed(TRL["reference"][own], batch.targets) if beta else None
        sums = objective.sums(ObjectiveInputs(losses, reference), batch)
        weighted(objective, sums / counts).backward()
        assert losses.grad is not None
        for row, targets in zip(losses.grad, batch.targets, strict=True):
            gradients.append((-row[targets != IGNORED]).tolist())
        totals += sums.detach()
    values = totals / counts
    assert float(weighted(objective, values)) == pytest.approx(expected["loss"], abs=WITHIN)
    for actual, wanted in zip(gradients, expected["gradient"], strict=True):
        assert actual == pytest.approx(wanted, abs=WITHIN)
    metrics = {name: float(value) for name, value in metrics_of(objective, values).items()}
    assert metrics["clipped_share"] == pytest.approx(expected["clipped_share"], abs=WITHIN)
    if beta:
        assert metrics["kl"] == pytest.approx(expected["kl"], abs=WITHIN)


def test_a_group_without_a_difference_has_no_advantage() -> None:
    assert advantages_of([0.1, 0.1, 0.1], scaled=True).tolist() == [0, 0, 0]
