"""Optimizers of user code: state by parameter name, exact resumption, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import open_checkpoint
from holdfast.code import resolve
from holdfast.code.closure import role_digest
from holdfast.code.resolve import resolve_code
from holdfast.engines.torch.own_optimizer import own_optimizer
from holdfast.engines.weights import state_prefix
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import SpecError, UserCodeError
from holdfast.spec.functions import Function
from tests.code.runs import calm_and_killed
from tests.train.ranks import identity_of
from tests.train.tiny_run import tiny_spec

LION = """
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, beta=0.9):
        super().__init__(groups, {"lr": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                direction = (0.9 * average + 0.1 * parameter.grad).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                average.mul_(group["beta"]).add_(parameter.grad, alpha=1 - group["beta"])


def lion(groups, *, beta=0.9):
    return Lion(groups, beta)
"""


def with_optimizer(folder: Path, code: str = LION, **changes: Any) -> Spec:
    """The tiny run with an optimizer of `code`."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    tree = tiny_spec().model_dump(exclude_unset=True)
    tree["training"]["optimizer"] = {"learning_rate": 0.003, "build": {"use": "mine.py:lion", "beta": 0.8}}
    for field, value in changes.items():
        section, _, name = field.partition("__")
        tree.setdefault(section, {})[name] = value
    return resolve_code(Spec.model_validate(tree), folder)


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "ddp"), *(pytest.param(2, each, marks=pytest.mark.drill) for each in ("ddp", "fsdp"))]
)
def test_a_training_that_was_killed_has_the_bits_of_one_that_was_not(tmp_path: Path, ranks: int, strategy: str) -> None:
    spec = with_optimizer(tmp_path / "code", parallel__processes=ranks, parallel__strategy=strategy)
    store, calm, killed = calm_and_killed(spec, tmp_path, ranks)
    assert len(calm["history"]) == 12
    assert calm == killed
    names = open_checkpoint(store, identity_of(spec), 12).tensors
    averages = {name for name in names if name.startswith(state_prefix("average"))}
    assert averages == {state_prefix("average") + name for name in names if not name.startswith("optimizer.")}


def test_the_run_id_follows_the_source_and_the_arguments(tmp_path: Path) -> None:
    spec = with_optimizer(tmp_path / "one")
    changed = with_optimizer(tmp_path / "two", LION.replace("0.1 *", "0.2 *"))
    commented = with_optimizer(tmp_path / "three", f"{LION}\n\ndef unused():\n    pass\n")
    same = run_id(spec, "0" * 16)
    assert run_id(commented, "0" * 16) == same != run_id(changed, "0" * 16)
    assert run_id(spec.with_overrides({"training.optimizer.build.beta": 0.7}), "0" * 16) != same


REFUSED = {
    "return 7": r"returned int; return a torch.optim.Optimizer",
    "raise ValueError('no')": r"failed: ValueError: no",
    "return torch.optim.SGD(groups[0]['params'][:1], lr=0.1)": r"its optimizer has other parameters than the groups",
    "return torch.optim.SGD([p for g in groups for p in g['params']], lr=0.1)": r"its groups lack rate_factor",
    "return torch.optim.Adafactor(groups)": r"state 'row_var' of weight: has the shape .* no layout can divide it",
    "return torch.optim.Rprop(groups)": r"state 'step_size' of weight: is not 0 after a step with zero gradients",
    "return Counting(groups)": r"a step changes 'k' of its groups, which is not saved",
    "return Plain(groups)": r"state 'step' of weight: is int, which is not saved",
    "return torch.optim.SGD(groups, lr=0.1, momentum=0.9)": "",
    "return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)": "",
    "return torch.optim.NAdam(groups)": r"state 'mu_product' of weight: has the shape \[\]",
}
COUNTING = """
import torch

class Counting(torch.optim.SGD):
    def step(self):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1

class Plain(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = 1

def lion(groups):
    """


@pytest.mark.parametrize("body", REFUSED)
def test_state_that_a_checkpoint_could_not_hold_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    code = COUNTING + body + "\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setattr(resolve, "_entered", [tmp_path])
    function = Function(use="mine.py:lion", digest=role_digest({"mine.py": code}, "mine.py:lion"))
    named = [("weight", nn.Parameter(torch.randn(4, 3))), ("bias", nn.Parameter(torch.randn(3)))]
    groups = [{"params": [parameter], "weight_decay": 0.1, "rate_factor": 1.0} for _, parameter in named]
    if not REFUSED[body]:
        state = own_optimizer(function, named, groups).state[named[0][1]]
        assert all(not value.any() for value in state.values())
        assert named[0][1].grad is None
        return
    with pytest.raises(UserCodeError, match=f"mine.py:lion: {REFUSED[body]}"):
        own_optimizer(function, named, groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__strategy": "zero3"}, r"training.optimizer.build: is not supported with parallel.strategy: zero3"),
        ({"parallel__processes": 2, "parallel__tensor": 2}, r"is not supported with parallel.tensor: 2"),
        ({"training__determinism": "elastic"}, r"is not supported with training.determinism: elastic"),
    ],
)
def test_a_layout_that_cannot_run_it_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    spec = with_optimizer(tmp_path / "code")
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(SpecError, match=message):
        spec.with_overrides(fields)


def test_settings_of_built_in_optimizers_are_refused(tmp_path: Path) -> None:
    spec = with_optimizer(tmp_path / "code")
    with pytest.raises(SpecError, match=r"training.optimizer.beta1: is not used by training.optimizer.build"):
        spec.with_overrides({"training.optimizer.beta1": 0.5})
