"""Values, gradients and metrics of objectives compared with numbers that `trl` computed, and their sums over parts.

`trl.json` was written by trl 1.16.0 with torch 2.13 on a CPU, in an environment outside the project. Random
log-probabilities of 3 chosen and 3 rejected answers (`lengths` tokens) under a model and a reference model are passed
to `DPOTrainer._compute_loss`, `KTOTrainer._compute_loss` (with `kl_policy` and `kl_reference` for the mismatched
answers), `ORPOTrainer.odds_ratio_loss`, `RewardTrainer.compute_loss` (rewards) and
`GKDTrainer.generalized_jsd_loss` (logits, beta 0). Stubs take the place of the models, and return these numbers.
The gradient is that of the loss with respect to each token's log-probability. ORPO's cross-entropy of `trl` also counts
the prompt; here it is the mean over the chosen answers' tokens.
"""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED, UNDESIRABLE
from holdfast.model.decoder import Decoder
from holdfast.model.token_logprobs import IGNORED, likeliest_tokens, token_logprobs
from holdfast.objectives.distillation import TopKDistillation
from holdfast.objectives.interface import Objective, ObjectiveInputs, count_terms, metrics_of, micro_batches, weighted
from holdfast.objectives.preference import DirectPreference, OddsRatio, RewardModel
from holdfast.objectives.unpaired import UnpairedPreference, divergence_of, divergence_sums, mismatched
from holdfast.spec.model import Model

TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl.json").read_text(encoding="utf-8"))
CPU = torch.device("cpu")
WITHIN = 1e-6
LENGTH = 24  # tokens of a row, and the first of the next one
PAIRS = [(0, 3), (1, 4), (2, 5)]  # numbers of the answers: chosen, then rejected


def answer(number: int, tokens: int, undesirable: bool = False) -> list[int]:
    """A document with one token of prompt."""
    document = [50 + number | UNCOUNTED, *(10 * number + at for at in range(tokens))]
    document[-1] |= ENDS
    return [token | UNDESIRABLE for token in document] if undesirable else document


def rows_of(groups: list[list[int]], undesirable: tuple[int, ...] = ()) -> Tensor:
    """A row for each group of answers, filled with tokens that do not count."""
    rows = []
    for group in groups:
        row = list(chain.from_iterable(answer(n, len(TRL["policy"][n]), n in undesirable) for n in group))
        rows.append(row + [UNCOUNTED] * (LENGTH - len(row)))
    return torch.tensor(rows)


def placed(values: list[list[float]], groups: list[list[int]], targets: Tensor) -> Tensor:
    """The losses of these log-probabilities at the targets of the answers."""
    losses = torch.zeros(targets.shape)
    losses[targets != IGNORED] = -torch.tensor([x for group in groups for n in group for x in values[n]])
    return losses


def computed(
    objective: Objective, rows: Tensor, groups: list[list[int]], divergence: Tensor | None = None, size: int = 9
) -> tuple[float, dict[str, float], list[list[float]]]:
    """Loss, metrics, and the gradient of each answer's log-probabilities, in micro-batches of `size` rows."""
    counts = count_terms(objective, rows)
    totals, gradients = torch.zeros_like(counts), []
    for at, batch in enumerate(micro_batches(rows, size, -1, CPU)):
        own = groups[at * size : (at + 1) * size]
        losses = placed(TRL["policy"], own, batch.targets).requires_grad_()
        reference = placed(TRL["reference"], own, batch.targets) if "reference" in objective.needs else None
        sums = objective.sums(ObjectiveInputs(losses, reference, divergence), batch)
        weighted(objective, sums / counts).backward()
        assert losses.grad is not None
        gradients.append(-losses.grad[batch.targets != IGNORED])
        totals += sums.detach()
    values = totals / counts
    order = [n for group in groups for n in group]
    parts = torch.cat(gradients).split([len(TRL["policy"][n]) for n in order])
    by_answer = dict(zip(order, (part.tolist() for part in parts), strict=True))
    metrics = {name: float(value) for name, value in metrics_of(objective, values).items()}
    return float(weighted(objective, values)), metrics, [by_answer[n] for n in range(6)]


def check(found: tuple[float, dict[str, float], list[list[float]]], expected: dict[str, Any]) -> None:
    loss, metrics, gradient = found
    assert loss == pytest.approx(expected["loss"], abs=WITHIN)
    for name, value in expected.items():
        if name not in ("loss", "gradient"):
            assert metrics[name] == pytest.approx(value, abs=WITHIN), name
    for actual, wanted in zip(gradient, expected["gradient"], strict=True):
        assert actual == pytest.approx(wanted, abs=WITHIN)


@pytest.mark.parametrize("groups", [[[0, 3, 1, 4], [2, 5]], [[2, 5], [1, 4], [0, 3]]], ids=["packed", "apart"])
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("kind", [DirectPreference, OddsRatio], ids=["dpo", "orpo"])
def test_objectives_of_pairs_are_those_of_trl_for_any_packing(kind: Any, beta: float, groups: list[list[int]]) -> None:
    expected = TRL[f"{'dpo' if kind is DirectPreference else 'orpo'} {beta}"]
    for size in (1, 3):
        check(computed(kind(beta), rows_of(groups), groups, size=size), expected)


@pytest.mark.parametrize(("beta", "weights"), [(0.1, (1.0, 1.0)), (0.3, (1.5, 0.5))])
def test_kto_is_that_of_trl_with_the_divergence_of_the_whole_batch(beta: float, weights: tuple[float, float]) -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    undesirable = tuple(n for n, label in enumerate(TRL["labels"]) if not label)
    sums = torch.zeros(2, dtype=torch.int64)
    for batch, group in zip(micro_batches(rows_of(groups), 1, -1, CPU), groups, strict=True):
        losses, reference = (placed(TRL[f"kl_{which}"], [group], batch.targets) for which in ("policy", "reference"))
        sums += divergence_sums(ObjectiveInputs(losses, reference), batch)
    found = computed(
        UnpairedPreference(beta, *weights), rows_of(groups, undesirable), groups, divergence_of(sums), size=2
    )
    check(found, TRL[f"kto {beta} {weights[0]} {weights[1]}"])


def test_the_ranking_loss_of_a_reward_model_is_that_of_trl() -> None:
    expected, groups = TRL["reward"], [[0, 3, 1, 4], [2, 5]]
    rows = rows_of(groups)
    (batch,) = micro_batches(rows, 9, -1, CPU)
    numbers = torch.full(batch.targets.shape, 1e3)
    last = (rows[:, :-1] & ENDS != 0).nonzero(as_tuple=True)
    order = [n for group in groups for n in group]
    numbers[last] = torch.tensor([expected["rewards"][n] for n in order])
    numbers.requires_grad_()
    values = RewardModel().sums(ObjectiveInputs(numbers), batch) / count_terms(RewardModel(), rows)
    weighted(RewardModel(), values).backward()
    assert numbers.grad is not None
    gradient = dict(zip(order, numbers.grad[last].tolist(), strict=True))
    metrics = {name: float(value) for name, value in metrics_of(RewardModel(), values).items()}
    check((metrics["pair_loss"], metrics, [[gradient[n]] for n in range(6)]),
          {name: value for name, value in expected.items() if name != "rewards"}
          | {"gradient": [[x] for x in expected["gradient"]]})  # fmt: skip


def distilled(student: Tensor, teacher: Tensor, targets: Tensor, top: int, temperature: float = 1.0) -> Tensor:
    """The terms of a distillation with these logits, each divided by the number of targets."""
    eye = torch.eye(student.shape[-1])
    likeliest = likeliest_tokens(teacher / temperature, eye, top)
    theirs = likeliest.tokens.where(targets[..., None] != IGNORED, IGNORED)
    if temperature == 1:
        losses = -token_logprobs(student, eye, torch.cat((targets[..., None], theirs), -1))
    else:
        model = Decoder(Model(layers=1, hidden=8, heads=1, tie_embeddings=False), len(eye))
        assert model.lm_head is not None
        model.temperature, model.lm_head.weight.data = temperature, eye
        losses = model.loss(student, torch.cat((targets[..., None], theirs), -1), "none")
    batch: Any = SimpleNamespace(targets=targets)
    return TopKDistillation(0.5).sums(ObjectiveInputs(losses, teacher=likeliest), batch) / (targets != IGNORED).sum()


def test_a_distillation_from_the_whole_vocabulary_is_that_of_trl() -> None:
    record = TRL["distillation"]
    student, teacher = (
        torch.tensor(record[which], requires_grad=which == "student") for which in ("student", "teacher")
    )
    targets = torch.tensor(record["targets"])
    warm, _ = distilled(student, teacher, targets, 7, 2.0)
    assert float(warm) == pytest.approx(record["2.0"]["loss"], abs=WITHIN)
    divergence, cross_entropy = distilled(student, teacher, targets, 7)
    assert float(divergence) == pytest.approx(record["1.0"]["loss"], abs=WITHIN)
    (gradient,) = torch.autograd.grad(divergence, student, retain_graph=True)
    torch.testing.assert_close(gradient, torch.tensor(record["1.0"]["gradient"]), rtol=0, atol=WITHIN)
    expected = torch.nn.functional.cross_entropy(student.flatten(0, 1), targets.flatten())
    assert float(cross_entropy) == pytest.approx(float(expected), abs=WITHIN)
    assert weighted(TopKDistillation(0.5), torch.stack((divergence, cross_entropy))) == divergence + 0.5 * cross_entropy


def test_tokens_outside_the_likeliest_are_one_bucket_of_the_divergence() -> None:
    record = TRL["distillation"]
    student, teacher, targets = (torch.tensor(record[which]) for which in ("student", "teacher", "targets"))
    (divergence, _), (same, _) = distilled(student, teacher, targets, 3), distilled(teacher, teacher, targets, 3)
    ours, theirs = student.double().softmax(-1), teacher.double().softmax(-1)
    order = theirs.argsort(-1, descending=True)
    p, q = (x.gather(-1, order) for x in (theirs, ours))
    p, q = (torch.cat((x[..., :3], x[..., 3:].sum(-1, keepdim=True)), -1) for x in (p, q))
    expected = (p * (p / q).log()).sum(-1)[targets != IGNORED].mean()
    assert float(divergence) == pytest.approx(float(expected), abs=WITHIN)
    assert float(same) == pytest.approx(0, abs=WITHIN)


def test_answers_move_to_the_next_prompt_of_their_row() -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    moved = mismatched(rows_of(groups, (1,)))
    prompts = [
        [token - UNCOUNTED for token in row if token & UNCOUNTED and token > UNCOUNTED] for row in moved.tolist()
    ]
    assert moved.shape == (3, LENGTH)
    expected = [*answer(0, 4)[:1], *answer(2, 4)[1:], *answer(1, 2, True)[:1], *answer(0, 5)[1:]]
    assert moved[0][: len(expected)].tolist() == expected
    assert (moved[1] & UNCOUNTED != 0).all(), "an answer alone in its row has no other prompt"
    assert moved[2][:7].tolist() == [*answer(4, 6)[:1], *answer(5, 4)[1:], *answer(5, 4)[:1], *answer(4, 6)[1:]][:7]
    assert len(prompts[0]) == 3
    (before,), (after,) = (list(micro_batches(rows[:1], 1, -1, CPU)) for rows in (rows_of(groups), moved))
    assert (before.targets != IGNORED).sum() == (after.targets != IGNORED).sum()


def test_a_certain_answer_has_a_finite_loss_and_gradient() -> None:
    rows = rows_of([[0, 3]])
    ((batch),) = micro_batches(rows, 1, -1, CPU)
    losses = torch.zeros(batch.targets.shape, requires_grad=True)
    weighted(objective := OddsRatio(0.1), objective.sums(ObjectiveInputs(losses), batch)).backward()
    assert losses.grad is not None
    assert losses.grad.isfinite().all()
