"""Training on two real nodes of Slurm ends with the same bits, whichever fault takes its allocation away."""

import ipaddress
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint import list_attempts, read_manifest
from holdfast.checkpoint.attempts import read_attempt
from holdfast.launch.launches import newest_launch
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.emit import Chain, job_name, options_of
from holdfast.spec import parse_spec
from holdfast.store import open_store
from tests.slurm.chain import LIKE_TWO_NODES, Place
from tests.slurm.cluster import NODES, SlurmCluster
from tests.whole import small
from tests.whole.listeners import listening, open_to_others, unix_listeners
from tests.whole.submitting import until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

STEPS, AHEAD = 100, 5
LONG = {"training": {"steps": STEPS, "log_every": 50}, "checkpoint": {"every_steps": 20, "keep_last": 3}}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of the undisturbed run, on this machine, by step."""
    folder = tmp_path_factory.mktemp("calm")
    small.write_corpus(folder)
    small.write_spec(folder, **LONG)
    result = small.holdfast(folder, "spec.yaml", *LIKE_TWO_NODES)
    assert result.returncode == 0, result.stdout + result.stderr
    store, run = open_store((folder / "home/store").as_uri()), small.only(folder, "runs/*/result.json")["run_id"]
    return {step: read_manifest(store, run, step).state_digest for step in (60, STEPS)}


def disturb(place: Place, run: str, saved: int, strike: Callable[[int], object]) -> None:
    """Inject a fault into the train job once that step is saved, and wait for the next launch."""
    place.let(saved + AHEAD)
    place.wait_for_step(run, saved)
    launch = newest_launch(place.store, run)
    strike(train_job(place, run))
    until(lambda: newest_launch(place.store, run) > launch, 400)


def train_job(place: Place, run: str) -> int:
    """The number of the job that trains."""
    return int(place.step(run, "train")["pods"][-1])


def attempts(place: Place, run: str) -> list[tuple[int, int]]:
    """The number and the launch of each attempt."""
    numbers = [number for number, _ in list_attempts(place.store, run)]
    return [(number, read_attempt(place.store, run, number)["launch"]) for number in numbers]


def of_jobs(slurm: SlurmCluster, home: Path) -> list[psutil.Process]:
    """The processes that jobs have started for a home. Slurm's programs are left out: srun listens on all interfaces
    for its nodes, which Slurm authenticates."""
    processes = []
    for pid in {pid for node in NODES for pid in slurm.tasks_of(node)}:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("HOLDFAST_HOME") == str(home) and process.name() != "srun":
                processes.append(process)
    return processes


def test_a_cancelled_step_a_time_limit_and_node_losses_change_no_bit(
    slurm: SlurmCluster, tmp_path: Path, calm: dict[int, str]
) -> None:
    place = Place(slurm, tmp_path, "cluster.slurm={slot_minutes: 60}", "checkpoint.grace_seconds=10", held=0, **LONG)
    first, second = place.submit(), place.submit()
    assert (first["created"], second["created"]) == (True, False)
    run = str(first["run_id"])
    place.let(20 + AHEAD)
    place.wait_for_step(run, 20)
    members = of_jobs(slurm, place.home)  # they listen on the addresses of the job, and on nothing open to other users
    addresses, sockets = listening(members), unix_listeners(members)
    assert addresses, "ranks of two nodes listen somewhere"
    assert {address for address, _ in addresses if not ipaddress.ip_address(address).is_loopback} == set()
    assert {name for name in sockets if not name.startswith("/") or open_to_others(Path(name))} == set()
    disturb(place, run, 20, lambda job: slurm.ask("scancel", f"{job}.0"))
    assert place.step(run, "train")["error"] == ""  # never went back into the queue

    def reach_limit(job: int) -> None:
        elapsed = int(slurm.ask("squeue", "--noheader", f"--jobs={job}", "--Format=TimeUsed").split(":")[0])
        slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={elapsed + 2}")
        until(lambda: "the ranks get SIGTERM: they save and exit" in place.logs(), 200)
        until(lambda: slurm.ask("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt") == "1", 200)
        slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")

    disturb(place, run, 40, reach_limit)
    # The job keeps its number, but each gang is another launch and another attempt.
    assert place.step(run, "train")["error"] == "requeued 1 time"

    def down(name: str) -> None:
        slurm.kill_node(name)
        slurm.start_node(name)

    disturb(place, run, 60, lambda _: down("n2"))
    disturb(place, run, 80, lambda _: down("n1"))  # n1 runs the batch job
    place.release()
    status = place.wait(run)
    assert status["state"] == "SUCCEEDED", f"{status}\n{place.logs()}"
    assert place.digest(run, STEPS) == calm[STEPS]
    gangs = attempts(place, run)
    assert [number for number, _ in gangs] == [1, 2, 3, 4, 5]
    assert gangs[:3] == [(1, 1), (2, 2), (3, 3)]  # a later launch that missed the node before Slurm did has no gang
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states == dict.fromkeys(("preprocess", "train", "evaluate", "register", "notify"), "SUCCEEDED")
    assert "resuming from step" in place.holdfast("logs", run, "--rank", "0")
    second = place.submit()
    assert (second["created"], second["run"]["id"]) == (False, first["run"]["id"])


def test_a_cancelled_or_overdue_run_has_saved_and_resumes(
    slurm: SlurmCluster, tmp_path: Path, calm: dict[int, str]
) -> None:
    place = Place(slurm, tmp_path, "cluster.deadline_hours=1", held=40 + AHEAD, **LONG)
    run = str(place.submit()["run_id"])
    place.wait_for_step(run, 40)
    assert "is stopping" in place.holdfast("stop", run)
    status = place.wait(run)
    assert status["state"] == "CANCELED", f"{status}\n{place.logs()}"
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states["notify"] == "SUCCEEDED"
    assert states["evaluate"] == "CANCELED"
    assert "204" in place.step(run, "train")["error"]
    assert 40 <= place.newest(run) < STEPS
    assert "has ended already" in place.holdfast("stop", run)

    place.let(60 + AHEAD)
    place.holdfast("resume", run)
    place.wait_for_step(run, 60)
    job = train_job(place, run)
    (marker,) = tmp_path.glob(f"home/slurm/*/train-{job}.began")
    marker.write_text(str(float(marker.read_text()) - 3600))
    slurm.ask("scontrol", "requeue", str(job))
    status = place.wait(run)
    assert status["state"] == "CANCELED", f"{status}\n{place.logs()}"
    train = place.step(run, "train")
    assert "exit code 17" in train["error"]
    assert "took longer than cluster.deadline_hours (1) in all its allocations" in train["error"]
    assert 60 <= place.newest(run) < STEPS
    assert place.digest(run, 60) == calm[60]


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
    chain = Chain.of(RunRequest(parse_spec("{name: a, data: {sources: [{uri: python:stdlib}]}}")))
    chain.folder.mkdir(parents=True)
    prefixes = ("--comment", "--chdir", "--output", "--job-name", "--open-mode")
    options = [option for option in options_of(chain, "preprocess", {}) if option.startswith(prefixes)]
    job = client.sbatch("#!/bin/bash\nenv\nsrun echo the step ran\n", [*options, "--mem=64M"])
    until(lambda: not client.jobs_of([job_name(chain.key, "preprocess")])[0].unfinished, 120)
    log = (chain.folder / f"preprocess-{job}.log").read_text()
    assert "the step ran" in log
    assert not [line for line in log.splitlines() if line.partition("=")[0] in inherited]
