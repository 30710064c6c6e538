"""Training on two real nodes of Slurm ends with the same bits, whatever takes its allocation away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.components.checkpoint import list_attempts
from holdfast.components.checkpoint.attempts import read_attempt
from holdfast.components.launch.launches import newest_launch
from holdfast.components.spec import parse_spec
from holdfast.pipelines.backends.order import Order
from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.emit import Chain, job_name, options_of
from tests.slurm.chain import Place
from tests.slurm.cluster import SlurmCluster
from tests.whole.submitting import until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

STEPS, HELD = 100, 60
LONG = {"training": {"steps": STEPS, "log_every": 50}, "checkpoint": {"every_steps": 20, "keep_last": 3}}


@pytest.fixture(scope="module")
def calm(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the undisturbed run."""
    place = Place(slurm, tmp_path_factory.mktemp("calm"), **LONG)
    made = place.submit()
    assert place.wait(made["run_id"])["state"] == "SUCCEEDED", place.logs()
    return place.digest(made["run_id"], STEPS)


def disturbed(place: Place, disturb: Callable[[str, int], object]) -> str:
    """Submit, disturb the train job once some steps are saved, and wait for the end. Returns the run id."""
    made = place.submit()
    run = str(made["run_id"])
    job = int(place.step(run, "train")["pods"][-1])
    place.wait_for_step(run, 40)
    disturb(run, job)
    until(lambda: newest_launch(place.store, run) > 1, 400)
    place.go_on()
    status = place.wait(run)
    assert status["state"] == "SUCCEEDED", f"{status}\n{place.logs()}"
    return run


def attempts(place: Place, run: str) -> list[tuple[int, int]]:
    """Number and launch of each attempt."""
    numbers = [number for number, _ in list_attempts(place.store, run)]
    return [(number, read_attempt(place.store, run, number)["launch"]) for number in numbers]


def test_a_requeue_by_scontrol_goes_on_to_the_same_bits(slurm: SlurmCluster, tmp_path: Path, calm: str) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)
    run = disturbed(place, lambda _, job: slurm.ask("scontrol", "requeue", str(job)))
    assert place.digest(run, STEPS) == calm
    # The job keeps its number, and the gang after it is another launch and another attempt all the same.
    assert attempts(place, run) == [(1, 1), (2, 2)]
    assert place.step(run, "train")["error"] == "requeued 1 time"


def test_the_time_limit_saves_first_and_the_job_comes_back_by_itself(
    slurm: SlurmCluster, tmp_path: Path, calm: str
) -> None:
    place = Place(slurm, tmp_path, "cluster.slurm={slot_minutes: 60}", "checkpoint.grace_seconds=10", held=HELD, **LONG)
    run = str(place.submit()["run_id"])
    job = place.step(run, "train")["pods"][-1]
    place.wait_for_step(run, 40)
    begun = int(slurm.ask("squeue", "--noheader", f"--jobs={job}", "--Format=TimeUsed").split(":")[0])
    slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={begun + 2}")
    until(lambda: "the ranks are told to save and leave" in place.logs(), 200)
    until(lambda: slurm.ask("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt") == "1", 200)
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    place.go_on()
    status = place.wait(run)
    assert status["state"] == "SUCCEEDED", f"{status}\n{place.logs()}"
    assert place.digest(run, STEPS) == calm
    assert [number for number, _ in attempts(place, run)] == [1, 2]
    assert place.step(run, "train")["error"] == "requeued 1 time"


def test_a_node_that_goes_down_costs_what_was_not_saved(slurm: SlurmCluster, tmp_path: Path, calm: str) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)

    def down(_run: str, _job: int) -> None:
        slurm.kill_node("n2")
        slurm.start_node("n2")

    run = disturbed(place, down)
    assert place.digest(run, STEPS) == calm
    first, (attempt, launch) = attempts(place, run)
    assert (first, attempt) == ((1, 1), 2)
    assert launch >= 2, "one that found the node gone, before Slurm did, came to no gang"


def test_the_first_node_which_has_the_batch_job_may_go_down_too(slurm: SlurmCluster, tmp_path: Path, calm: str) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)

    def down(_run: str, _job: int) -> None:
        slurm.kill_node("n1")
        slurm.start_node("n1")

    run = disturbed(place, down)
    assert place.digest(run, STEPS) == calm
    assert attempts(place, run)[-1] == (2, 2)


def test_a_step_that_is_cancelled_is_started_again_in_the_same_allocation(
    slurm: SlurmCluster, tmp_path: Path, calm: str
) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)
    run = disturbed(place, lambda _, job: slurm.ask("scancel", f"{job}.0"))
    assert place.digest(run, STEPS) == calm
    assert attempts(place, run) == [(1, 1), (2, 2)]
    assert place.step(run, "train")["error"] == ""  # never went back into the queue


def test_a_run_that_was_cancelled_has_saved_and_goes_on_when_it_is_resumed(
    slurm: SlurmCluster, tmp_path: Path, calm: str
) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)
    made = place.submit()
    run = str(made["run_id"])
    place.wait_for_step(run, 40)
    assert "is being ended" in place.holdfast("cancel", run)
    status = place.wait(run)
    assert status["state"] == "CANCELED", f"{status}\n{place.logs()}"
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states["notify"] == "SUCCEEDED"
    assert states["evaluate"] == "CANCELED"
    assert "204" in place.step(run, "train")["error"]
    saved = place.newest(run)
    assert 40 <= saved < STEPS
    assert "has ended already" in place.holdfast("cancel", run)
    place.go_on()
    place.holdfast("resume", run)
    assert place.wait(run)["state"] == "SUCCEEDED", place.logs()
    assert place.digest(run, STEPS) == calm


def test_a_training_that_comes_back_after_its_deadline_stays_away_until_it_is_resumed(
    slurm: SlurmCluster, tmp_path: Path, calm: str
) -> None:
    place = Place(slurm, tmp_path, "cluster.deadline_hours=1", held=HELD, **LONG)
    run = str(place.submit()["run_id"])
    job = place.step(run, "train")["pods"][-1]
    place.wait_for_step(run, 40)
    (began,) = tmp_path.glob(f"home/slurm/*/train-{job}.began")
    began.write_text(str(float(began.read_text()) - 3600))
    slurm.ask("scontrol", "requeue", str(job))
    status = place.wait(run)
    assert status["state"] == "CANCELED", f"{status}\n{place.logs()}"
    train = place.step(run, "train")
    assert "exit code 17" in train["error"]
    assert "took longer than cluster.deadline_hours (1) in all its allocations" in train["error"]
    assert 40 <= place.newest(run) < STEPS
    place.go_on()
    place.holdfast("resume", run)
    assert place.wait(run)["state"] == "SUCCEEDED", place.logs()
    assert place.digest(run, STEPS) == calm


def test_the_tasks_of_an_array_that_wait_do_not_begin_once_it_is_cancelled(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    script = "#!/bin/bash\ntouch $SLURM_ARRAY_TASK_ID\ntrap 'exit 203' TERM\nsleep 600 & wait\n"
    job = client.sbatch(
        script, ["--array=0-3%1", f"--chdir={tmp_path}", "--output=log", "--mem=64M", "--job-name=holdfast-a"]
    )
    until((tmp_path / "0").exists, 120)
    client.forbid_requeue(job)
    client.ask_to_leave(job)
    until(lambda: not client.jobs_of(["holdfast-a"])[0].unfinished, 120)
    assert [path.name for path in tmp_path.iterdir() if path.name != "log"] == ["0"]


def test_a_job_gets_nothing_of_the_job_that_submits_it_and_logs_into_a_folder_of_any_name(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    inherited = {
        "SLURM_CPU_BIND": "nonsense", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "PMI_RANK": "1",
        "SBATCH_ARRAY_INX": "3-3", "SBATCH_EXPORT": "NONE",
    }  # fmt: skip
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "my 100%job home"))
    chain = Chain.of(Order(parse_spec("{name: a, data: {sources: [{uri: python:stdlib}]}}")))
    chain.folder.mkdir(parents=True)
    kept = ("--comment", "--chdir", "--output", "--job-name", "--open-mode")
    options = [one for one in options_of(chain, "preprocess", {}) if one.startswith(kept)]
    job = client.sbatch("#!/bin/bash\nenv\nsrun echo the step ran\n", [*options, "--mem=64M"])
    until(lambda: not client.jobs_of([job_name(chain.key, "preprocess")])[0].unfinished, 120)
    printed = (chain.folder / f"preprocess-{job}.log").read_text()
    assert "the step ran" in printed
    assert not [line for line in printed.splitlines() if line.partition("=")[0] in inherited]
