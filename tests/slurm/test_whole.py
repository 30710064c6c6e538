"""The whole DAG as jobs of a real Slurm, on two nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.chain import Place
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


def test_the_whole_dag_runs_as_jobs_and_the_same_submission_again_is_that_run(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    place = Place(slurm, tmp_path)
    made = place.submit()
    assert made["created"] is True
    assert place.submit()["created"] is False
    status = place.wait(made["run_id"])
    assert status["state"] == "SUCCEEDED", place.logs()
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states == dict.fromkeys(("preprocess", "train", "evaluate", "register", "notify"), "SUCCEEDED")
    assert "starting from step 0 of 10" in place.holdfast("logs", made["run_id"], "--rank", "0")
    again = place.submit()
    assert (again["created"], again["run"]["id"]) == (False, made["run"]["id"])


def test_two_who_submit_the_same_at_once_get_one_chain(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda _: place.submit(), range(3)))
    assert sorted(one["created"] for one in made) == [False, False, True]
    assert len({one["run"]["id"] for one in made}) == 1
    assert place.wait(made[0]["run_id"])["state"] == "SUCCEEDED", place.logs()


def test_a_corpus_that_an_array_tokenises_is_the_same_dataset(slurm: SlurmCluster, tmp_path: Path) -> None:
    one, many = (Place(slurm, tmp_path / name) for name in ("one", "many"))
    many.overrides.append("data.fan_out=3")
    datasets = []
    for place in (one, many):
        run = place.submit()["run_id"]
        status = place.wait(run)
        assert status["state"] == "SUCCEEDED", place.logs()
        names = [step["name"] for step in status["steps"]]
        assert ("tokenise" in names) == (place is many)
        datasets.append(place.dataset())
    assert datasets[0] == datasets[1]
    assert len(list((many.folder / "home/slurm").glob("*/tokenise-*_[012].log"))) == 3
