"""MLflow on PostgreSQL: the guarantees of SQLite hold there too, where writers do not wait for each other."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store import Store
from holdfast.tracking import RunTracker, champion, connect, versions
from tests import warm
from tests.register.conftest import Finish, finish, finish_in
from tests.tracking import made
from tests.tracking.conftest import bare_home, store
from tests.tracking.postgres import PASSWORD, cluster
from tests.tracking.test_concurrency import bare_run, race, register_two_concurrently

__all__ = ["bare_home", "finish", "finish_in", "store"]
pytestmark = pytest.mark.slow
SPEC = made.spec()


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    with cluster() as uri:
        yield uri


def create_database(postgresql: str, template: str = "template1") -> str:
    """A new database, a copy of the template. Returns its URI. Its name is new: under a reused one, this process would
    find MLflow's cached state of it."""
    import psycopg

    name = f"test{uuid.uuid4().hex}"
    with psycopg.connect(postgresql.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return f"{postgresql.rpartition('/')[0]}/{name}"


@pytest.fixture(scope="module")
def template(postgresql: str) -> str:
    """The name of a database with MLflow's tables. Another process creates them: a template has no open connection."""
    uri = create_database(postgresql)
    created = warm.run([sys.executable, "-c", f"from holdfast.tracking import connect; connect({uri!r})"], os.environ)
    assert created.returncode == 0, created.stderr
    return uri.rpartition("/")[2]


@pytest.fixture
def mlflow(postgresql: str, template: str, bare_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", create_database(postgresql, template))


@pytest.mark.slow
def test_two_concurrent_clients_of_an_empty_database_both_find_its_tables(
    postgresql: str, bare_home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", create_database(postgresql))
    assert len(set(race("describe", "", store))) == 1


def test_a_tracked_run_has_every_step_once(mlflow: None, store: Store) -> None:
    made.write_history(store, 0, 8)
    first = RunTracker.open(SPEC, made.RUN_ID, made.DATASET_ID, store)
    assert first.sync() == 8
    tracker = RunTracker.open(SPEC, made.RUN_ID, made.DATASET_ID, store)
    assert tracker.sync() == 0
    made.write_history(store, 8, 12)
    assert tracker.sync() == 4
    assert first.finish("FINISHED")
    run = connect().get_run(first.mlflow_run_id)
    assert run.info.status == "FINISHED"
    rows = connect().get_metric_history(first.mlflow_run_id, "loss")
    assert [(row.step, row.value) for row in sorted(rows, key=lambda row: row.step)] == [
        (step, 10.0 / step) for step in range(1, 13)
    ]


@pytest.mark.slow
def test_two_that_register_one_run_at_the_same_moment_make_one_version(
    mlflow: None, bare_home: Path, store: Store, finish: Finish
) -> None:
    finish()
    bare = bare_run(bare_home, made.RUN_ID)
    assert race("register", "SqlRegisteredModel", store) == ["1", "1"]
    [version] = versions("story", store)
    assert champion("story", store) == version
    assert connect().get_run(bare).data.tags["holdfast.dataset_id"] == made.DATASET_ID


@pytest.mark.slow
def test_two_concurrently_registered_models_get_two_versions_and_keep_the_champion(
    mlflow: None, store: Store, finish: Finish
) -> None:
    assert PASSWORD not in register_two_concurrently(store, finish)


@pytest.mark.slow
def test_two_concurrently_registered_challengers_get_two_versions(mlflow: None, store: Store, finish: Finish) -> None:
    finish()
    finish(made.OTHER)
    got = race([f"challenge {made.RUN_ID}", f"challenge {made.OTHER}"], "SqlRegisteredModel", store)
    assert sorted(got) == ["1", "2"]
    assert champion("story", store) is None
    assert connect().get_model_version_by_alias("story", "challenger").version in (1, 2)
