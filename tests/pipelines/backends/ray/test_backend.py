"""Requests to Ray, and the meaning of its answers; tests/ray runs a real Ray."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipelines.backends.ray.backend import Ray
from holdfast.pipelines.backends.ray.client import Jobs, RayJob
from holdfast.pipelines.backends.ray.emit import RayOrder
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import ExitCode, SpecError, parse_spec
from holdfast.spec.errors import ClusterUnreachableError, MissingError
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store

SPEC = "{name: small, data: {sources: [{uri: 's3://bucket/corpus'}]}}"
KEY = "0123456789abcdef"


class FakeJobs(Jobs):
    """A Jobs API in memory that accepts each name once."""

    def __init__(self) -> None:
        super().__init__("http://ray.example:8265")
        self.known: dict[str, RayJob] = {}
        self.printed = ""

    def submit(self, identity: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> bool:
        if identity in self.known:
            return False
        self.known[identity] = RayJob(identity, "RUNNING", name=metadata["name"], started=time.time())
        return True

    def end(self, identity: str, state: str, code: int = 0) -> None:
        """End a job."""
        self.known[identity] = RayJob(identity, state, "it reports so", code, name="small")

    def all(self) -> list[RayJob]:
        return list(self.known.values())

    def logs(self, identity: str) -> str:
        return self.printed

    def stop(self, identity: str) -> None:
        self.end(identity, "STOPPED")


@pytest.fixture
def backend(tmp_path: Path) -> Ray:
    """The backend on such an API."""
    ray_backend = Ray(str(tmp_path))
    ray_backend._jobs = FakeJobs()
    return ray_backend


def jobs(backend: Ray) -> FakeJobs:
    """The API of the backend."""
    fake_jobs = backend._jobs
    assert isinstance(fake_jobs, FakeJobs)
    return fake_jobs


def wanted(run_id: str = KEY) -> RunRequest:
    """The request of the tests."""
    return RunRequest(parse_spec(SPEC), run_id=run_id)


def test_a_repeated_submission_returns_the_existing_job_until_it_fails(backend: Ray) -> None:
    first, created = backend.submit(wanted())
    assert first.id.startswith(f"holdfast-{KEY}-")
    assert (first.id[-2:], first.state, created) == ("-1", "RUNNING", True)
    assert backend.submit(wanted()) == (first, False)
    jobs(backend).end(first.id, "FAILED", 1)
    second, created = backend.resume(wanted())
    assert (second.id, created) == (f"{first.id[:-2]}-2", True)
    jobs(backend).end(second.id, "SUCCEEDED")
    assert backend.submit(wanted())[1] is False
    assert [run.id for run in backend.list()] == [second.id, first.id]


def test_two_concurrent_submissions_create_one_job(backend: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_jobs, slow = jobs(backend), RayOrder.of(wanted()).submission_id(1)
    listings = iter([list[RayJob]()])

    def first_nothing() -> list[RayJob]:
        listing = next(listings, None)
        return list(fake_jobs.known.values()) if listing is None else listing

    monkeypatch.setattr(fake_jobs, "all", first_nothing)
    fake_jobs.known[slow] = RayJob(slow, "RUNNING")  # created after this submission had looked
    assert backend.submit(wanted()) == (backend.status(slow), False)


def test_the_output_of_tasks_is_split_by_step(backend: Ray) -> None:
    run, _ = backend.submit(wanted())
    jobs(backend).printed = "\n".join((
        "\x1b[36m(run pid=7, ip=127.0.0.1)\x1b[0m [tokenise 0/3] made (all)", "[train] a step", "something of Ray",
        "[train] cut",
    ))  # fmt: skip
    assert list(backend.logs(KEY)) == [("tokenise", "made (all)"), ("train", "a step"), ("driver", "something of Ray")]
    jobs(backend).end(run.id, "SUCCEEDED")
    assert list(backend.logs(KEY, "train")) == [("train", "a step"), ("train", "cut")]


def test_the_same_run_in_another_store_is_another_job(backend: Ray, tmp_path: Path) -> None:
    here, elsewhere = (replace(wanted(), store=store) for store in (tmp_path.as_uri(), "s3://bucket/other"))
    first, second = backend.submit(here)[0], backend.submit(elsewhere)[0]
    assert first.id != second.id
    assert backend.status(KEY).id == first.id, "the one in this store is meant"


def test_cancelling_a_job_is_idempotent(backend: Ray) -> None:
    backend.submit(wanted())
    status, running = backend.cancel(KEY[:6])
    assert (status.state, running) == ("CANCELED", True)
    assert backend.cancel(KEY)[1] is False


def test_steps_are_as_their_outcomes_have_them(backend: Ray, tmp_path: Path) -> None:
    run, _ = backend.submit(wanted())
    store, now = open_store(tmp_path.as_uri()), time.time()
    for outcome in (
        Outcome("preprocess", 1, now, now + 2, 0, result="d"),
        Outcome("train", 1, now + 3, now + 4, int(ExitCode.BAD_DATA), "the text is too short\nfor that"),
        Outcome("notify", 1, now + 5),
    ):
        store.put(layout.job(run.id, outcome.name), outcome.as_json())
    jobs(backend).end(run.id, "FAILED", int(ExitCode.BAD_DATA))
    status = backend.status(KEY)
    assert {step.name: step.state for step in status.steps} == {
        "preprocess": "SUCCEEDED", "train": "FAILED", "notify": "FAILED",
    }  # fmt: skip
    assert status.message == "train: the text is too short"
    assert [step.exit_code for step in status.steps] == [0, 11, None]
    assert status.exit_code == 11


def test_a_run_that_is_not_there_is_missed(backend: Ray) -> None:
    with pytest.raises(MissingError, match="knows no such run"):
        backend.status("nothing")


def test_a_spec_that_is_too_long_for_a_variable_is_refused() -> None:
    spec = parse_spec(SPEC, [f"cluster.environment={{LONG: {'x' * 70_000}}}"])
    with pytest.raises(SpecError, match="too long"):
        RayOrder.of(RunRequest(spec)).runtime_env()


def test_an_unreachable_ray_cluster_is_reported() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ClusterUnreachableError, match=r"http://127\.0\.0\.1:9"):
        Jobs("http://127.0.0.1:9").all()
