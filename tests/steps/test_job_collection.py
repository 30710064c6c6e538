"""Logs of old executions are deleted. Logs that a person can still find, and logs of running executions, stay."""

import pytest

from holdfast.pipelines.backends.record import Record
from holdfast.steps import step_logs
from holdfast.steps.outcomes import Outcome
from holdfast.steps.step_logs import KEEP_SECONDS, LOOKS, collect_jobs
from holdfast.store import Store, layout
from tests.protocol.bucket import Bucket, MemoryStore

THEN, LATER = 1e9, 1e9 + KEEP_SECONDS + 60


class _Now:
    now = THEN

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Now:
    return _Now()


@pytest.fixture
def store(clock: _Now) -> Store:
    return MemoryStore(Bucket(clock))


def leave(store: Store, job: str, result: str = "", code: int = 0) -> None:
    """Write the records of the train step of a job."""
    store.put(layout.step_log(job, "train", "s", "stream.json"), b"{}")
    store.put(layout.step_log(job, "train", "s", "000000.log"), b"a line\n")
    store.put(layout.job(job, "train"), Outcome("train", 1, 1.0, 2.0, code, result=result).as_json())


def submit(store: Store, run_id: str, job: str, trials: tuple[tuple[str, ...], ...] = (), log: str = "") -> None:
    Record("argo", job, run_id, "name", "", 5.0, job=job, trials=trials, log=log).write(store)


def jobs(store: Store) -> set[str]:
    return {*store.folders("logs/"), *store.folders("jobs/")}


def test_old_logs_go_but_for_those_that_a_person_finds_or_that_grow(store: Store, clock: _Now) -> None:
    submit(store, "aaaa", "first")
    for job in (
        "first",
        "shown",
        "sweep",
        "unknown",
        "gone",
        "cccc-run-20260101T000000Z-7",
        "dddd-run-20260101T000000Z-8",
    ):
        leave(store, job, {"first": "aaaa", "shown": "aaaa", "gone": "bbbb"}.get(job, ""))
    leave(store, "failed", code=12)
    submit(store, "aaaa", "shown")  # the newest submission of that run
    submit(store, "ssss", "sweep", trials=(("x=1",),))
    submit(store, "dddd", "", log="/home/logs/dddd/run-20260101T000000Z-8.log")
    leave(store, "grows")
    leave(store, "mine")
    clock.now = LATER - 60
    store.put(layout.step_log("grows", "train", "s", "000001.log"), b"more\n")
    assert collect_jobs(store, "mine", THEN + KEEP_SECONDS - 1) == []
    deleted = collect_jobs(store, "mine", LATER)
    assert sorted(deleted) == ["cccc-run-20260101T000000Z-7", "failed", "first", "gone", "unknown"]
    assert jobs(store) == {"shown", "sweep", "grows", "mine", "failed", "dddd-run-20260101T000000Z-8"}
    assert [*store.list("logs/failed/")] == [], "its outcomes alone stay: a schedule reads them"
    assert {*store.folders("names/")} == {"name", "shown", "sweep"}


def test_a_submission_that_cannot_be_read_keeps_its_logs(store: Store) -> None:
    leave(store, "job", "aaaa")
    store.put(layout.run("aaaa", "backend.json"), b"{")
    assert collect_jobs(store, "", LATER) == []


def test_an_exit_handler_examines_a_limited_number_of_jobs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3 * LOOKS):
        leave(store, f"job-{number}")
    assert len(collect_jobs(store, "", LATER)) == LOOKS
    monkeypatch.setattr(step_logs, "LOOKS", 1000)
    assert len(collect_jobs(store, "", LATER)) == 2 * LOOKS
    assert jobs(store) == set()
