"""Compressed gradients: the same bits after a restart, an error that is part of the state, and a model that learns."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import open_checkpoint, read_manifest
from holdfast.dataset.vocabulary import ID, UNCOUNTED
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine
from holdfast.engines.torch.compression import largest
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder, document_ids
from holdfast.model.initialise import initialise
from holdfast.model.token_logprobs import IGNORED
from holdfast.spec import Spec
from holdfast.store import Store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, identity_of, join, started, train_in_ranks, trained
from tests.train.test_reference import RATE, STEPS, global_batch
from tests.train.tiny_run import VOCABULARY, new_store, tiny_assignment, tiny_spec

Seen = list[tuple[float, float]]  # the loss and the gradient norm of each step


def spec_of(kind: str) -> tuple[str, ...]:
    return (
        f"training.gradient_compression={kind}", "training.powersgd_rank=2", "training.topk_fraction=0.1",
        "parallel.processes=2",
    )  # fmt: skip


def train(store: Store, folder: Path, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """Train with each kind, with and without a restart. Returns the losses by kind. Restarts must not
    change anything.
    """
    small = ("parallel.bucket_mib=0.01",)  # several buckets
    runs: Runs = [(spec_of("none"), "whole", None)]
    for kind in kinds:
        changes = (*spec_of(kind), *small)
        runs += [(changes, "whole", None), (changes, "left", 5), (changes, "left", None)]
    assert train_in_ranks(2, store.url, folder, runs) == ["", *["", "PreemptedError", ""] * len(kinds)]
    for kind in kinds:
        assert trained(store, tiny_spec(*spec_of(kind)), "left") == trained(store, tiny_spec(*spec_of(kind)), "whole")
    identities = {kind: identity_of(tiny_spec(*spec_of(kind)), "whole") for kind in ("none", *kinds)}
    return {kind: [row["loss"] for row in read_history(store, identity)] for kind, identity in identities.items()}


def one_alone(kind: str) -> Runs:
    """A single rank, which compresses nothing, resumes from the checkpoint of two."""
    return [((*spec_of(kind), "parallel.processes=1"), "whole", None)]


@pytest.mark.slow
def test_the_compression_error_of_gradients_is_part_of_the_state(tmp_path: Path) -> None:
    store, kinds = new_store(tmp_path / "store"), ("powersgd", "topk")
    losses = train(store, tmp_path / "ranks", kinds)
    for kind in kinds:
        assert losses[kind] != losses["none"]
        assert losses[kind][-1] < losses[kind][0]
        checkpoint = open_checkpoint(store, identity_of(tiny_spec(*spec_of(kind)), "whole"), 12)
        error = checkpoint.tensor("compression.error.model.embed_tokens.weight")
        assert error.shape == (2, VOCABULARY, 32)
        assert not torch.equal(error[0], error[1])  # each rank has its own
        assert "compression.error.model.norm.weight" in checkpoint.tensors
        assert train_in_ranks(1, store.url, tmp_path / kind, one_alone(kind), replan=True) == ["UnfitError"]
        if kind == "topk":
            # Elements that were sent in the last step.
            assert (error == 0).sum(dim=(1, 2)).min() >= 0.1 * VOCABULARY * 32


def test_compression_state_is_unchanged_until_the_step_announces_a_change(tmp_path: Path) -> None:
    for is_whole in in_ranks(2, _errors_of, tmp_path / "meeting", seconds=200):
        assert is_whole == {"powersgd": (True, False), "topk": (True, False)}


def _errors_of(rank: int, size: int, folder: Path) -> dict[str, tuple[bool, bool]]:
    """By kind: whether the state of step 1 was whole at the step's first announcement of a change, and
    after that step.
    """
    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    results = {}
    for kind in ("powersgd", "topk"):
        engine = started(tiny_assignment(*spec_of(kind)))
        engine.step(global_batch(0).chunk(size)[rank], RATE)
        saved = {box.name: box.data.clone() for box in engine.saved()}

        def whole(engine: Engine = engine, saved: dict[str, Tensor] = saved) -> bool:
            return all(torch.equal(box.data, saved[box.name]) for box in engine.saved())

        whole_before: list[bool] = []
        engine.step(global_batch(1).chunk(size)[rank], RATE, lambda: whole_before.append(whole()))  # noqa: B023
        results[kind] = (whole_before[0], whole())
    return results


@pytest.mark.parametrize(
    ("elements", "count", "places"),
    [
        ([1.0, -3.0, 2.0, 0.0], 2, [1, 2]),
        ([2.0, -2.0, 1.0, 2.0, -2.0], 3, [0, 1, 3]),  # the first ones in order
        ([1.0, 3.0, -1.0, 1.0], 3, [0, 1, 2]),
        ([0.0, 0.0, 0.0], 1, [0]),
        ([1.0, float("nan"), 5.0, float("-inf"), float("nan")], 2, [1, 3]),  # all ranks see an overflow
        ([4.0, 5.0], 2, [0, 1]),
    ],
)
def test_the_largest_elements_are_chosen_and_the_first_of_equal_ones(
    elements: list[float], count: int, places: list[int]
) -> None:
    assert largest(torch.tensor(elements), count).tolist() == places


@pytest.mark.slow
def test_every_kind_has_the_bits_of_plain_arithmetic(tmp_path: Path) -> None:
    """Half precision: each rank's gradient is rounded, and the mean is computed in that precision. Thin matrices: the
    reference is torch's own hook in a plain loop, also for matrices that are thicker than wide and sent whole. Their
    first step has the bits of no compression. Later, the hook adds each rank's difference from the mean, whose sum is
    zero except for rounding. Largest elements: chosen by sorting. If all of them are sent, every step has the bits of
    no compression.
    """
    for curves, plain in in_ranks(2, _steps, tmp_path / "meeting", seconds=200):
        assert curves == plain
        assert curves["thick"][0] == curves["none"][0] != curves["powersgd"][0]
        assert curves["all"] == curves["none"]
        assert len({str(curves[name]) for name in KINDS if name not in ("thick", "all")}) == len(KINDS) - 2


KINDS = {
    "none": spec_of("none"),
    "fp16": spec_of("fp16"),
    "bf16": spec_of("bf16"),
    "powersgd": spec_of("powersgd"),
    "topk": spec_of("topk"),
    "all": (*spec_of("topk"), "training.topk_fraction=1"),
    "thick": (*spec_of("powersgd"), "training.powersgd_rank=1024"),
}


def _steps(rank: int, size: int, folder: Path) -> tuple[dict[str, Seen], dict[str, Seen]]:
    """Losses and norms of some steps with each kind, from the engine and from a plain loop."""
    from holdfast.rank.randomness import make_deterministic

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    make_deterministic("exact", 1)
    curves = {name: _engine_steps(tiny_assignment(*fields), rank, size) for name, fields in KINDS.items()}
    return curves, {name: _plain_steps(tiny_spec(*fields), rank, size) for name, fields in KINDS.items()}


def _engine_steps(spec: Assignment, rank: int, size: int) -> Seen:
    engine, curve = started(spec), []
    for step in range(STEPS):
        torch.manual_seed(step)
        output = engine.step(global_batch(step).chunk(size)[rank], RATE)
        curve.append((float(output.loss), float(output.grad_norm)))
    return curve


def _plain_steps(spec: Spec, rank: int, size: int) -> Seen:
    decoder, kind = Decoder(spec.model, VOCABULARY), spec.training.gradient_compression
    initialise(decoder, spec.training.seed)
    replica: torch.nn.Module = decoder
    hook = PowerSGDState(None, spec.training.powersgd_rank, 2, orthogonalization_epsilon=1e-8)
    hook.iter = 2
    if kind == "powersgd":
        replica = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
        replica.register_comm_hook(hook, powerSGD_hook)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in decoder.named_parameters():
        groups["norm" in name].append(parameter)
    decays = ((groups[False], spec.training.optimizer.weight_decay), (groups[True], 0.0))
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays],
        lr=RATE, betas=(spec.training.optimizer.beta1, spec.training.optimizer.beta2),
        eps=spec.training.optimizer.epsilon, fused=True,
    )  # fmt: skip
    for _ in range(2 * (kind == "powersgd")):  # DDP rebuilds its buckets after the first pass
        for buffers in (hook.error_dict, hook.p_memory_dict, hook.q_memory_dict):
            buffers.clear()
        replica(*_pairs(torch.zeros(2, 17, dtype=torch.int64)), None, reduction="sum").backward()
        optimizer.zero_grad()
    for left_out in hook.error_dict.values():
        left_out.zero_()
    errors = [np.zeros(parameter.shape, np.float32) for parameter in decoder.parameters()]
    return [_plain_step(replica, hook, errors, optimizer, spec, step, rank, size) for step in range(STEPS)]


def _plain_step(
    replica: Any, hook: PowerSGDState, errors: list[np.ndarray], optimizer: Any, spec: Spec, step: int, rank: int,
    size: int,
) -> tuple[float, float]:  # fmt: skip
    torch.manual_seed(step)
    hook.rng = np.random.RandomState(step)
    hook.p_memory_dict.clear()
    hook.q_memory_dict.clear()
    rows, total = global_batch(step), torch.zeros(())
    count = (rows[:, 1:] & UNCOUNTED == 0).sum().float()
    parts = [_pairs(part) for part in rows.chunk(size)[rank].split(spec.training.micro_batch)]
    for number, (tokens, targets) in enumerate(parts, 1):
        documents = Segments.of_documents(document_ids(tokens, 0)) if spec.data.document_masks else None
        alone = number < len(parts) and isinstance(replica, DistributedDataParallel)
        with replica.no_sync() if alone else nullcontext():
            loss = replica(tokens, targets, documents, reduction="sum")
            (loss * (size / count)).backward()
        total += loss.detach()
    parameters = list(replica.parameters())
    if spec.training.gradient_compression == "topk":
        for parameter, error in zip(parameters, errors, strict=True):
            parameter.grad = _largest_of_all(parameter.grad, error, spec.training.topk_fraction, size)
    elif not isinstance(replica, DistributedDataParallel):
        dtype = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}.get(spec.training.gradient_compression, "float"))
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.to(dtype) / size
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient)
    dist.all_reduce(total)
    assert spec.training.clip_norm is not None
    norm = torch.nn.utils.clip_grad_norm_(parameters, spec.training.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(total / count), float(norm)


def _largest_of_all(gradient: Tensor, error: np.ndarray, fraction: float, size: int) -> Tensor:
    """The mean of what each rank sends, as a dense tensor. The rest stays in `error`."""
    error += gradient.numpy() / np.float32(size)
    flat = error.reshape(-1)
    order = sorted(range(flat.size), key=lambda place: (-abs(flat[place]), place))
    sparse = np.zeros_like(flat)
    chosen = order[: int(np.ceil(fraction * flat.size))]
    sparse[chosen] = flat[chosen]
    flat[chosen] = 0
    of_all = [torch.empty(flat.size) for _ in range(size)]
    dist.all_gather(of_all, torch.from_numpy(sparse))
    return torch.stack(of_all).sum(0).view_as(gradient)


def _pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    targets = rows[:, 1:].clone()
    targets[targets & UNCOUNTED != 0] = IGNORED
    return rows[:, :-1] & ID, targets


@pytest.mark.drill
def test_half_as_many_bits_leave_nothing_behind(tmp_path: Path) -> None:
    store, kinds = new_store(tmp_path / "store"), ("fp16", "bf16")
    losses = train(store, tmp_path / "ranks", kinds)
    for kind in kinds:
        assert losses[kind] != losses["none"]
        names = read_manifest(store, identity_of(tiny_spec(*spec_of(kind)), "whole"), 12).tensors
        assert not [name for name in names if name.startswith("compression.")]
