"""The controller of a search: it is killed at every decision, and decides the same again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.compare import compare
from holdfast.pipelines.runner import Execution
from holdfast.pipelines.submitted_search import SearchRunner
from holdfast.pipelines.trials import text_of
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import TrialList
from holdfast.search import log as search_log
from holdfast.search.log import WHOLE, LogEntry, append, read_log, trials_begun
from holdfast.search.method import Search
from holdfast.spec import ExitCode, parse_spec, run_id
from holdfast.spec.errors import DataError
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store

SPEC = parse_spec("{name: a, data: {sources: [{uri: x}]}, training: {steps: 8}}")
SEARCH = Search("asha", ("training.optimizer.learning_rate=1e-4..1e-1 log",), 4, seed=1, reduction=2, min_steps=2)
ID = "5ea5c40000000000"
LOSSES = {"1": 3.0, "2": 1.0, "3": 2.0, "4": 4.0}


def pause_of(execution: Execution) -> str:
    """The step of a pause in the overrides of a training; empty without one."""
    return next(iter(re.findall(r"training\.pause_at=(\d+)", " ".join(execution.arguments))), "")


class Killed(Exception):  # noqa: N818
    """The controller is gone."""


@dataclass
class Steps:
    """Steps that end immediately with a loss of the test. The controller is killed when it starts step `kill_at`."""

    kill_at: int = -1
    codes: Mapping[str, int] = field(default_factory=dict)
    started: list[Execution] = field(default_factory=list)
    width: int = 1

    def start(self, execution: Execution) -> Handle:
        if len(self.started) == self.kill_at:
            raise Killed
        self.started.append(execution)
        return Handle(execution, self.codes.get(execution.name, 0))

    def wait(self, handles: Any) -> None: ...

    def retries(self, step: str) -> int:
        return 0

    def record(self, outcome: Outcome) -> None: ...

    def outcomes(self) -> list[Outcome]:
        return [Outcome("train", 1, 1.0, 2.0, code, "loss is NaN", part=name[6:]) for name, code in self.codes.items()]

    @property
    def trainings(self) -> list[tuple[str, str]]:
        return [(one.part, pause_of(one)) for one in self.started if one.step == "train"]


@dataclass
class Handle:
    """An execution that has ended."""

    execution: Execution
    code: int
    leave_seconds: float = 1.0

    def poll(self) -> int:
        return self.code

    def result(self) -> dict[str, Any]:
        part = self.execution.part
        until = int(pause_of(self.execution) or 8)
        results: dict[str, dict[str, Any]] = {
            "preprocess": {"dataset_id": "d"},
            "train": {"run_id": f"run-{part}", "step": until, "loss": LOSSES.get(part)},
            "evaluate": {"word": "blessed", "metrics": {"loss": LOSSES.get(part)}},
            "compare": {"word": "blessed", "winner": "run-2", "changes": ["training.seed=1"]},
            "register": {"version": "1"},
        }
        return results.get(self.execution.step, {})

    def stop(self, *, force: bool) -> None: ...


def run(store: Store, steps: Steps, search: Search = SEARCH) -> int:
    return SearchRunner(search, ID, SPEC, store, steps, {"salt": "", "replan": "false"}).run()


def test_a_controller_that_is_killed_at_any_point_makes_the_same_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, steps = open_store((tmp_path / "calm").as_uri()), Steps()
    assert run(calm, steps) == 0
    whole = read_log(calm, ID)
    assert steps.trainings == [("1", "2"), ("2", "2"), ("2", "4"), ("3", "2"), ("4", "2"), ("3", "4"), ("2", "")]
    assert [one.step for one in steps.started][-4:] == ["evaluate", "compare", "register", "notify"]
    compared = dict(argument.lstrip("-").split("=", 1) for argument in steps.started[-3].arguments)
    assert compared["trials"] == text_of(tuple(trials_begun(whole)), ID)
    kills = 0
    for number in range(len(steps.started)):
        store = open_store((tmp_path / str(number)).as_uri())
        monkeypatch.setattr("holdfast.pipelines.runner.log.exception", lambda *_: None)
        with pytest.raises(Killed):
            run(store, Steps(kill_at=number))
        kills += 1
        assert read_log(store, ID) == whole[: len(read_log(store, ID))]
        assert run(store, Steps()) == 0
        assert read_log(store, ID) == whole
    assert kills == 12
    for number in range(len(whole)):  # killed between the steps: before and after each entry of the log
        store = open_store((tmp_path / f"entry-{number}").as_uri())
        for index, entry in enumerate(whole[:number]):
            assert append(store, ID, index, entry)
        again = Steps()
        assert run(store, again) == 0
        assert read_log(store, ID) == whole
        assert len(again.trainings) == sum(entry.kind == "score" for entry in whole[number:])


def test_an_entry_of_another_controller_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path.as_uri())
    other = LogEntry(kind="decision", trial=1, until=2, changes=("training.optimizer.learning_rate=0.005",))
    original = search_log.append

    def late(store: Store, search: str, number: int, entry: LogEntry) -> bool:
        if number == 0:
            original(store, search, 0, other)
        return original(store, search, number, entry)

    monkeypatch.setattr("holdfast.search.log.append", late)
    steps = Steps()
    assert run(store, steps) == 0
    assert read_log(store, ID)[0] == other
    assert any("learning_rate=0.005" in argument or "0.005" in argument for argument in steps.started[1].arguments)


def test_only_a_failure_of_the_values_is_recorded(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    lost = Steps(codes={"train-3": int(ExitCode.KILLED)})
    assert run(store, lost) == ExitCode.KILLED
    assert read_log(store, ID)[-1].kind == "decision"
    assert lost.started[-1].step == "notify"
    steps = Steps(codes={"train-3": int(ExitCode.DIVERGED)})
    assert run(store, steps) == 0
    failed = next(entry for entry in read_log(store, ID) if entry.exit_code)
    assert (failed.trial, failed.exit_code, failed.reason, failed.loss) == (3, ExitCode.DIVERGED, "loss is NaN", None)
    assert ("3", "4") not in steps.trainings


def test_a_training_without_a_result_gets_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, result = open_store(tmp_path.as_uri()), Handle.result
    monkeypatch.setattr(Handle, "result", lambda handle: {} if handle.execution.name == "train-2" else result(handle))
    assert run(store, Steps()) == ExitCode.UNEXPECTED
    assert read_log(store, ID)[-1].kind == "decision"


def test_the_controller_decides_by_what_the_log_has_and_not_by_what_it_measured(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    log = search_log.SearchLog(store, ID)
    measured = LogEntry(kind="score", trial=1, until=2).model_copy(update={"loss": math.nan})
    assert log.add(measured)
    assert log.entries == read_log(store, ID)
    assert log.entries[0].loss is None


def test_a_log_with_a_gap_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert run(store, Steps()) == 0
    store.delete(layout.sweep(ID, "log/00002.json"))
    with pytest.raises(DataError, match=r"00002\.json: is missing"):
        run(store, Steps())


def test_the_comparison_has_the_finished_trials_the_stopped_ones_and_the_rungs(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert run(store, Steps(codes={"train-4": int(ExitCode.DIVERGED)})) == 0
    trials = trials_begun(read_log(store, ID))
    for number, changes in enumerate(trials, 1):  # a stopped trial was trained in full by another command
        spec = SPEC.with_overrides(changes)
        identity = run_id(spec, "d")
        store.put(layout.result(identity), b'{"step": 8, "loss": 1.5, "state_digest": "00"}')
        verdict = f'{{"metrics": {{"loss": {number / 10}, "perplexity": 2.0}}, "word": "blessed"}}'
        store.put(layout.verdict(identity, f"{settings_key(spec)}-none"), verdict.encode())
    given = TrialList.from_text(text_of(tuple(trials), ID))
    comparison = compare(SPEC, "d", given.trials, store, search=given.search)
    assert comparison.sweep_id == ID
    assert [row.changes for row in comparison.rows] == [trials[1]]
    assert [(one.changes, one.step, one.loss) for one in comparison.stopped] == [
        (trials[0], 2, 3.0),
        (trials[2], 4, 2.0),
    ]
    assert [(one.changes, one.exit_code, one.reason) for one in comparison.failed] == [(trials[3], 12, "loss is NaN")]
    assert [(rung.steps, rung.trials, rung.promoted) for rung in comparison.rungs] == [(2, 4, 2), (4, 2, 1), (8, 1, 0)]
    assert "| 2 steps | 4 | 2 |" in comparison.markdown
    assert WHOLE == 0
