"""Every engine matches a plain loop of `torch.optim.AdamW`: losses, gradient norms and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ID, UNCOUNTED
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder, document_ids
from holdfast.model.initialise import initialise
from holdfast.model.token_logprobs import IGNORED
from holdfast.rank.randomness import stream_seed
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Steps, join_exactly, started, steps_of
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

STEPS, RATE = 4, 0.02
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
END = 0  # the end-of-text token


def global_batch(step: int, ignored: bool = True) -> Tensor:
    """Rows with several documents. On request, most targets of the first rows do not count."""
    rows = torch.randint(1, VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))
    rows[:, 5::6] = END
    if ignored:
        for row in range(6):
            rows[row, 1 : 17 - 3 * row // 2] = END | UNCOUNTED
    return rows


def reference(*overrides: str, ignored: bool = True, micro_batch: int = 8, dtype: Any = torch.float64) -> list[Any]:
    """The plain loop on one process: (loss, gradient norm) of every step, and the final weights."""
    spec = tiny_spec(*overrides)
    settings, decoder = spec.training.optimizer, Decoder(spec.model, VOCABULARY)
    initialise(decoder, spec.training.seed)
    decoder.to(dtype)
    norms = [parameter for name, parameter in decoder.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in decoder.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True,
    )  # fmt: skip
    curve: list[Any] = []
    half = spec.training.precision == "fp16"
    scaler = torch.amp.GradScaler(
        "cpu", 2.0**spec.training.loss_scale.initial_power, growth_interval=spec.training.loss_scale.growth_interval,
        enabled=half,
    )  # fmt: skip
    for step in range(STEPS):
        rows = global_batch(step, ignored)
        count, total = (rows[:, 1:] & UNCOUNTED == 0).sum().to(dtype), torch.zeros((), dtype=dtype)
        for part in rows.split(micro_batch):
            tokens, targets = part[:, :-1] & ID, part[:, 1:].clone()
            targets[targets & UNCOUNTED != 0] = IGNORED
            documents = Segments.of_documents(document_ids(tokens, END)) if spec.data.document_masks else None
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = decoder(tokens, targets, documents, reduction="sum")
            scaler.scale(loss * (1 / count)).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), spec.training.clip_norm or float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        curve.append((float(total / count), float(norm)))
    return [curve, {name: parameter.detach() for name, parameter in decoder.named_parameters()}]


def _engine_steps(rank: int, size: int, folder: Path, runs: list[tuple[str, ...]], ignored: bool) -> list[Steps]:
    join_exactly(folder, rank, size, always=any("=zero" in field for run in runs for field in run))
    specs = [tiny_assignment(*overrides, f"parallel.processes={size}") for overrides in runs]
    batches = [global_batch(step, ignored) for step in range(STEPS)]
    return [steps_of(started(spec, END), spec, rank, size, batches, RATE) for spec in specs]


def check(results: list[Any], run: int, expected: list[Any], relative: float) -> None:
    """Losses and norms on every rank, and every saved box, against the reference."""
    for rank in results:
        curve, boxes = rank[run]
        torch.testing.assert_close(curve, expected[0], rtol=relative, atol=0)
        for name, offset, array in boxes:
            data = torch.from_numpy(array)
            place = tuple(slice(low, low + size) for low, size in zip(offset, data.shape, strict=True))
            torch.testing.assert_close(data.double(), expected[1][name][place].double(), rtol=0, atol=relative * 30)


def test_one_process_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    """In fp16, the loop uses torch's gradient scaler. Its first scales overflow, and later the scale grows again."""
    half = ("training.precision=fp16", "training.loss_scale.initial_power=21", "training.loss_scale.growth_interval=1")
    runs = [("training.micro_batch=2", *precision) for precision in ((), half)]
    (results,) = in_ranks(1, _engine_steps, tmp_path / "r", runs, False, seconds=200)
    for overrides, (curve, boxes) in zip(runs, results, strict=True):
        losses, weights = reference(*overrides, ignored=False, micro_batch=2, dtype=torch.float32)
        assert {name for name, _, _ in boxes} == weights.keys()
        np.testing.assert_array_equal(curve, losses)
        for name, _, array in boxes:
            assert torch.equal(torch.from_numpy(array), weights[name]), name
    norms = [norm for _, norm in results[1][0]]
    assert not np.isfinite(norms[0])
    assert np.isfinite(norms).any()


@pytest.mark.slow
def test_every_engine_divides_by_the_tokens_that_count_wherever_they_lie(tmp_path: Path) -> None:
    runs = [(f"parallel.strategy={strategy}", "training.micro_batch=1") for strategy in STRATEGIES]
    runs.append(("training.micro_batch=2", "data.document_masks=true"))
    results = in_ranks(2, _engine_steps, tmp_path / "r", runs, True, seconds=300)
    for run, overrides in enumerate(runs):
        check(results, run, reference(*overrides), 1e-5)


def test_streams_of_randomness_differ_by_everything_that_names_them() -> None:
    seeds = [stream_seed(*parts) for parts in ((0, "s", 1), (1, "s", 1), (0, "t", 1), (0, "s", 2), (0, "s", 1, 1))]
    assert len(set(seeds)) == len(seeds)
    assert stream_seed(0, "s", 1) == seeds[0]
