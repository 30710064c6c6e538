"""Several processes that write the same thing to one MLflow: a race lost is no outage."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from holdfast.components.store import Store
from holdfast.components.tracking import RunTracker, champion, connect, versions
from holdfast.components.tracking.conflicts import write_missing
from tests.register.conftest import Finish, finish
from tests.tracking import made

__all__ = ["finish"]
SPEC = made.spec()


def race(what: str, tables: str, store: Store, count: int = 2) -> list[str]:
    """What so many processes got. Before the first insertion into each of the tables every one of them waits until all
    stand there, having found no row."""
    command = [sys.executable, "-m", "tests.tracking.racer", what, tables, store.url]
    with ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for _ in range(count)
        ]
        for place in ["start", *filter(None, tables.split(","))]:
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == f"held {place}\n", racer.communicate()
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
        ended = [(*racer.communicate(timeout=240), racer.returncode) for racer in racers]
    assert [code for *_, code in ended] == [0] * count, "\n".join(said for _, said, _ in ended)
    return [out.strip() for out, *_ in ended]


def bare_run(home: Path, run_id: str) -> str:
    """An MLflow run that nobody has described yet."""
    client = connect()
    found = client.get_experiment_by_name("story")
    experiment = (
        found.experiment_id
        if found
        else client.create_experiment("story", artifact_location=(home / "artifacts").as_uri())
    )
    return str(client.create_run(experiment, tags={"holdfast.run_id": run_id}).info.run_id)


def test_two_that_write_every_row_at_the_same_moment_register_one_version(
    home: Path, store: Store, finish: Finish
) -> None:
    finish()
    bare = bare_run(home, made.RUN_ID)
    assert race("register", "SqlParam,SqlTag,SqlDataset,SqlRegisteredModel,SqlRegisteredModelAlias", store) == [
        "1",
        "1",
    ]
    [version] = versions("story")
    assert champion("story") == version
    run = connect().get_run(bare)
    assert run.data.params["training.steps"] == str(SPEC.training.steps)
    assert run.data.tags["holdfast.dataset_id"] == made.DATASET_ID
    assert [one.dataset.digest for one in run.inputs.dataset_inputs] == [made.DATASET_ID]


def test_two_that_name_a_known_dataset_at_once_both_succeed(home: Path, store: Store) -> None:
    assert RunTracker.open(SPEC, "another", made.DATASET_ID, store).mlflow_run_id
    bare = bare_run(home, made.RUN_ID)
    assert race("describe", "SqlInput", store) == [bare, bare]
    assert len(connect().get_run(bare).inputs.dataset_inputs) == 1


def test_two_promotions_at_once_remember_the_same_former_champion(home: Path, store: Store) -> None:
    client = connect()
    client.create_registered_model("story")
    tags = {"holdfast.store": store.url, "holdfast.export": "", "holdfast.dataset_id": "d", "holdfast.metrics": "{}"}
    for number in range(2):
        client.create_model_version("story", "runs:/x", tags={"holdfast.run_id": str(number), **tags})
    client.set_registered_model_alias("story", "champion", "1")
    assert race("2", "SqlModelVersionTag", store) == ["2", "2"]
    found = champion("story")
    assert found is not None
    assert (found.version, found.tags["holdfast.replaced_champion"]) == (2, "1")


@pytest.mark.slow
def test_many_registrations_at_once_make_one_version(home: Path, store: Store, finish: Finish) -> None:
    finish()
    assert len(set(race("register", "", store, count=6))) == 1
    assert len(versions("story")) == 1
    client = connect()
    experiment = client.get_experiment_by_name("story")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_what_is_refused_although_nobody_else_writes_is_an_outage_and_ends(home: Path) -> None:
    tries = []

    def refused(missing: list[str]) -> None:
        tries.append(missing)
        raise MlflowException("no")

    with pytest.raises(MlflowException, match="no"):
        write_missing(lambda: ["row"], refused)
    assert len(tries) == 5
