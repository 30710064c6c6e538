"""Submissions to a real Slurm of two nodes. The whole DAG runs as jobs in test_faults.py."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.components.preprocess import run as preprocess
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import load_spec
from holdfast.store import open_store
from tests.slurm.chain import Place
from tests.slurm.cluster import SlurmCluster
from tests.whole.submitting import until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


def test_concurrent_identical_submissions_create_one_chain(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    with ThreadPoolExecutor() as pool:
        submissions = list(pool.map(lambda _: place.submit(), range(3)))
    assert sorted(submission["created"] for submission in submissions) == [False, False, True]
    assert len({submission["run"]["id"] for submission in submissions}) == 1
    place.holdfast("stop", submissions[0]["run_id"])
    assert place.wait(submissions[0]["run_id"])["state"] == "CANCELED", place.logs()


def test_a_corpus_that_an_array_tokenises_is_the_same_dataset(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(slurm, tmp_path, "data.fan_out=3")
    run = place.submit()["run_id"]
    until(lambda: list((tmp_path / "home/store/datasets").glob("[0-9a-f]*/dataset.json")), 600)
    place.holdfast("stop", run)
    status = place.wait(run)
    assert "tokenise" in [step["name"] for step in status["steps"]], place.logs()
    assert len(list((tmp_path / "home/slurm").glob("*/tokenise-*_[012].log"))) == 3
    monkeypatch.chdir(tmp_path)
    preprocess(with_absolute_paths(load_spec(place.spec)), open_store((tmp_path / "alone").as_uri()))
    assert place.dataset() == place.dataset(tmp_path / "alone")
