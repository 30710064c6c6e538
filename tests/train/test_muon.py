"""Muon: the iterations and the first step are those of torch.optim.Muon, and no layout or interruption shows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import _muon

from holdfast.engines.layout import TensorLayout, like
from holdfast.engines.torch.muon import orthogonalized
from holdfast.engines.torch.optimizers import optimizer_of, set_rate, update
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, join_exactly, started, train_in_ranks, trained
from tests.train.test_reference import END, RATE
from tests.train.tiny_run import new_store, tiny_assignment, tiny_spec

MUON = "training.optimizer.kind=muon"
MIXTURE = ("model.family=mixtral", "model.experts=4", "model.ffn=24")
NAME = "model.layers.0.mlp.up_proj.weight"


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_the_iterations_have_the_bits_of_torch(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    theirs = _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalized(matrix, 5), theirs)
    singular = torch.linalg.svdvals(orthogonalized(matrix, 5).float())
    assert 0.5 < singular.min() < singular.max() < 1.5


@pytest.mark.parametrize("scaling", ["match_rms_adamw", "original"])
def test_steps_are_those_of_torch_to_the_last_bits(scaling: str) -> None:
    settings = tiny_spec(MUON, f"training.optimizer.muon.scaling={scaling}").training.optimizer
    ours, theirs = (torch.nn.Parameter(noise(40, 24)) for _ in range(2))
    optimizer = optimizer_of([(NAME, ours)], settings, anywhere=False, rows=None)
    reference = torch.optim.Muon([theirs], 0.01, weight_decay=0.1, adjust_lr_fn=scaling)
    set_rate(optimizer, 0.01)
    for step in range(3):
        ours.grad = noise(40, 24, seed=step + 2)
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone()
        update(optimizer, None)
        reference.step()
        # An update has 0.2 for most elements; the bits of bf16 that a last bit of the momentum changes are 1% of it.
        assert (ours - theirs).abs().max() < 0.02 * (ours - before).abs().max()
    before = ours.detach().clone()
    update(optimizer, torch.ones(()))
    assert torch.equal(ours, before)


def test_experts_are_matrices_of_their_own_and_the_rest_is_adamw() -> None:
    settings = tiny_spec(MUON, "training.optimizer.groups=[{match: '*.gate.weight', adamw: true}]").training.optimizer
    names = (
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.gate.weight",
        "lm_head.weight",
        "n.norm.weight",
    )
    shapes = ((4 * 6, 8), (4, 8), (10, 8), (8,))
    ours = {name: torch.nn.Parameter(noise(*shape)) for name, shape in zip(names, shapes, strict=True)}
    optimizer = optimizer_of(ours.items(), settings, anywhere=False, rows=None, experts=4)
    set_rate(optimizer, 0.01)
    single = [torch.nn.Parameter(part.clone()) for part in ours[names[0]].detach().chunk(4)]
    lone = [optimizer_of([(NAME, part)], settings, anywhere=False, rows=None) for part in single]
    plain = {name: torch.nn.Parameter(ours[name].detach().clone()) for name in names[1:]}
    for name in names:
        ours[name].grad = noise(*ours[name].shape, seed=5)
    gradient = ours[names[0]].grad
    assert gradient is not None
    for part, own, piece in zip(single, lone, gradient.chunk(4), strict=True):
        part.grad = piece.clone()
        set_rate(own, 0.01)
        update(own, None)
    for parameter in plain.values():
        parameter.grad = noise(*parameter.shape, seed=5)
        decay = 0.0 if parameter.dim() == 1 else 0.1
        torch.optim.AdamW([parameter], 0.01, (0.9, 0.95), weight_decay=decay, foreach=True).step()
    update(optimizer, None)
    assert torch.equal(ours[names[0]], torch.cat(list(single)))
    assert {name: torch.equal(ours[name], plain[name]) for name in plain} == dict.fromkeys(plain, True)


def _update_in_ranks(
    rank: int, size: int, folder: Path, runs: list[tuple[str, ...]]
) -> list[list[tuple[str, tuple[int, ...], Any]]]:
    """This rank's boxes after two updates by the same whole gradients, for each run."""
    join_exactly(folder, rank, size, always=False)
    results = []
    for overrides in runs:
        engine: Any = started(tiny_assignment(MUON, *overrides, f"parallel.processes={size}"), END)
        for step in range(2):
            for index, (name, parameter) in enumerate(engine._trained.named()):
                whole = noise(*parameter.shape, seed=100 * step + index)
                offset, shape = TensorLayout.of(name, parameter).part()
                place = tuple(slice(low, low + length) for low, length in zip(offset, shape, strict=True))
                parameter.grad = like(parameter, whole[place].clone())
            set_rate(engine._optimizer, RATE)
            update(engine._optimizer, None)
        results.append([(box.name, box.offset, box.data.numpy().copy()) for box in engine.boxes()])
    return results


@pytest.mark.slow
def test_parts_of_matrices_and_distributed_experts_take_the_bits_of_whole_ones(tmp_path: Path) -> None:
    runs = [
        ("parallel.strategy=fsdp",),
        ("parallel.tensor=2",),
        (*MIXTURE, "parallel.tensor=2", "parallel.expert=2"),
        (*MIXTURE, "parallel.expert=2"),
    ]
    parts = in_ranks(2, _update_in_ranks, tmp_path / "two", runs, seconds=300)
    (alone,) = in_ranks(1, _update_in_ranks, tmp_path / "one", [(), (), MIXTURE, MIXTURE], seconds=300)
    for run, boxes in enumerate(alone):
        whole = {name: array for name, _, array in boxes}
        assert any("momentum_buffer" in name for name in whole)
        for name, offset, part in (box for ranks in parts for box in ranks[run]):
            place = tuple(slice(low, low + size) for low, size in zip(offset, part.shape, strict=True))
            assert (whole[name][place] == part).all(), (runs[run], name)


def overrides_of(ranks: int, strategy: str, *more: str) -> tuple[str, ...]:
    return (
        MUON, "training.determinism=elastic", f"parallel.strategy={strategy}", f"parallel.processes={ranks}",
        "training.steps=4", *more,
    )  # fmt: skip


@pytest.mark.slow
def test_no_number_of_ranks_shows_under_elastic_determinism_and_no_interruption(tmp_path: Path) -> None:
    store, kinds = new_store(tmp_path / "store"), [("ddp", *MIXTURE), ("fsdp",), ("fsdp", *MIXTURE)]
    for ranks, salt, stop in ((1, "one", None), (3, "several", 2), (2, "several", None)):
        runs: Runs = [
            (overrides_of(ranks, strategy, *more), f"{strategy} {len(more)} {salt}", stop) for strategy, *more in kinds
        ]
        endings = train_in_ranks(ranks, store.url, tmp_path / f"{ranks} {salt}", runs)
        assert endings == ["" if stop is None else "PreemptedError"] * len(runs)
    for strategy, *more in kinds:
        spec, name = tiny_spec(*overrides_of(1, strategy, *more)), f"{strategy} {len(more)}"
        assert trained(store, spec, f"{name} one") == trained(store, spec, f"{name} several")
