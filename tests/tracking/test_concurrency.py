"""Several processes that write the same data to one MLflow: losing a race is not an outage."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from holdfast.components.register import run as register
from holdfast.store import Store
from holdfast.tracking import RunTracker, champion, connect, rollback, versions
from holdfast.tracking.failures import write_missing
from tests import warm
from tests.register.conftest import Finish, finish, finish_in
from tests.registered import register_version
from tests.tracking import made

__all__ = ["finish", "finish_in"]
SPEC = made.spec()


def race(what: str | list[str], tables: str, store: Store, count: int = 2) -> list[str]:
    """The results of several processes, which all do `what` or each do one of several things. Before the first
    insertion into each table, every process waits until all have found no row."""
    work = [what] * count if isinstance(what, str) else what
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                warm.popen(
                    [sys.executable, "-m", "tests.tracking.racer", name, tables, store.url],
                    os.environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for name in work
        ]
        for place in ["start", *filter(None, tables.split(","))]:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == f"held {place}\n", process.communicate()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        results = [(*process.communicate(timeout=240), process.returncode) for process in processes]
    assert [code for *_, code in results] == [0] * len(work), "\n".join(error_text for _, error_text, _ in results)
    return [output.strip() for output, *_ in results]


def bare_run(home: Path, run_id: str) -> str:
    """An MLflow run without a description."""
    client = connect()
    existing = client.get_experiment_by_name("story")
    experiment = (
        existing.experiment_id
        if existing
        else client.create_experiment("story", artifact_location=(home / "artifacts").as_uri())
    )
    return str(client.create_run(experiment, tags={"holdfast.run_id": run_id}).info.run_id)


@pytest.mark.slow
def test_two_that_write_every_row_at_the_same_moment_register_one_version(
    home: Path, store: Store, finish: Finish
) -> None:
    finish()
    bare = bare_run(home, made.RUN_ID)
    assert race("register", "SqlParam,SqlTag,SqlDataset,SqlRegisteredModel,SqlRegisteredModelAlias", store) == [
        "1",
        "1",
    ]
    [version] = versions("story", store)
    assert champion("story", store) == version
    run = connect().get_run(bare)
    assert run.data.params["training.steps"] == str(SPEC.training.steps)
    assert run.data.tags["holdfast.dataset_id"] == made.DATASET_ID
    assert [dataset_input.dataset.digest for dataset_input in run.inputs.dataset_inputs] == [made.DATASET_ID]


def test_two_concurrent_writers_of_a_known_dataset_both_succeed(home: Path, store: Store) -> None:
    assert RunTracker.open(SPEC, "another", made.DATASET_ID, store).mlflow_run_id
    bare = bare_run(home, made.RUN_ID)
    assert race("describe", "SqlInput", store) == [bare, bare]
    assert len(connect().get_run(bare).inputs.dataset_inputs) == 1


def register_two_concurrently(store: Store, finish: Finish) -> str:
    """Two blessed models race on the tracking server: one becomes champion, the other is compared with it first."""
    finish()
    finish(made.OTHER)  # each was blessed while no champion existed
    got = race([made.RUN_ID, made.OTHER], "SqlRegisteredModel", store)
    assert sorted(got)[1] == "refused"
    assert sorted(version.version for version in versions("story", store)) == [1, 2]
    first_champion = champion("story", store)
    assert first_champion is not None
    assert str(first_champion.version) == sorted(got)[0]
    other_run = made.OTHER if first_champion.run_id == made.RUN_ID else made.RUN_ID
    finish(other_run, verdict={"champion": first_champion.identity})  # evaluated again
    registration = register(SPEC, other_run, store)
    assert registration.version == 3 - first_champion.version
    current = champion("story", store)
    assert current is not None
    assert (current.run_id, current.tags["holdfast.replaced_champion"]) == (other_run, str(first_champion.version))
    assert rollback("story", store) == first_champion
    return registration.tracking


@pytest.mark.slow
def test_one_of_two_concurrently_registered_models_is_champion_and_the_other_needs_comparison(
    home: Path, store: Store, finish: Finish
) -> None:
    register_two_concurrently(store, finish)


def test_two_concurrent_promotions_record_the_same_former_champion(home: Path, store: Store) -> None:
    client = connect()
    for number in range(2):
        register_version(store, "story", f"run-{number}", "runs/x/export/x/", "state")
    client.set_registered_model_alias("story", "champion", "1")
    assert race("2", "SqlModelVersionTag", store) == ["2", "2"]
    current = champion("story", store)
    assert current is not None
    assert (current.version, current.tags["holdfast.replaced_champion"]) == (2, "1")


@pytest.mark.slow
def test_many_concurrent_registrations_create_one_version(home: Path, store: Store, finish: Finish) -> None:
    finish()
    assert len(set(race("register", "", store, count=4))) == 1
    assert len(versions("story", store)) == 1
    client = connect()
    experiment = client.get_experiment_by_name("story")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_a_refused_write_without_concurrent_writers_fails_after_five_tries(home: Path) -> None:
    tries = []

    def refused(missing: list[str]) -> None:
        tries.append(missing)
        raise MlflowException("no")

    with pytest.raises(MlflowException, match="no"):
        write_missing(lambda: ["row"], refused)
    assert len(tries) == 5
