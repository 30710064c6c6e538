"""A verification names what a script forgot to save, or draws without a seed."""

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
from holdfast.code.resolve import publish_code
from holdfast.collectives import Gang
from holdfast.components.train.exactness import compare_runs, require_verified, stops_of, verification_key
from holdfast.components.train.script import train_script
from holdfast.launch.launches import newest_launch
from holdfast.pages import draw_training
from holdfast.pipelines.cli import app
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.view.catalog import find_run
from holdfast.pipelines.view.report import print_run
from holdfast.rank.randomness import seed_torch
from holdfast.runtime.exits import code_of
from holdfast.script.seeding import key_fetches
from holdfast.script.state import ScriptState
from holdfast.script.tree import StateError
from holdfast.spec import ExitCode, Spec, parse_spec, run_id
from holdfast.spec.errors import HoldfastError, NotExactError
from holdfast.spec.schema import MODELINE, SCHEMA_URL
from holdfast.store import Store
from holdfast.telemetry import read_events
from holdfast.telemetry.channel import add_listener
from holdfast.telemetry.events import AttemptBegan, Event, ScriptVerification
from holdfast.telemetry.exactness import Resumption, read_exactness
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

    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    first = drawn([0, 1, 2, 3])
    assert drawn([2, 0, 3, 1]) == first
    assert len({value for row in first for value in row[1:]}) == 12
    after = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    epoch = 2
    assert drawn([0, 1, 2, 3]) != first


def verified(url: str, fault: str) -> Resumption:
    """Compare a calm run with one that stops at step 3."""
    for run, stops in (("calm", [6]), ("stopped", [3, 6])):
        for stop_at in stops:
            run_script(url, run, loop, fault, stop_at=stop_at)
    return compare_runs(opened(url), "calm", "stopped", 6, 3)


def test_an_exact_script_is_equal_in_metrics_and_state(tmp_path: Path) -> None:
    result = verified(f"file://{tmp_path}", "")
    assert result == Resumption(steps=6, resumed_at=3)
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


def test_a_difference_in_the_state_of_one_rank_is_named(tmp_path: Path) -> None:
    store, gang = opened(f"file://{tmp_path}"), Gang()
    for run, position in (("calm", 4), ("stopped", 3)):
        state = ScriptState({"shared": {"a": 1}}, {"loader": {"position": position}}, gang)
        writer = Checkpointer(store, Attempt(run, 1), Retention(9), describe=DESCRIBE, gang=gang)
        writer.save(8, state.saved(state.live()), {})
        writer.wait()
    assert compare_runs(store, "calm", "stopped", 8, 4).values == ("loader.position: 4 and 3",)


def test_the_stops_of_a_verification_are_within_and_at_the_end_of_an_epoch() -> None:
    rows = [{"step": step, "epoch": (step - 1) // 4} for step in range(1, 9)]
    assert stops_of(rows, 8) == [5, 4]
    assert stops_of([{"step": step} for step in range(1, 9)], 8) == [4]


EPOCHS = """
import sys
import torch
import holdfast

session = holdfast.session(seed=3)
model, average = torch.nn.Linear(4, 4), {"loss": 0.0}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = {} if FAULT == "forgotten average" else {"average": average}
start = session.restore(model=model, optimizer=optimizer, steps=6, **kept)
for step in range(0 if FAULT == "loop at 0" else start, 6):
    if step % 2 == 0 or step == start:
        session.begin_epoch(step // 2)
        session.begin_step()
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average["loss"] = 0.5 * average["loss"] + loss.item()
    session.step(step + 1, loss=loss, average=average["loss"])
"""


def epochs_spec(folder: Path, store: Store, fault: str = "", preload: str = "") -> Spec:
    folder.mkdir()
    (folder / "train.py").write_text(f"FAULT = {fault!r}\n{EPOCHS}")
    train = f"{{script: train.py, determinism: exact, verify_steps: 5, preload: [{preload}]}}"
    (folder / "spec.yaml").write_text(f"name: epochs\ntrain: {train}\ncheckpoint: {{every_steps: 2}}\n")
    spec = load_spec(folder / "spec.yaml")
    publish_code(spec, store)
    return spec


@pytest.mark.slow  # six launches
def test_an_exact_script_is_verified_once_before_its_first_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = opened(f"file://{tmp_path / 'store'}")
    spec = epochs_spec(tmp_path / "code", store, preload="json, no_such_module")
    result = train_script(spec, "", store)
    exactness = read_exactness(store, result.run_id)
    assert exactness is not None
    assert exactness.is_exact
    assert [(one.resumed_at, one.steps) for one in exactness.resumptions] == [(3, 5), (2, 5)]
    assert "train.preload: no_such_module cannot be imported" in capfd.readouterr().err
    assert {info.key.split("/")[1] for info in store.list("runs/")} == {result.run_id}
    assert result.attempts == 1
    print_run(find_run(store, result.run_id), store)
    assert "resumed at step 3 and 2, equal at step 5" in capfd.readouterr().out
    page = draw_training(spec, result.run_id, store, read_events(store, result.run_id))
    assert "resumed at step 3 and 2, equal at step 5" in page
    told = [event for event in read_events(store, result.run_id) if isinstance(event, ScriptVerification)]
    assert [(event.seconds is None, event.seconds_left > 0, event.result) for event in told] == [
        (True, False, ""),
        (False, True, ""),
        (False, False, "resumed at step 3 and 2, equal at step 5"),
    ]
    assert told[1].seconds is not None
    assert told[1].seconds_left == 2 * told[1].seconds, "each of two stopped runs makes the steps once"
    assert "--set train.verify_steps=0 skips it" in told[0].text
    require_verified(spec, "", store, "another-run")  # launches nothing: the result of the first run is used
    assert read_exactness(store, "another-run") == exactness
    assert exactness.run_id == result.run_id
    assert not newest_launch(store, run_id(spec, "", "another-run calm"))


def test_a_result_is_used_again_only_for_equal_code_arguments_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "holdfast.components.train.exactness.installed_packages"
    monkeypatch.setattr(name, lambda: ["torch==1"])
    tree = {"name": "x", "code": f"blake3:{'0' * 64}", "train": {"script": "train.py", "determinism": "exact"}}
    spec = parse_spec(tree)
    assert spec.train.verify_steps == 4
    keys = [
        verification_key(spec.with_overrides(changes), "") for changes in ({}, {"name": "y"}, {"train.log_every": 1})
    ]
    assert len(set(keys)) == 1
    for field, value in (
        ("code", f"blake3:{'1' * 64}"),
        ("train.arguments", ["7"]),
        ("train.verify_steps", 8),
        ("parallel.processes", 2),
        ("cluster.environment", {"A": "1"}),
        ("cluster.image", "other"),
    ):
        keys.append(verification_key(spec.with_overrides({field: value}), ""))
    monkeypatch.setattr(name, lambda: ["torch==2"])
    keys.append(verification_key(spec, ""))
    assert len(set(keys)) == len(keys) - 2


@pytest.mark.parametrize(
    ("changes", "script", "skipped"),
    [
        ({"train.determinism": "off"}, "import holdfast\n", None),
        ({"train.verify_steps": 0}, "import holdfast\n", None),
        ({}, "print('a script without a session')\n", "never called session.restore"),
    ],
)
def test_a_script_is_not_verified_without_exactness_or_a_session(
    changes: dict[str, object], script: str, skipped: str | None, tmp_path: Path
) -> None:
    store = opened(f"file://{tmp_path / 'store'}")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text(script)
    (tmp_path / "code/spec.yaml").write_text("name: x\ntrain: {script: train.py, determinism: exact}\n")
    spec = load_spec(tmp_path / "code/spec.yaml").with_overrides(changes)
    publish_code(spec, store)
    require_verified(spec, "", store, "some-run")
    exactness = read_exactness(store, "some-run")
    assert (exactness is None) == (skipped is None)
    assert exactness is None or str(skipped) in exactness.text
    assert not newest_launch(store, run_id(spec, "", "some-run calm"))


def test_a_verification_ends_a_script_that_trains_without_reporting_steps(tmp_path: Path) -> None:
    def unreported() -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        holdfast.session(seed=1).restore(model=model, optimizer=optimizer)
        for _ in range(10**6):
            optimizer.step()

    seen: list[Event] = []
    forget = add_listener(lambda event, _: seen.append(event))
    with pytest.raises(StateError, match=r"100 optimizer steps after session\.restore without session\.step"):
        run_script(f"file://{tmp_path}", "unreported", unreported, stop_at=4)
    forget()
    assert not [event for event in seen if isinstance(event, AttemptBegan)]  # a view would show it as one of the run


@pytest.mark.slow  # three launches
@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        ("forgotten average", r"average of step 4 \(after the resume\)", ExitCode.NOT_EXACT),
        pytest.param(  # test_managed has the same error without launches
            "loop at 0",
            r"session\.step\(1\) follows step 3.*start = session\.restore",
            ExitCode.USER_CODE,
            marks=pytest.mark.drill,
        ),
    ],
)
def test_a_script_that_does_not_resume_exactly_is_not_trained(
    fault: str, message: str, code: ExitCode, tmp_path: Path
) -> None:
    store = opened(f"file://{tmp_path / 'store'}")
    spec = epochs_spec(tmp_path / "code", store, fault)
    with pytest.raises(HoldfastError, match=message) as error:
        train_script(spec, "", store)
    assert code_of(error.value) == code
    assert not newest_launch(store, run_id(spec, ""))


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Samples from a generator of their own, without a seed in a worker."""

    generator = torch.Generator()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            self.generator.seed()
        return torch.randn(4, generator=self.generator)


def worker_loop(workers: int) -> None:
    """A loop over a loader whose workers draw from a generator of their own."""
    session = holdfast.session(seed=3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = session.restore(model=model, optimizer=optimizer, steps=6)
    loader = torch.utils.data.DataLoader(Noise(), batch_size=2, num_workers=workers)
    for step, batch in enumerate(loader):
        if step < start:
            continue
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        session.step(step + 1, loss=loss)


def test_a_worker_without_a_seed_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    for run, stops in (("calm", [6]), ("stopped", [3, 6])):
        for stop_at in stops:
            run_script(url, run, worker_loop, 1, stop_at=stop_at)
    with pytest.raises(NotExactError, match=r"loss of step 1 \(before the stop\).*tensors: model/bias"):
        compare_runs(opened(url), "calm", "stopped", 6, 3).require()


@pytest.mark.drill  # three launches of two ranks
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
    assert (folder / "spec.yaml").read_text().splitlines()[0] == f"{MODELINE}{SCHEMA_URL}"
    spec = load_spec(folder / "spec.yaml")
    assert (spec.name, spec.train.script, spec.parallel.processes) == ("my-model", "train.py", 2)
    assert spec.code is not None
    again = CliRunner().invoke(app, ["init", str(script)])
    assert again.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["loop", "transformers", "lightning", "accelerate", "trl"])
def test_the_examples_have_valid_specs(name: str) -> None:
    assert load_spec(EXAMPLES / name / "spec.yaml").train.script == "train.py"


def test_the_seed_of_a_step_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(11)
    expected = torch.randn(4)
    seed_torch(11)
    assert torch.equal(torch.randn(4), expected)
    seeds: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    seed_torch(11)
    assert seeds == [11], "with an accelerator its generators are seeded, too"
