"""A real MLflow server behind a reverse proxy: under a path, and with replies of the proxy instead of the server's."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import requests

from holdfast.components.register import run as register
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.store import Store
from holdfast.tracking import TrackingUnavailable, champion, connect, require_usable, versions
from holdfast.tracking.artifacts import read_text
from tests.http_server import QuietHandler, running
from tests.register.conftest import Finish, finish, finish_in
from tests.tracking import made
from tests.tracking.test_tracker import assert_holds_each_step_once, opened

__all__ = ["finish", "finish_in"]
pytestmark = pytest.mark.slow
PATH = "/team/mlflow"
PAGE = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


@contextmanager
def proxied(server: str, path: str = "", replies: Iterable[int] = (), lost: bool = False) -> Iterator[str]:
    """The address of a proxy of `server`. It sends each status in `replies` instead of a reply of the server: before
    the server has the request, or with `lost` after the server has executed it."""

    statuses = iter(replies)

    class Proxy(QuietHandler):
        def forward(self) -> None:
            body, status = self.body(), next(statuses, 0)
            if not self.path.startswith(f"{path}/"):
                return self.answer(404, PAGE)
            if status and not lost:
                return self.answer(status, PAGE, Content_Type="text/html")
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            reply = requests.request(
                self.command, server + self.path.removeprefix(path), data=body, headers=headers, timeout=120
            )
            return self.answer(status or reply.status_code, PAGE if status else reply.content)

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        setattr(Proxy, f"do_{method}", Proxy.forward)
    with running(Proxy) as url:
        yield f"{url}{path}/"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("FACTOR", "JITTER"):  # between two tries
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_BACKOFF_{pause}", "0")


def test_a_server_under_a_path_has_the_metrics_artifacts_pages_and_versions(
    server: str, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write_history(store, 0, 8)
    with proxied(server, PATH) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        tracker = opened(store)
        require_usable(made.spec())
        tracker.begin()
        assert tracker.sync() == 8
        assert tracker.finish("FINISHED")
        assert_holds_each_step_once(tracker, 8)
        assert "story" in read_text(connect(), tracker.mlflow_run_id, "spec.yaml")
        assert tracker.page().startswith(f"{url}#/experiments/")
        finish()
        register(made.spec(), made.RUN_ID, store)
        assert [champion("story", store)] == versions("story", store)
        client = connect()
        client.delete_experiment(client.get_experiment_by_name("story").experiment_id)
        with pytest.raises(HoldfastError, match="deleted in MLflow"):
            require_usable(made.spec())


@pytest.mark.parametrize("status", [500, 502, 429])
def test_metrics_wait_for_a_server_whose_proxy_refuses(
    status: int, server: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    made.write_history(store, 0, 8)
    with proxied(server, replies=itertools.repeat(status, 4)) as url:
        tracker = opened(store, uri=url)
        assert [tracker.sync(), tracker.sync()] == [0, 8]
        assert_holds_each_step_once(tracker, 8)
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "are not copied to MLflow for now" in text]) == 1
    assert len([text for text in messages if "MLflow is back" in text]) == 1


@pytest.mark.parametrize("status", [502, 503])
def test_a_server_whose_proxy_always_refuses_is_an_outage_and_the_model_stays_unregistered(
    status: int, server: str, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    with proxied(server, replies=itertools.repeat(status)) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        require_usable(made.spec())
        tracker = opened(store)
        tracker.begin()
        assert not tracker.finish("FINISHED")
        calls: list[Callable[[], object]] = [
            lambda: tracker.mlflow_run_id,
            lambda: register(made.spec(), made.RUN_ID, store),
            lambda: versions("story", store),
        ]
        for call in calls:
            with pytest.raises(TrackingUnavailable, match=str(status)) as error:
                call()
            assert error.value.exit_code == ExitCode.STORE_UNREACHABLE
            assert len(str(error.value)) < 1000
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert versions("story", store) == []


def test_requests_that_are_executed_though_their_reply_is_lost_make_one_run_and_one_version(
    server: str, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write_history(store, 0, 8)
    with proxied(server, replies=itertools.cycle([502, 0]), lost=True) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        tracker = opened(store)
        assert tracker.sync() == 8
        assert tracker.finish("FINISHED")
        finish()
        register(made.spec(), made.RUN_ID, store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert_holds_each_step_once(opened(store), 8)
    [version] = versions("story", store)
    assert champion("story", store) == version
