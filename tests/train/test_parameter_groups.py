"""Parameter groups by name, and the average of the weights: at every layout, over interruptions."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.engines.groups import require_groups
from holdfast.engines.torch.averaging import AveragedWeights
from holdfast.engines.torch.optimizers import optimizer_of, set_rate, update
from holdfast.exchange.hugging_face import averaged_rows
from holdfast.spec import SpecError
from holdfast.store import Store
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.tiny_run import VOCABULARY, new_store, tiny_spec

FROZEN = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
GROUPS = (
    "training.optimizer.groups=[{match: 'model.embed_tokens.*', frozen: true}, "
    "{match: 'model.layers.0.mlp.up_proj.weight', frozen: true}, "
    "{match: '*.mlp.*', rate_factor: 0.5, weight_decay: 0}, {match: '*norm.weight', weight_decay: 0.5}]"
)
EMA = "training.ema.decay=0.75"


def test_each_group_is_an_adamw_with_its_own_rate_and_decay() -> None:
    settings = tiny_spec(GROUPS).training.optimizer
    names = ("a.mlp.b", "model.norm.weight", "other", "bias")
    shapes = ((3, 5), (5,), (5, 3), (5,))
    expected = {"a.mlp.b": (0.005, 0.0), "model.norm.weight": (0.01, 0.5), "other": (0.01, 0.1), "bias": (0.01, 0.0)}
    noise = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=noise) for name, shape in zip(names, shapes, strict=True)}
    ours = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = optimizer_of(ours.items(), settings, anywhere=False, rows=None)
    for name, (rate, decay) in expected.items():
        theirs = torch.nn.Parameter(weights[name].clone())
        ours[name].grad, theirs.grad = torch.ones_like(theirs), torch.ones_like(theirs)
        torch.optim.AdamW([theirs], rate, (0.9, 0.95), weight_decay=decay, fused=True).step()
        weights[name] = theirs.detach()
    set_rate(optimizer, 0.01)
    update(optimizer, None)
    assert {name: torch.equal(ours[name], weights[name]) for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: '*.nothing', frozen: true}]", "matches no trained parameter"),
        ("[{match: '*', rate_factor: 2}, {match: '*.mlp.*', frozen: true}]", "has only parameters of earlier groups"),
        ("[{match: '*', frozen: true}]", "leaves no parameter to train"),
    ],
)
def test_a_group_without_parameters_is_refused(groups: str, message: str) -> None:
    spec = tiny_spec(f"training.optimizer.groups={groups}")
    with pytest.raises(SpecError, match=message):
        require_groups(spec.model, VOCABULARY, spec.training)
    spec = tiny_spec(GROUPS)
    require_groups(spec.model, VOCABULARY, spec.training)


def test_an_average_follows_its_formula_and_a_held_update_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.tensor([4.0, 8.0]))
    average = AveragedWeights([("w", weight)], 0.75)
    average["w"].copy_(torch.tensor([0.0, 8.0]))
    average.update(None)
    assert average["w"].tolist() == [1.0, 8.0]
    average.update(torch.ones(()))
    assert average["w"].tolist() == [1.0, 8.0]
    average.update(torch.zeros(()))
    assert average["w"].tolist() == [1.75, 8.0]


def overrides_of(ranks: int, *more: str) -> tuple[str, ...]:
    return (
        GROUPS, EMA, "training.determinism=elastic", f"parallel.processes={ranks}", "training.steps=4",
        "checkpoint.every_steps=1", "checkpoint.keep_last=4", *more,
    )  # fmt: skip


def _weights(store: Store, spec: Any, salt: str, step: int) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(store, identity_of(spec, salt), step)
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


@pytest.mark.slow
def test_frozen_parameters_and_averages_are_state_and_no_layout_or_interruption_shows(tmp_path: Path) -> None:
    store, strategies = new_store(tmp_path / "store"), ("ddp", "fsdp")
    for ranks, salt, stop in ((1, "one", None), (3, "several", 2), (2, "several", None)):
        runs: Runs = [
            (overrides_of(ranks, f"parallel.strategy={strategy}"), f"{strategy} {salt}", stop)
            for strategy in strategies
        ]
        endings = train_in_ranks(ranks, store.url, tmp_path / f"{ranks} {salt}", runs)
        assert endings == ["" if stop is None else "PreemptedError"] * len(runs)
    for strategy in strategies:
        spec = tiny_spec(*overrides_of(1, f"parallel.strategy={strategy}"))
        assert trained(store, spec, f"{strategy} one") == trained(store, spec, f"{strategy} several")
        states = [_weights(store, spec, f"{strategy} several", step) for step in (1, 2, 3, 4)]
        for before, after in pairwise(states):
            for name in FROZEN:
                assert torch.equal(before[name], after[name])
                assert not {f"optimizer.exp_avg.{name}", f"ema.{name}"} & after.keys()
            for name, average in before.items():
                if name.startswith("ema."):
                    weight = after[name.removeprefix("ema.")]
                    assert torch.equal(after[name], average * 0.75 + weight * 0.25), name
                    assert not torch.equal(after[name], weight)
        assert {name.removeprefix("ema.") for name in states[0] if name.startswith("ema.")} == {
            name.removeprefix("optimizer.exp_avg.") for name in states[0] if name.startswith("optimizer.exp_avg.")
        }
        checkpoint = open_checkpoint(store, identity_of(spec, f"{strategy} one"), 4)
        rows, norm = averaged_rows(checkpoint), "model.norm.weight"
        assert torch.equal(torch.cat(list(rows(norm))), states[-1][f"ema.{norm}"])
        assert torch.equal(torch.cat(list(rows(FROZEN[0]))), states[-1][FROZEN[0]])


@pytest.mark.slow
def test_shards_of_a_tensor_mesh_keep_the_average_of_whole_weights(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    more = (
        "training.determinism=exact", "parallel.tensor=2", "model.family=mixtral", "model.experts=4", "model.ffn=24",
        "parallel.expert=2",
        "training.optimizer.groups=[{match: 'model.layers.0.*', frozen: true}]",
    )  # fmt: skip
    overrides = overrides_of(2, *more)
    assert train_in_ranks(2, store.url, tmp_path / "ranks", [(overrides, "", None)]) == [""]
    before, after = (_weights(store, tiny_spec(*overrides), "", step) for step in (3, 4))
    averages = [name for name in after if name.startswith("ema.")]
    assert averages
    for name in averages:
        assert torch.equal(after[name], before[name] * 0.75 + after[name.removeprefix("ema.")] * 0.25), name
    frozen = [name for name in after if name.startswith("model.layers.0.")]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
