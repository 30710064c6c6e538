"""LAMB follows You et al. (2020), to the bit on one process, and the number of ranks does not affect its norms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.model.token_logprobs import IGNORED
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, Steps, join_exactly, started, steps_of, train_in_ranks, trained
from tests.train.test_reference import END, RATE, STEPS, check, global_batch
from tests.train.tiny_run import VOCABULARY, new_store, tiny_assignment, tiny_spec

LAMB = "training.optimizer.kind=lamb"


def norm(tensor: Tensor) -> Tensor:
    """The root of the sum of squares. Rows are summed by halves, all rows together, and then the sums of the rows."""

    def total(values: list[Tensor]) -> Tensor:
        while len(values) > 1:
            half = len(values) // 2
            sums = [first + second for first, second in zip(values[:half], values[half : 2 * half], strict=True)]
            values = sums + values[2 * half :]
        return values[0]

    return total(list(total(list(tensor.reshape(len(tensor), -1).square().T)))).sqrt()


def plain_loop(dtype: torch.dtype) -> list[Any]:
    """(loss, gradient norm) of every step, and the final weights."""
    spec = tiny_spec()
    settings, decoder = spec.training.optimizer, Decoder(spec.model, VOCABULARY)
    initialise(decoder, spec.training.seed)
    decoder.to(dtype)
    moments = {
        name: (torch.zeros_like(parameter), torch.zeros_like(parameter))
        for name, parameter in decoder.named_parameters()
    }
    assert spec.training.clip_norm is not None
    curve = []
    for step in range(STEPS):
        rows = global_batch(step, ignored=False)
        total = torch.zeros((), dtype=dtype)
        for part in rows.split(2):
            loss = decoder(part[:, :-1], part[:, 1:], None, reduction="sum")
            (loss * (1 / torch.tensor(rows[:, 1:].numel()).to(dtype))).backward()
            total += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), spec.training.clip_norm)
        curve.append((float(total / rows[:, 1:].numel()), float(grad_norm)))
        count = torch.tensor(step + 1, dtype=torch.float32)
        for name, weight in decoder.named_parameters():
            assert weight.grad is not None
            first, second = moments[name]
            first.copy_(settings.beta1 * first + (1 - settings.beta1) * weight.grad)
            second.copy_(settings.beta2 * second + (1 - settings.beta2) * weight.grad**2)
            of_first, of_second = first / (1 - settings.beta1**count), second / (1 - settings.beta2**count)
            update = of_first / (of_second.sqrt() + settings.epsilon)
            if weight.dim() >= 2:
                update = update + settings.weight_decay * weight.detach()
            ratio = norm(weight.detach()) / norm(update)
            weight.data -= ratio * RATE * update
            weight.grad = None
    assert IGNORED not in rows
    return [curve, {name: parameter.detach() for name, parameter in decoder.named_parameters()}]


def _engine_steps(rank: int, size: int, folder: Path, runs: list[tuple[str, ...]]) -> list[Steps]:
    join_exactly(folder, rank, size, always=False)
    specs = [tiny_assignment(LAMB, *overrides, f"parallel.processes={size}") for overrides in runs]
    batches = [global_batch(step, ignored=False) for step in range(STEPS)]
    return [steps_of(started(spec, END), spec, rank, size, batches, RATE) for spec in specs]


def test_one_process_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    (((curve, boxes),),) = in_ranks(1, _engine_steps, tmp_path / "r", [("training.micro_batch=2",)], seconds=200)
    losses, weights = plain_loop(torch.float32)
    np.testing.assert_array_equal(curve, losses)
    assert {name for name, _, _ in boxes} == weights.keys()
    for name, _, array in boxes:
        assert torch.equal(torch.from_numpy(array), weights[name]), name


@pytest.mark.slow
def test_replicas_shards_and_cut_matrices_have_the_norms_of_whole_tensors(tmp_path: Path) -> None:
    runs = [("parallel.strategy=ddp",), ("parallel.strategy=fsdp",), ("parallel.tensor=2",)]
    results = in_ranks(2, _engine_steps, tmp_path / "r", runs, seconds=300)
    expected = plain_loop(torch.float64)
    for run in range(len(runs)):
        check(results, run, expected, 1e-5)


MIXTURE = ("model.family=mixtral", "model.experts=4", "model.ffn=24")


def overrides_of(ranks: int, strategy: str, level: str, *more: str) -> tuple[str, ...]:
    return (
        LAMB, f"training.determinism={level}", f"parallel.strategy={strategy}", f"parallel.processes={ranks}",
        "training.steps=6", *more,
    )  # fmt: skip


@pytest.mark.slow
def test_no_number_of_ranks_shows_under_elastic_determinism_and_no_interruption(tmp_path: Path) -> None:
    store, results = new_store(tmp_path / "store"), {}
    kinds = [("ddp", *MIXTURE), ("fsdp",), ("fsdp", *MIXTURE)]
    for ranks, salt, stop in ((1, "one", None), (3, "several", 2), (2, "several", None)):
        runs: Runs = [
            (overrides_of(ranks, strategy, "elastic", *more), f"{strategy} {len(more)} {salt}", stop)
            for strategy, *more in kinds
        ]
        endings = train_in_ranks(ranks, store.url, tmp_path / f"{ranks} {salt}", runs)
        assert endings == ["" if stop is None else "PreemptedError"] * len(runs)
    for salt in ("one", "several"):
        results[salt] = [
            trained(store, tiny_spec(*overrides_of(1, strategy, "elastic", *more)), f"{strategy} {len(more)} {salt}")
            for strategy, *more in kinds
        ]
    assert results["one"] == results["several"]
