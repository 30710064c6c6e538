"""Functions of user code where they run: readers and filters, objectives, metrics and observers."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.code.resolve import enter_code, publish_code, resolve_code
from holdfast.corpus import prepare
from holdfast.dataset import Dataset
from holdfast.model.decoder import Decoder
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import ObjectiveInputs
from holdfast.objectives.own import OwnObjective
from holdfast.pipelines.paths import load_spec
from holdfast.rank.observers import UserObserver
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.schedule import learning_rate
from holdfast.rank.worker import work
from holdfast.scoring.score import own_metrics
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, UserCodeError
from holdfast.spec.functions import Function
from holdfast.spec.training import ObjectiveChoice
from holdfast.store import Store, layout, open_store
from tests.code.conftest import MINE, MakeFile
from tests.code.runs import calm_and_killed, functions_of
from tests.train.ranks import identity_of, launch
from tests.train.tiny_run import tiny_spec


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


# Readers and filters

TALK = "\n\n".join(f"number {number} of the talk says {'much ' * (number % 5)}" for number in range(60))
SHORT = sum(len(f"number {number} of the talk says {'much ' * (number % 5)}") <= 20 for number in range(60))


def _prepared(make_spec_file: MakeFile, tmp_path: Path, store: Store, code: str = MINE, **reader: Any) -> Any:
    (tmp_path / "talk.srt").write_text(TALK, encoding="utf-8")
    data = {
        "sources": [{"uri": str(tmp_path / "talk.srt"), "reader": {"use": "mine.py:cues", **reader}}],
        "cleaning": {"filters": ["mine.py:is_long"], "deduplicate": False},
        "tokenizer": {"vocabulary": 300},
        "workers": 1,
    }
    spec = load_spec(make_spec_file(code, data=data))
    publish_code(spec, store)
    return prepare(spec, store)


def test_a_reader_yields_the_documents_and_a_filter_drops_some(
    make_spec_file: MakeFile, tmp_path: Path, store: Store
) -> None:
    code = MINE.replace("> 20", "> 30")
    made = _prepared(make_spec_file, tmp_path, store, code, skip=10)
    kept = [cue for cue in TALK.split("\n\n")[10:] if len(cue) > 30]
    assert sum(made.documents.values()) == len(kept) < 50
    assert made.dropped == {"filtered": 50 - len(kept)}
    dataset = Dataset.open(store, made.dataset_id, tmp_path / "cache")
    assert dataset.manifest.tokens("train") > 0
    assert not _prepared(make_spec_file, tmp_path, store, code, skip=10).created


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("yield cue", "yield cue.encode()", "mine.py:cues: yielded bytes"),
        ("yield cue", "yield cue; 1 / (30 - number)", "failed on .*talk.srt, after 31 texts: ZeroDivisionError"),
        ("return len(text) > 20", "return len(text)", "mine.py:is_long: returned int"),
        ("return len(text) > 20", "return nothing", r"mine.py:is_long: failed: NameError.*\(mine.py, line 11\)"),
    ],
)
def test_a_reader_or_a_filter_that_fails_is_named_with_its_file_and_line(
    old: str, new: str, says: str, make_spec_file: MakeFile, tmp_path: Path, store: Store
) -> None:
    assert old in MINE
    with pytest.raises(UserCodeError, match=says):
        _prepared(make_spec_file, tmp_path, store, MINE.replace(old, new))
    assert not list(store.list("datasets/d")), "nothing half-written is visible"


def test_a_changed_bundle_in_the_store_is_not_run(make_spec_file: MakeFile, tmp_path: Path, store: Store) -> None:
    spec = load_spec(make_spec_file(data={"sources": [{"uri": str(tmp_path), "reader": "mine.py:cues"}]}))
    publish_code(spec, store)
    key = layout.code(str(spec.code))
    store.put(key, store.get(key).replace(b"yield cue", b"yield 'x'"))
    with pytest.raises(DataError, match="it was changed"):
        prepare(spec, store)


# Objectives


def _function(tmp_path: Path, store: Store, code: str, kind: type[Function], use: str, **arguments: Any) -> Any:
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code" / "mine.py").write_text(code)
    field = {ObjectiveChoice: ("training", "objective"), Function: ("telemetry", "observers")}[kind]
    value: Any = {"use": use, **arguments}
    section = {field[1]: value if kind is ObjectiveChoice else [value]}
    tree = {"name": "x", "data": {"sources": [{"uri": "x"}]}, field[0]: section}
    spec = resolve_code(Spec.model_validate(tree), tmp_path / "code")
    publish_code(spec, store)
    enter_code(store, spec.code)
    found = getattr(getattr(spec, field[0]), field[1])
    return found if kind is ObjectiveChoice else found[0]


TARGETS = torch.tensor([[1, IGNORED, 3], [IGNORED, 5, 6]])


def _sums(objective: OwnObjective, logits: torch.Tensor, targets: torch.Tensor = TARGETS) -> torch.Tensor:
    batch: Any = SimpleNamespace(targets=targets)
    return objective.sums(ObjectiveInputs(logits.new_empty(0), logits=logits), batch)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_an_objective_gets_the_counted_targets_and_its_losses_are_added(
    tmp_path: Path, store: Store, logits: torch.Tensor
) -> None:
    objective = OwnObjective(_function(tmp_path, store, MINE, ObjectiveChoice, "mine.py:focal", gamma=0))
    total = _sums(objective, logits)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), TARGETS.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(total, expected[None])
    total.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[0, 1].any(), "an uncounted target has no gradient"
    nothing = _sums(objective, logits, torch.full((2, 3), IGNORED))
    assert not nothing.any()
    assert nothing.requires_grad, "every rank has a backward pass"
    assert objective.counts(torch.zeros(2, 4, dtype=torch.long)).tolist() == [6]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return logits.sum()", r"returned torch.float32 \[\]; return one floating-point loss for each of 4"),
        ("return targets", r"returned torch.int64 \[4\]"),
        ("return 3", "returned int"),
        ("return logits.detach().sum(-1)", "do not detach them"),
        ("raise ValueError('no')", r"failed: ValueError: no \(mine.py, line 2\)"),
    ],
)
def test_an_objective_that_returns_something_else_is_named(
    body: str, says: str, tmp_path: Path, store: Store, logits: torch.Tensor
) -> None:
    code = f"def focal(logits, targets):\n    {body}\n"
    objective = OwnObjective(_function(tmp_path, store, code, ObjectiveChoice, "mine.py:focal"))
    with pytest.raises(UserCodeError, match=says) as refused:
        _sums(objective, logits)
    assert refused.value.exit_code == 22


# Schedules


@pytest.mark.parametrize(
    ("body", "rates", "says"),
    [
        ("return 1 - step / steps", [0.01, 0.005], ""),
        ("return float('nan')", [], "returned nan at step 0"),
        ("return -1", [], "returned -1 at step 0"),
        ("return 'x'", [], "returned 'x' at step 0"),
        ("return 1 / step", [], r"failed at step 0: ZeroDivisionError.*line 2"),
    ],
)
def test_a_schedule_gives_a_factor_of_the_peak_rate_or_is_named(
    body: str, rates: list[float], says: str, make_spec_file: MakeFile, store: Store
) -> None:
    code = f"def half(step, steps):\n    {body}\n"
    training = {"steps": 2, "optimizer": {"learning_rate": 0.01}, "schedule": {"factor": "mine.py:half"}}
    spec = load_spec(make_spec_file(code, training=training))
    publish_code(spec, store)
    enter_code(store, spec.code)
    if rates:
        assert [learning_rate(spec.training, step) for step in range(2)] == rates
    else:
        with pytest.raises(UserCodeError, match=f"mine.py:half: {says}"):
            learning_rate(spec.training, 0)


# Metrics and observers


def test_a_metric_gets_the_model_and_every_held_out_target_once(make_spec_file: MakeFile, store: Store) -> None:
    spec = load_spec(make_spec_file(evaluation={"metrics": ["mine.py:accuracy"]}))
    publish_code(spec, store)
    enter_code(store, spec.code)
    torch.manual_seed(0)
    decoder = Decoder(tiny_spec().model, 300).eval()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.02)
    rows = np.random.default_rng(0).integers(1, 300, (5, 17))
    (value,) = own_metrics(decoder, lambda: iter([rows[:2], rows[2:]]), spec.evaluation.metrics).values()
    with torch.inference_mode():
        hits = decoder(torch.from_numpy(rows[:, :-1])).argmax(-1) == torch.from_numpy(rows[:, 1:])
    assert value == float(hits.double().mean())


@pytest.mark.parametrize(("body", "says"), [("return 'x'", "returned str"), ("return model.x", "failed: Attribute")])
def test_a_metric_without_a_number_is_named(body: str, says: str, make_spec_file: MakeFile, store: Store) -> None:
    code = f"def accuracy(model, batches):\n    {body}\n"
    spec = load_spec(make_spec_file(code, evaluation={"metrics": ["mine.py:accuracy"]}))
    publish_code(spec, store)
    enter_code(store, spec.code)
    with pytest.raises(UserCodeError, match=f"mine.py:accuracy: {says}"):
        own_metrics(Decoder(tiny_spec().model, 300), lambda: iter(()), spec.evaluation.metrics)


def test_an_observer_that_fails_is_left_out_and_ends_nothing(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    code = "def watch(step, metrics):\n    assert metrics['loss'] < 2, step\n"
    observer = UserObserver(_function(tmp_path, store, code, Function, "mine.py:watch"))
    output = SimpleNamespace(loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0))
    finished: Any = SimpleNamespace(step=7, learning_rate=0.1, output=output)
    with caplog.at_level(logging.WARNING):
        observer.on_step(finished)
        assert not caplog.messages
        output.loss = torch.tensor(3.0)
        observer.on_step(finished)
        observer.on_step(finished)
    (message,) = caplog.messages
    assert "mine.py:watch: failed, and is left out: AssertionError: 7" in message


# A training with all of them


def test_a_training_with_its_own_objective_that_was_killed_has_the_bits_of_one_that_was_not(
    make_spec_file: MakeFile, tmp_path: Path
) -> None:
    make_spec_file()
    spec = tiny_spec()
    tree = spec.model_dump(exclude_unset=True)
    tree["training"]["objective"] = {"use": "mine.py:focal", "gamma": 1.5}
    tree["telemetry"] = {"observers": ["mine.py:watch"]}
    spec = resolve_code(Spec.model_validate(tree), tmp_path / "project")
    store, calm, killed = calm_and_killed(spec, tmp_path)
    assert len(calm["history"]) == 12
    assert calm == killed
    changed = functions_of(spec).replace("1.5", "2.5")
    with pytest.raises(DataError, match="changed after the launch"):
        work(store, identity_of(spec), launch(store, spec), PreemptionSignal(), None, spec.code, changed)
