"""Preference optimization (DPO, ORPO, KTO): the losses of the papers, at every layout."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.checkpoint import TensorBox
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED, UNDESIRABLE
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.model.lora import add_adapters, is_adapter
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import ObjectiveInputs, count_terms, micro_batches
from holdfast.objectives.preference import DirectPreference
from holdfast.spec import Spec
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Steps, join_exactly, steps_of
from tests.train.test_lora import adapters, part
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

PAIRS = (
    "data.kind=preferences", "data.document_masks=true", "data.tokenizer.kind=file", "data.tokenizer.path=t",
    "training.preference.beta=0.5",
)  # fmt: skip
ODDS = ("training.objective=orpo",)
REWARD = ("model.head=scalar", "training.preference.beta=0.1")
LABELS = ("data.kind=unpaired", "training.preference.undesirable_weight=1.5")
LORA = ("training.lora.rank=3", "training.lora.alpha=6", 'training.lora.targets=["q_proj", "v_proj", "down_proj"]')
EXPERTS = (
    "model.family=mixtral", "model.experts=4", "model.ffn=24", "model.routing.top_k=2", "model.routing.coefficient=0.3",
)  # fmt: skip
TENSOR, SEQUENCES = ("parallel.tensor=2",), ("parallel.context=2", "parallel.strategy=fsdp")
STAGES = ("parallel.pipeline=2", "model.tie_embeddings=false", "training.micro_batch=1")
BETA, RATE, STEPS, CONTEXT = 0.5, 0.02, 2, 16
# Two ranks that split the model or its rows. The first ones are in every test run.
SPLIT = (
    (*REWARD, *LORA, *TENSOR), (*EXPERTS, *TENSOR), (*LABELS, *SEQUENCES), (*LABELS, *LORA, *STAGES),
    TENSOR, SEQUENCES, (*STAGES, "parallel.schedule=gpipe"), (*EXPERTS, *STAGES),
    (*EXPERTS, "parallel.expert=2", "parallel.strategy=fsdp"), (*LABELS, *TENSOR),
    (*LABELS, *STAGES), (*ODDS, *SEQUENCES), (*ODDS, *TENSOR),
    (*ODDS, *EXPERTS, *SEQUENCES), (*REWARD, *SEQUENCES), (*REWARD, *STAGES),
    (*STAGES, "parallel.schedule=interleaved", "model.layers=4"), (*STAGES, *LORA),
    (*STAGES, "parallel.schedule=zero_bubble"),
)  # fmt: skip
FILLER = 0 | UNCOUNTED | ENDS
LAYOUTS = (
    (1, ("parallel.strategy=ddp",)),
    (1, ("parallel.strategy=ddp", *LORA)),
    (2, ("parallel.strategy=ddp", "training.micro_batch=1")),
    (2, ("parallel.strategy=fsdp",)),
    (2, ("parallel.strategy=fsdp", *LORA)),
    (2, ("parallel.strategy=ddp", "training.determinism=elastic")),
    (2, ("parallel.strategy=fsdp", "training.determinism=elastic")),
    (1, ("parallel.strategy=ddp", *ODDS)),
    (2, ("parallel.strategy=fsdp", *ODDS)),
    (1, ("parallel.strategy=ddp", *REWARD)),
    (2, ("parallel.strategy=fsdp", *REWARD, "training.determinism=elastic")),
    (1, ("parallel.strategy=ddp", *LABELS, *LORA)),
    (2, ("parallel.strategy=ddp", *LABELS, "training.micro_batch=1")),
    (2, ("parallel.strategy=fsdp", *LABELS, "training.determinism=elastic")),
)


def sample(draw: np.random.Generator) -> list[int]:
    """A sample of CONTEXT tokens: some pairs of answers, and filler."""
    marked_tokens: list[int] = []
    for _ in range(int(draw.integers(1, 3))):
        for _ in range(2):
            size, prompt = int(draw.integers(3, 5)), 2
            tokens = draw.integers(1, VOCABULARY, size).tolist()
            marked_tokens += [
                token | UNCOUNTED * (at < prompt) | ENDS * (at == size - 1) for at, token in enumerate(tokens)
            ]
    return marked_tokens + [FILLER] * (CONTEXT - len(marked_tokens))


def global_batch(step: int, labeled: bool = False) -> Tensor:
    """Rows of pairs, with different numbers of pairs. Alternatively, the second answer of a pair is undesirable."""
    draw = np.random.default_rng(step)
    rows = torch.tensor([[*sample(draw), FILLER] for _ in range(8)])
    if labeled:
        ends = rows & ENDS != 0
        rows = torch.where((ends.cumsum(1) - ends.long()) % 2 == 1, rows | UNDESIRABLE, rows)
    return rows


def answers(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The documents of rows that count: their ids, and a mask of the counted ones."""
    result = []
    for row in rows[:, :-1]:
        ends = (torch.nonzero(row & ENDS != 0).flatten() + 1).tolist()
        for first, last in zip([0, *ends], ends, strict=False):
            counted = row[first:last] & UNCOUNTED == 0
            if counted.any():
                result.append((row[first:last] & ID, counted))
    return result


def loss_of(decoder: Decoder, before: Decoder, rows: Tensor, spec: Spec) -> Tensor:
    """The loss of a step, from every answer alone."""
    if spec.model.experts > 1 and decoder.training:
        (batch,) = micro_batches(rows, len(rows), -1, torch.device("cpu"))
        uneven = decoder._hidden(batch.tokens, batch.segments, None)[1]
        assert uneven is not None
        charge = spec.model.routing.coefficient * uneven.mean()
        decoder.eval()
        loss = loss_of(decoder, before, rows, spec)
        decoder.train()
        return loss + charge - charge.detach()
    found = answers(rows)
    log_sigmoid = torch.nn.functional.logsigmoid
    if spec.model.head == "scalar":
        rewards = torch.stack([decoder(tokens[None])[0, -1] for tokens, _ in found])
        return -log_sigmoid(rewards[::2] - rewards[1::2]).mean()
    policy = torch.stack([log_probability(decoder, *answer) for answer in found])
    with torch.no_grad():
        judged = torch.stack([log_probability(before, *answer) for answer in found])
    if spec.training.objective.kind == "orpo":
        lengths = torch.tensor([int(counted[1:].sum()) for _, counted in found])
        mean = policy / lengths
        odds = mean - (-mean.expm1()).log()
        return -policy[::2].sum() / lengths[::2].sum() - BETA * log_sigmoid(odds[::2] - odds[1::2]).mean()
    if spec.data.kind == "unpaired":
        others = [(tokens, counted) for row in rows for tokens, counted in swapped(answers(row[None]))]
        with torch.no_grad():
            ratios = [log_probability(decoder, *other) - log_probability(before, *other) for other in others]
        distance = BETA * (policy - judged - torch.stack(ratios).mean().clamp(min=0))
        return torch.cat((1 - distance[::2].sigmoid(), 1.5 * (1 - (-distance[1::2]).sigmoid()))).mean()
    margins = policy - judged
    return -log_sigmoid(BETA * (margins[::2] - margins[1::2])).mean()


def swapped(found: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The answers of a row, each after the next prompt."""
    result = []
    for (tokens, counted), (other, also) in zip(found, [found[-1], *found[:-1]], strict=True):
        result.append((torch.cat((tokens[~counted], other[also])), torch.cat((counted[~counted], also[also]))))
    return result


def log_probability(decoder: Decoder, tokens: Tensor, counted: Tensor) -> Tensor:
    """The log-probability of a separate answer, as in the paper."""
    logs = decoder(tokens[None, :-1])[0].log_softmax(-1)
    return (logs.gather(-1, tokens[1:, None])[:, 0] * counted[1:]).sum()


def reference(*overrides: str) -> list[Any]:
    """(loss, gradient norm) of every step of a plain loop in fp64, and the final weights. Products of experts are
    fp32."""
    spec = tiny_spec(*PAIRS, *overrides, "model.init_from=x")
    decoder = Decoder(spec.model, VOCABULARY)
    initialise(decoder, spec.training.seed)
    precise = torch.float64 if spec.model.experts == 1 else torch.float32
    before = copy.deepcopy(decoder).to(precise)
    add_adapters(decoder, spec.training.lora)
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(start_of(name))
    decoder.to(precise)
    settings, trainable = spec.training.optimizer, {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trainable.values() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trainable.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.epsilon,
    )  # fmt: skip
    curve = []
    for step in range(STEPS):
        loss = loss_of(decoder, before, global_batch(step, spec.data.kind == "unpaired"), spec)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), spec.training.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return [curve, {name: parameter.detach() for name, parameter in trainable.items()}]


def start_of(name: str) -> Tensor:
    """Adapters without initial effect: at first the model equals its reference. Only B is zero."""
    value = adapters()[name]
    return torch.zeros_like(value) if name.endswith("lora_B.weight") else value


def _steps(rank: int, size: int, folder: Path, runs: list[tuple[str, ...]]) -> list[Steps]:
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState

    join_exactly(folder, rank, size, always=True)
    results = []
    for overrides in runs:
        spec = tiny_assignment(*PAIRS, *overrides, "model.init_from=x", f"parallel.processes={size}")
        engine, seeded = build_engine(spec, VOCABULARY, -1), SeededState(spec.model, spec.training.seed)
        for box in engine.frozen():
            seeded.fill([box])
        seeded.fill(boxes := engine.boxes())
        for box in boxes:
            if is_adapter(box.name) and not box.name.startswith("optimizer"):
                box.data.copy_(part(start_of(box.name), box))
        engine.restored(0)
        batches = [global_batch(step, spec.objective == "kto") for step in range(STEPS)]
        results.append(steps_of(engine, spec, rank, size, batches, RATE))
    return results


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_loss_is_the_sum_over_the_pairs_of_the_paper_and_what_is_no_pair_adds_nothing(beta: float) -> None:
    torch.manual_seed(3)
    pairs = 0
    for rows in (global_batch(0), global_batch(1)[:1], torch.full((2, CONTEXT + 1), FILLER)):
        (batch,) = micro_batches(rows, len(rows), -1, torch.device("cpu"))
        targets, documents = batch.targets, batch.documents
        assert documents is not None
        losses, before = (torch.rand(targets.shape) * 3 * (targets != IGNORED) for _ in range(2))
        expected, count = 0.0, 0
        # Computed directly: documents come in pairs, and a document without counted tokens is no member of one.
        for row in range(len(rows)):
            gains = [
                float((before - losses)[row][documents[row] == document].double().sum())
                for document in range(int(documents[row].max()) + 2)
                if bool((targets[row][documents[row] == document] != IGNORED).any())
            ]
            for chosen, rejected in zip(gains[::2], gains[1::2], strict=True):
                expected += math.log1p(math.exp(-beta * (chosen - rejected)))
                count += 1
        loss = DirectPreference(beta).sums(ObjectiveInputs(losses, before), batch)[0]
        assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-12)
        assert count_terms(DirectPreference(beta), rows).tolist() == [max(1, count)] * 3
        assert count_terms(DirectPreference(beta), rows, contributes=False).tolist() == [1] * 3
        pairs += count
    assert pairs > 9


@pytest.mark.drill
def test_every_layout_computes_the_loss_of_the_paper(tmp_path: Path) -> None:
    for size in (1, 2):
        require_loss_of_paper(tmp_path / str(size), size, [fields for ranks, fields in LAYOUTS if ranks == size])


@pytest.mark.slow
@pytest.mark.parametrize("runs", [SPLIT[:4], pytest.param(SPLIT[4:], marks=pytest.mark.drill)], ids=["some", "all"])
def test_ranks_that_split_a_model_or_its_rows_compute_the_loss_of_the_paper(
    tmp_path: Path, runs: tuple[tuple[str, ...], ...]
) -> None:
    require_loss_of_paper(tmp_path, 2, list(runs))


def require_loss_of_paper(folder: Path, size: int, runs: list[tuple[str, ...]]) -> None:
    """Each run has the losses, the gradient norms and the weights of `reference`."""
    results = zip(*in_ranks(size, _steps, folder, runs, seconds=300), strict=True)
    expected: dict[tuple[str, ...], list[Any]] = {}
    for fields, ranks in zip(runs, results, strict=True):
        alone = tuple(
            field for field in fields if not field.startswith(("parallel.", "training.micro", "training.det"))
        )
        if alone not in expected:
            expected[alone] = reference(*alone)
        curve, weights = expected[alone]
        for losses, boxes in ranks:
            torch.testing.assert_close(losses, curve, rtol=1e-4, atol=0, msg=partial("{}: {}".format, fields))
            for name, offset, array in boxes if EXPERTS[0] not in fields else ():  # AdamW turns rounding into signs
                data = torch.from_numpy(array)
                box = TensorBox(name, tuple(weights[name].shape), offset, data)
                torch.testing.assert_close(data.double(), part(weights[name], box), rtol=0, atol=3e-3, msg=name)
