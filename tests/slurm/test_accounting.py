"""Status of a run whose jobs the controller has forgotten: the accounting of a real slurmdbd has them."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.chain import Place
from tests.slurm.cluster import ACCOUNTING_PROGRAMS, PROGRAMS, SlurmCluster, missing
from tests.whole.submitting import until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def accounted() -> Iterator[SlurmCluster]:
    """Two nodes, and slurmdbd over a MariaDB."""
    if why := missing((*PROGRAMS, *ACCOUNTING_PROGRAMS)):
        pytest.skip(f"no Slurm with accounting: {why}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        with SlurmCluster(Path(folder), accounting=True, remembers_seconds=2) as cluster:
            yield cluster


def forgotten(cluster: SlurmCluster, run: str) -> None:
    """Wait until the controller has forgotten all jobs, and the accounting reports all five of a run as ended."""
    first = int(run.rpartition("-")[2])
    jobs = [str(first + number) for number in range(5)]
    query = ("sacct", "--allocations", "--noheader", f"--jobs={','.join(jobs)}", "--format=JobIDRaw,End")
    until(lambda: not cluster.ask("squeue", "--noheader", "--states=all"), 120)
    until(lambda: [x.split()[0] for x in cluster.ask(*query).splitlines() if "Unknown" not in x] == jobs, 120)


def test_the_status_of_a_purged_run_comes_from_the_accounting(accounted: SlurmCluster, tmp_path: Path) -> None:
    place = Place(accounted, tmp_path, "evaluation.max_perplexity=1.0001")
    run = place.submit()["run"]["id"]
    place.wait(run)
    forgotten(accounted, run)
    status = place.status(run)
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states.pop("register") == "SKIPPED"
    assert states == dict.fromkeys(("preprocess", "train", "evaluate", "notify"), "SUCCEEDED")
    assert status["state"] == "SUCCEEDED"
    assert place.step(run, "register")["error"] == "evaluate says not_blessed"
    assert [entry["id"] for entry in json.loads(place.holdfast("runs", "--backend", "slurm", "--json"))] == [
        status["id"]
    ]


def test_a_failed_step_is_reported_with_its_exit_code_and_message(accounted: SlurmCluster, tmp_path: Path) -> None:
    place = Place(accounted, tmp_path)
    for file in (tmp_path / "corpus").iterdir():
        file.write_text("")
    run = place.submit()["run"]["id"]
    place.wait(run)
    forgotten(accounted, run)
    status = place.status(run)
    assert status["state"] == "FAILED"
    failed = place.step(run, "preprocess")["error"]
    assert failed.startswith("exit code 11 (")
    assert place.step(run, "train")["error"] == "not begun: a step before it did not succeed"
    assert place.step(run, "notify")["state"] == "SUCCEEDED"
    assert failed.split(": ", 1)[1] in place.holdfast("logs", run, "--step", "notify")
