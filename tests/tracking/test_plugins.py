"""MLflow with artifacts, a database or an experiment that this machine cannot use: the message and the exit code."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client

from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.store import Store
from holdfast.tracking import TrackingUnavailable, artifacts, connect, registered, require_usable
from holdfast.tracking.connection import translated
from tests.http_server import QuietHandler, running
from tests.tracking import made
from tests.tracking.test_tracker import assert_holds_each_step_once, opened


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # Earlier tests gave a client or the session of the process credentials.
    _cached_get_s3_client.cache_clear()
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that gives the same answer to every request."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(status, body)

    with running(Handler) as url:
        yield url


@pytest.mark.parametrize("root", ["s3://missing/x", "wasbs://c@a.blob.core.windows.net/x", "file:///proc/nothing"])
def test_metrics_are_copied_though_artifacts_cannot_be_written(
    root: str, home: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    connect().create_experiment("story", artifact_location=root)
    made.write_history(store, 0, 5)
    tracker = opened(store)
    tracker.begin()
    assert tracker.sync() == 5
    made.write_history(store, 5, 7)
    assert tracker.sync() == 2
    assert tracker.finish("FINISHED")
    assert_holds_each_step_once(tracker, 7)
    tracker.log_evaluation({"step": 7, "metrics": {"loss": 1.0}, "word": "blessed"})
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["holdfast.tracking"]
    assert "the artifact spec.yaml is not in MLflow" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("root", "code"),
    [
        ("s3://missing/x", ExitCode.ACCESS_DENIED),
        ("wasbs://c@a.blob.core.windows.net/x", ExitCode.BAD_SPEC),
        ("nowhere://x/y", ExitCode.STORE_UNREACHABLE),
    ],
)
def test_a_failure_of_a_plugin_has_the_code_of_what_it_means(root: str, code: ExitCode, home: Path) -> None:
    client = connect()
    run = client.create_run(client.create_experiment("story", artifact_location=root))
    with pytest.raises(TrackingUnavailable) as error, translated("sqlite:///x"):
        artifacts.write_text(client, run.info.run_id, "text", "a.txt")
    assert error.value.exit_code == code


@pytest.mark.slow
def test_a_client_that_waits_for_credentials_is_left_after_a_bound(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, host)
        monkeypatch.setattr(artifacts, "SECONDS", 0.5)
        connect().create_experiment("story", artifact_location="gs://missing/x")
        made.write_history(store, 0, 3)
        start = time.monotonic()
        assert opened(store).sync() == 3
        assert time.monotonic() - start < 60  # without the limit, two minutes
    assert "did not end within 0.5 s" in caplog.text


def test_a_holdfast_bug_is_not_reported_as_an_mlflow_outage() -> None:
    scope: dict[str, object] = {"__name__": "holdfast.tracking.tracker"}
    exec("def mistaken(): return {}['missing']", scope)
    with pytest.raises(KeyError), translated("sqlite:///x"):
        scope["mistaken"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("./mlruns", "keeps nothing in folders"),
        ("file:///tmp/mlruns", "keeps nothing in folders"),
        ("mysql+pymysql://ann:secret@127.0.0.1:9/db", "driver that is not installed"),
        ("mssql+nothing://ann:secret@127.0.0.1:9/db", "driver that is not installed"),
    ],
)
def test_an_address_that_mlflow_refuses_for_ever_is_no_outage(
    uri: str, words: str, bare_home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for ask in (lambda: registered(store), lambda: require_usable(made.spec())):
        with pytest.raises(HoldfastError, match=words) as error:
            ask()
        assert error.value.exit_code == ExitCode.BAD_SPEC
        assert "secret" not in str(error.value)


def test_a_deleted_experiment_is_reported_before_the_training(home: Path, store: Store) -> None:
    client = connect()
    require_usable(made.spec())
    experiment = client.create_experiment("story")
    require_usable(made.spec())
    client.delete_experiment(experiment)
    with pytest.raises(HoldfastError, match=f"deleted in MLflow; restore it .*--experiment-id {experiment}") as error:
        require_usable(made.spec())
    assert error.value.exit_code == ExitCode.NOT_FOUND
    with pytest.raises(TrackingUnavailable, match="deleted in MLflow") as refused:
        opened(store).mlflow_run_id  # noqa: B018
    assert refused.value.exit_code == ExitCode.NOT_FOUND


def test_a_server_is_checked_before_the_training(bare_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = b'{"experiment": {"experiment_id": "7", "name": "story", "lifecycle_stage": "deleted"}}'
    for status, body, code in ((200, deleted, ExitCode.NOT_FOUND), (401, b"", ExitCode.ACCESS_DENIED)):
        with answering(status, body) as url:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
            with pytest.raises(HoldfastError) as error:
                require_usable(made.spec())
            assert error.value.exit_code == code
    for status, body in ((404, b"{}"), (500, b""), (200, b"["), (200, b"[" * 5000)):
        with answering(status, body) as url:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
            require_usable(made.spec())  # a temporary error stops no run
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    require_usable(made.spec())
