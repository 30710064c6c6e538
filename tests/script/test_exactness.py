"""A verification names what a script forgot to save, or draws without a seed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint import Attempt, Checkpointer, Retention
from holdfast.collectives import Gang
from holdfast.components.train.exactness import Exactness, compare_runs
from holdfast.pipelines.cli import app
from holdfast.pipelines.paths import load_spec
from holdfast.script.seeding import key_fetches
from holdfast.script.state import ScriptState
from holdfast.spec import ExitCode
from holdfast.spec.errors import NotExactError
from tests.checkpoint.saving import DESCRIBE, opened
from tests.script.launched import run_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"


def loop(fault: str = "") -> None:
    """A loop with an average of its loss and one fault."""
    session = holdfast.session(seed=3)
    model, average = nn.Linear(4, 4), {"loss": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {} if fault == "forgotten" else {"average": average}
    for step in range(session.restore(model=model, optimizer=optimizer, steps=6, **kept), 6):
        inputs = torch.randn(2, 4)
        if fault == "unseeded":
            inputs += int.from_bytes(os.urandom(2), "little") / 1e4
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average["loss"] = 0.5 * average["loss"] + loss.item()
        session.step(step + 1, loss=loss, average=average["loss"])


class Noisy(Dataset[tuple[float, ...]]):
    """Samples that draw from each global generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_fetch_draws_by_its_samples_and_leaves_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MapDatasetFetcher, "fetch", _MapDatasetFetcher.fetch)
    monkeypatch.setattr(_IterableDatasetFetcher, "fetch", _IterableDatasetFetcher.fetch)
    epoch = 1
    key_fetches(5, lambda: epoch, 0)

    def drawn(order: list[int]) -> list[tuple[float, ...]]:
        own = torch.Generator()  # of the loader itself
        return sorted(DataLoader(Noisy(), sampler=order, batch_size=1, collate_fn=lambda rows: rows[0], generator=own))

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = drawn([0, 1, 2, 3])
    assert drawn([2, 0, 3, 1]) == first
    assert len({value for row in first for value in row[1:]}) == 12
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    epoch = 2
    assert drawn([0, 1, 2, 3]) != first


def verified(url: str, fault: str) -> Exactness:
    """Compare a calm run with one that stops at step 3."""
    for run, stops in (("calm", [6]), ("stopped", [3, 6])):
        for stop_at in stops:
            run_script(url, run, loop, fault, stop_at=stop_at)
    return compare_runs(opened(url), "calm", "stopped", 6, 3)


def test_an_exact_script_is_equal_in_metrics_and_state(tmp_path: Path) -> None:
    result = verified(f"file://{tmp_path}", "")
    assert result == Exactness(6, 3)
    result.require()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("forgotten", r"metrics: average of step 4 \(after the resume\)\. Give session\.restore every object"),
        ("unseeded", r"loss of step 1 \(before the stop\).*values: average\.loss: .*tensors: model/bias, model/weight"),
    ],
)
def test_a_difference_is_named(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(NotExactError, match=message):
        verified(f"file://{tmp_path}", fault).require()


@pytest.mark.slow  # three launches of two ranks
def test_a_difference_in_the_state_of_one_rank_is_named(tmp_path: Path) -> None:
    store, gang = opened(f"file://{tmp_path}"), Gang()
    for run, position in (("calm", 4), ("stopped", 3)):
        state = ScriptState({"shared": {"a": 1}}, {"loader": {"position": position}}, gang)
        writer = Checkpointer(store, Attempt(run, 1), Retention(9), describe=DESCRIBE, gang=gang)
        writer.save(8, state.saved(state.live()), {})
        writer.wait()
    assert compare_runs(store, "calm", "stopped", 8, 4).values == ("loader.position: 4 and 3",)


def test_the_example_of_a_bare_loop_is_exact() -> None:
    result = CliRunner().invoke(app, ["verify", str(EXAMPLES / "loop" / "spec.yaml"), "--steps", "4"])
    assert result.exit_code == ExitCode.OK, result.output
    assert "resumed at step 2, equal at step 4" in result.output


def test_init_writes_a_spec_for_a_script_and_shows_the_lines_to_add(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text("import torch\nraise SystemExit('it is not imported')\n")
    result = CliRunner().invoke(app, ["init", str(script), "--processes", "2"])
    assert result.exit_code == 0, result.output
    assert "session = holdfast.session(seed=0)" in result.output
    spec = load_spec(folder / "spec.yaml")
    assert (spec.name, spec.train.script, spec.parallel.processes) == ("my-model", "train.py", 2)
    assert spec.code is not None
    again = CliRunner().invoke(app, ["init", str(script)])
    assert again.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["loop", "transformers", "lightning", "accelerate", "trl"])
def test_the_examples_have_valid_specs(name: str) -> None:
    assert load_spec(EXAMPLES / name / "spec.yaml").train.script == "train.py"
