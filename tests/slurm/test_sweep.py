"""A sweep as arrays of a real Slurm ends in the comparison of the local one, though a trial loses its allocation."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.launches import newest_launch
from tests.slurm.chain import LIKE_TWO_NODES, Place
from tests.slurm.cluster import SlurmCluster, until
from tests.whole import small

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

STEPS, HELD = 100, 60
LONG = {"training": {"steps": STEPS, "log_every": 50}, "checkpoint": {"every_steps": 20, "keep_last": 3}}
OVER = "training.optimizer.learning_rate=1e-3,1e-2"


def sweep(place: Place, *arguments: str) -> dict[str, Any]:
    """Submit a sweep. Returns the command's JSON."""
    sets = [argument for override in place.overrides for argument in ("--set", override)]
    output = place.holdfast("sweep", str(place.spec), *sets, "--json", *arguments)
    return dict(json.loads(output))


def comparison(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "home/store/sweeps").glob("*/comparison.json")
    return dict(json.loads(file.read_text()))


def tasks(place: Place, run: str) -> list[str]:
    """Slurm's ids of the tasks that train, as far as they are known."""
    return [task for step in place.status(run)["steps"] if step["name"].startswith("train-") for task in step["pods"]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The comparison of the same sweep on this machine."""
    folder = tmp_path_factory.mktemp("local")
    small.write_corpus(folder)
    small.write_spec(folder, **LONG)
    result = small.holdfast(folder, "spec.yaml", "--over", OVER, *LIKE_TWO_NODES, command="sweep")
    assert result.returncode == 0, result.stdout + result.stderr
    return comparison(folder)


def test_a_sweep_that_is_requeued_in_part_and_cancelled_and_resumed_ends_in_the_comparison_of_the_local_one(
    slurm: SlurmCluster, tmp_path: Path, local: dict[str, Any]
) -> None:
    place = Place(slurm, tmp_path, held=HELD, **LONG)
    submission = sweep(place, "--over", OVER)
    identity = submission["run_id"]
    assert identity == local["sweep_id"]
    assert sweep(place, "--over", OVER)["created"] is False
    runs = {row["changes"][0]: row["run_id"] for row in local["rows"]}
    second = runs["training.optimizer.learning_rate=1e-2"]
    (task,) = until(lambda: [task for task in tasks(place, identity) if task.endswith("_2")], 200)
    place.wait_for_step(second, 40)
    slurm.ask("scontrol", "requeue", task)
    until(lambda: newest_launch(place.store, second) > 1, 400)
    assert place.step(identity, "train-2")["error"] == "requeued 1 time"
    place.holdfast("stop", "small-sweep")
    status = place.wait(identity)
    assert status["state"] == "CANCELED", f"{status}\n{place.logs()}"
    assert not list(tmp_path.glob("home/store/sweeps/*/comparison.json"))
    place.release()
    place.holdfast("resume", "small-sweep")
    status = place.wait("small-sweep")
    assert status["state"] == "SUCCEEDED", f"{status}\n{place.logs()}"
    assert comparison(tmp_path) == local  # with the digests of all weights
    assert [step["name"] for step in status["steps"]] == [
        "preprocess", "train-1", "train-2", "evaluate-1", "evaluate-2", "compare", "register", "notify",
    ]  # fmt: skip
    best = next(iter(local["rows"]))["run_id"]
    assert [path.parent.parent.name for path in tmp_path.glob("home/store/runs/*/registrations/*.json")] == [best]
    assert "resuming from step" in place.holdfast("logs", identity, "--step", "train-2")
    assert sweep(place, "--over", OVER)["created"] is False
    table = place.holdfast("show", "small-sweep")
    assert best in table


def test_a_failed_trial_is_listed_the_rest_is_compared_and_resume_retries_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    place = Place(slurm, tmp_path)
    options = ("--over", "model.context=32,4096", "--concurrent-trials", "1")  # more than the held-out text has
    submission = sweep(place, *options)
    status = place.wait(submission["run_id"])
    assert status["state"] == "FAILED", f"{status}\n{place.logs()}"
    steps = {step["name"]: step["state"] for step in status["steps"]}
    assert steps == {
        "preprocess": "SUCCEEDED", "train-1": "SUCCEEDED", "train-2": "FAILED", "evaluate-1": "SUCCEEDED",
        "evaluate-2": "CANCELED", "compare": "SUCCEEDED", "register": "SUCCEEDED", "notify": "SUCCEEDED",
    }, place.logs()  # fmt: skip
    assert "exit code 11" in status["message"]
    table = comparison(tmp_path)
    assert [row["changes"] for row in table["rows"]] == [["model.context=32"]]
    assert [(trial["changes"], trial["exit_code"]) for trial in table["failed"]] == [(["model.context=4096"], 11)]
    resumed = json.loads(place.holdfast("resume", "small-sweep", "--json"))
    assert resumed["created"] is True
    place.wait(resumed["run"]["id"])
    assert comparison(tmp_path) == table
    assert len(list(tmp_path.glob("home/store/runs/*/attempts/*.json"))) == 1
