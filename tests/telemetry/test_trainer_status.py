"""The status of a TrainJob, posted to a real HTTPS server that answers as the Kubeflow Trainer's."""

import logging
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.telemetry import emit
from holdfast.telemetry.events import Progress
from holdfast.telemetry.trainer_status import reporting_trainer_status, status_of
from tests.telemetry.trainer_server import TrainerServer, trainer_server, write_certificate


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrainerServer]:
    with trainer_server(tmp_path) as server:
        yield server


def progress(step: int, **more: Any) -> Progress:
    return Progress(step=step, steps=40, seconds_left=90.5, loss=2.25, **more)


def wait_for(server: TrainerServer, count: int) -> None:
    limit = time.monotonic() + 20
    while len(server.bodies) + server.refused < count and time.monotonic() < limit:
        time.sleep(0.01)


def test_the_trainjob_gets_the_newest_progress_and_the_last_one(server: TrainerServer, tmp_path: Path) -> None:
    with reporting_trainer_status(pause=0.01):
        emit(progress(10, grad_norm=float("nan")))
        wait_for(server, 1)
        server.token = "second"
        (tmp_path / "token").write_text("second")  # it was renewed
        emit(progress(20))
        wait_for(server, 2)
        emit(progress(40))
    statuses = [body["trainerStatus"] for body in server.bodies]
    assert [status["progressPercentage"] for status in statuses] == [25, 50, 100]
    assert statuses[0]["estimatedRemainingSeconds"] == 90
    assert statuses[0]["metrics"] == [{"name": "step", "value": "10"}, {"name": "loss", "value": "2.25"}]
    assert abs(datetime.fromisoformat(statuses[0]["lastUpdatedTime"]).timestamp() - time.time()) < 60
    assert server.refused == 0


def test_posts_are_limited_and_a_slow_server_does_not_delay_the_training(server: TrainerServer) -> None:
    server.answers.clear()
    with reporting_trainer_status(pause=60):
        for step in range(1, 30):
            emit(progress(step))
        assert not server.bodies, "the training went on before an answer"
        server.answers.set()
    assert len(server.bodies) <= 2  # the first and the last one
    assert server.bodies[-1]["trainerStatus"]["metrics"][0]["value"] == "29"


def test_a_server_that_refuses_is_a_warning_once(server: TrainerServer, caplog: pytest.LogCaptureFixture) -> None:
    server.token = "other"
    caplog.set_level(logging.INFO, "holdfast")
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
        wait_for(server, 1)
        emit(progress(20))
        wait_for(server, 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "status 403" in warnings[0]


def test_another_authority_is_not_trusted(
    server: TrainerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_certificate(tmp_path)
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert server.bodies == []


@pytest.mark.parametrize("name", ["KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"])
def test_nothing_is_posted_outside_of_a_trainjob(
    server: TrainerServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name)
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert server.bodies == []


def test_other_ranks_post_nothing(server: TrainerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert server.bodies == []


def test_values_fit_the_fields_of_the_trainjob() -> None:
    status = status_of(Progress(step=50, steps=40, seconds_left=1e12, loss=1e-300))["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 2**31 - 1)
    assert all(0 < len(metric["value"]) <= 64 for metric in status["metrics"])
