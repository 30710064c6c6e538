"""`holdfast logs`: the steps' lines from the store, on every backend, and missing lines from the engine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from holdfast.pipelines.backends.interface import RunStatus, StepStatus
from holdfast.pipelines.backends.record import Record
from holdfast.pipelines.backends.step_logs import job_of, step_lines
from holdfast.spec.errors import ClusterUnreachableError, MissingError
from holdfast.steps.step_logs import ShippedLog, local_job
from holdfast.store import Store

RECORD = Record("argo", "small-1", "3f2a", "small", "", time.time(), job="uid-1")
RUNNING = RunStatus("argo", "small-1", "small-1", "RUNNING", steps=(
    StepStatus("preprocess", "SUCCEEDED"), StepStatus("train", "RUNNING"), StepStatus("evaluate", "PENDING"),
))  # fmt: skip
ENDED = replace(RUNNING, state="FAILED", steps=(*RUNNING.steps[:1], StepStatus("train", "FAILED"), RUNNING.steps[2]))


class Engine:
    """A fake engine for logs; `has` holds its lines of each step."""

    name = "argo"

    def __init__(self, *states: RunStatus | Exception, has: dict[str, list[str]] | None = None) -> None:
        self._states, self.has, self.requests = list(states), has or {}, list[str]()

    def status(self, _run: str) -> RunStatus:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def logs(self, _run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        self.requests.append(step)
        if step not in self.has:
            raise MissingError(f"no log of {step or 'any step'}")
        yield from ((step, line) for line in self.has[step])


def wrote(store: Store, step: str, text: str, *, part: str = "", code: int | None = 0) -> None:
    shipped = ShippedLog("uid-1", step, part, str)
    shipped.write(text)
    shipped.open(store.url)
    if code is None:
        shipped.hurry()
        until(lambda: any(info.key.endswith(".log") for info in store.list(f"logs/uid-1/{step}/")))
    else:
        shipped.close(code)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(store: Store, engine: Engine, step: str = "", **options: object) -> list[str]:
    record = options.pop("record", RECORD)
    name_lines = step_lines(store, record, lambda: (engine, "small-1"), step, **options)  # type: ignore[arg-type,return-value]
    return [f"{name}: {line}" for name, line in name_lines]


RECORDED = '{"time": 0.0, "level": "INFO", "logger": "holdfast.train", "message": "step 1"}\n'
STEP_1 = "1970-01-01T00:00:00Z INFO    holdfast.train: step 1"


@pytest.mark.parametrize("gone", [MissingError("deleted"), ClusterUnreachableError("away")])
def test_logs_of_steps_are_readable_after_the_engine_deletes_the_run(store: Store, gone: Exception) -> None:
    wrote(store, "preprocess", "tokenised\n")
    wrote(store, "train", RECORDED)
    assert lines(store, Engine(gone)) == ["preprocess: tokenised", f"train: {STEP_1}"]
    assert lines(store, Engine(gone), "train") == [f"train: {STEP_1}"]
    with pytest.raises(type(gone)):
        lines(store, Engine(gone), "evaluate")


def test_the_engine_is_queried_only_for_steps_without_logs_in_the_store(store: Store) -> None:
    wrote(store, "preprocess", "tokenised\n")
    engine = Engine(ENDED, has={"preprocess": ["a dump"] * 93, "train": ["OOMKilled"]})
    assert lines(store, engine) == ["preprocess: tokenised", "train: OOMKilled"]
    assert engine.requests == ["train"]
    engine.has.clear()
    (_, message) = lines(store, engine)
    never = replace(
        ENDED, steps=(*ENDED.steps[:2], StepStatus("evaluate", "NOT_BEGUN"), StepStatus("register", "SKIPPED"))
    )
    assert len(lines(store, Engine(never))) == 2  # a step that never began has no log to miss
    assert "argo neither: no log of train" in message


def test_a_log_that_nothing_has_is_an_error(store: Store) -> None:
    with pytest.raises(MissingError, match="no log of train"):
        lines(store, Engine(ENDED), "train")


def test_following_shows_each_line_once_and_ends_with_the_run(store: Store) -> None:
    wrote(store, "preprocess", "tokenised\n")
    engine = Engine(RUNNING, RUNNING, ENDED)
    steps: Iterator[Callable[[], None]] = iter([
        lambda: wrote(store, "train", "step 1\nstep 2 in the mid", code=None),
        lambda: wrote(store, "train", "again\n", code=20),
    ])  # fmt: skip
    followed = lines(store, engine, follow=True, pause=lambda _: next(steps)())
    assert followed[:2] == ["preprocess: tokenised", "train: step 1"]
    assert followed[2:] == [
        "train: step 2 in the ",
        "train: [holdfast: this process ended without a word; its last seconds may be missing here]",
        "train: again",
    ]
    assert engine.requests == []


def test_an_unreachable_engine_does_not_end_following(store: Store) -> None:
    wrote(store, "preprocess", "tokenised\n")
    with pytest.raises(ClusterUnreachableError):
        lines(store, Engine(RUNNING, ClusterUnreachableError("away")), follow=True, pause=lambda _: None)


def test_trials_and_shares_are_parts_of_their_step(store: Store) -> None:
    wrote(store, "train", "one\n", part="1")
    wrote(store, "train", "two\n", part="2")
    wrote(store, "tokenise", "share\n", part="1-4")
    engine = Engine(replace(ENDED, steps=(StepStatus("tokenise", "SUCCEEDED"), StepStatus("train-2", "SUCCEEDED"))))
    assert lines(store, engine, "train") == ["train-1: one", "train-2: two"]
    assert lines(store, engine, "train-2") == ["train-2: two"]
    assert lines(store, engine, "tokenise") == ["tokenise-1-4: share"]
    assert engine.requests == []


def test_a_run_without_a_record_is_known_by_what_its_engine_calls_it(store: Store) -> None:
    wrote(store, "preprocess", "tokenised\n")
    assert lines(store, Engine(replace(RUNNING, job="uid-1")), record=None)[0] == "preprocess: tokenised"
    assert job_of(None, replace(RUNNING, backend="kubeflow", id="8b1f")) == "8b1f"
    assert job_of(replace(RECORD, backend="local", job="", log="/h/logs/3f2a/run-1.log")) == "3f2a-run-1"
    assert local_job("") == ""


def test_a_run_that_is_no_sweep_has_no_compare_step(store: Store) -> None:
    engine, step = Engine(ENDED), "compare"
    connected: Any = partial(tuple, (engine, "small-1"))
    with pytest.raises(MissingError, match="small is a run and not a sweep: only a sweep has the step compare"):
        list(step_lines(store, RECORD, connected, step))
    assert engine.requests == []
    sweep = replace(RECORD, trials=(("training.seed=1",), ("training.seed=2",)))
    wrote(store, step, "first\n")
    assert list(step_lines(store, sweep, connected, step)) == [(step, "first")]
