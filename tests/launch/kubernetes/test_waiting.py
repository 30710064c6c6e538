"""Pods that do not start: reported in the cluster's words within seconds, and waited for as long as the spec says.
Also a queue that takes a job back and admits it again."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.launch.kubernetes import KubernetesLauncher, follow, watch
from holdfast.spec import ExitCode
from tests.cluster.emulation import Emulation
from tests.cluster.objects import StatusError
from tests.faults.nodes import PATIENCE
from tests.launch.kubernetes.conftest import RUN, SERVE, Running, each, in_vain, job, python, settings

FIRST = f"holdfast-{RUN}-1"
SOON = 0.05  # minutes


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(follow, "QUIET_SECONDS", 0.5)


def launcher(cluster: Emulation) -> KubernetesLauncher:
    return KubernetesLauncher(settings(), cluster.api())


def wait_for_words(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Wait until the launcher has logged this."""
    for _ in range(1800):
        if words in caplog.text:
            return
        threading.Event().wait(0.1)
    raise AssertionError(caplog.text)


@pytest.mark.parametrize(
    ("refuse", "more", "words", "code"),
    [
        (lambda cluster: cluster.set_quota({"pods": "1"}), {}, "exceeded quota: small", ExitCode.UNSCHEDULABLE),
        (lambda cluster: None, {"service_account": "nobody"}, 'serviceaccount "nobody" not found', ExitCode.NOT_FOUND),
        (
            lambda cluster: cluster.label_namespace({"pod-security.kubernetes.io/enforce": "restricted"}),
            {"capabilities": ["IPC_LOCK"]}, "violates PodSecurity", ExitCode.ACCESS_DENIED,
        ),
    ],
    ids=["quota", "account", "pod security"],
)  # fmt: skip
def test_a_refusal_of_pods_is_logged_immediately_and_ends_the_job_after_the_timeout(
    cluster: Emulation,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[Emulation], None],
    more: dict[str, Any],
    words: str,
    code: ExitCode,
) -> None:
    caplog.set_level(logging.WARNING, "holdfast.launch")
    in_vain(monkeypatch, lambda: "of 2 pods" in caplog.text and words in caplog.text)
    refuse(cluster)
    cluster.kubelet.program = each(SERVE, SERVE)
    ending = Running(launcher(cluster), job(**more)).end()
    assert ending.code == code
    assert words in ending.detail and "of 2 pods" in ending.detail
    assert f"waiting: {ending.detail.split(words)[0]}{words}" in caplog.text
    assert cluster.jobs() == []


def test_a_job_without_a_running_operator_times_out_too(cluster: Emulation) -> None:
    cluster.operator.reconcile = lambda: None  # type: ignore[method-assign]
    ending = Running(launcher(cluster), job(pending_timeout_minutes=SOON)).end()
    assert ending.code == ExitCode.UNSCHEDULABLE
    assert "0 of 2 pods" in ending.detail and "does the controller of its kind run?" in ending.detail


def test_a_full_volcano_queue_is_reported_with_the_message_of_volcano(
    cluster: Emulation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Volcano emits an event of type Normal about the PodGroup (volcano-sh/volcano: pkg/scheduler/plugins/capacity)."""
    caplog.set_level(logging.WARNING, "holdfast.launch")
    message = "queue resource quota insufficient: insufficient cpu"
    in_vain(monkeypatch, lambda: message in caplog.text)
    overrides: dict[str, Any] = {"job": "volcano", "scheduler": "volcano"}
    running = Running(KubernetesLauncher(settings(**overrides), cluster.api()), job(**overrides))
    until(cluster, lambda: cluster.objects.all("jobs"))
    (volcano_job,) = cluster.objects.all("jobs")
    group = {"kind": "PodGroup", "name": f"{FIRST}-{volcano_job['metadata']['uid']}"}
    event = {"metadata": {"name": "reported"}, "involvedObject": group, "message": message}
    cluster.objects.create("events", {**event, "type": "Normal", "reason": "Unschedulable"})
    ending = running.end()
    assert ending.code == ExitCode.UNSCHEDULABLE
    assert f"0 of 2 pods of job {FIRST} have started: Unschedulable: {message}" in ending.detail


def test_a_rendezvous_timeout_names_what_blocks_the_missing_pods(
    cluster: Emulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast.launch")
    cluster.set_quota({"pods": "1"})
    marker = cluster.token.parent / "reported"
    wait = f"import os, sys, time\nwhile not os.path.exists({str(marker)!r}): time.sleep(0.1)\n"
    cluster.kubelet.program = each(f"{wait}sys.exit({int(ExitCode.RENDEZVOUS_TIMEOUT)})", SERVE)
    running = Running(launcher(cluster), job())
    wait_for_words(caplog, "exceeded quota: small")
    marker.touch()
    ending = running.end()
    assert ending.code == ExitCode.RENDEZVOUS_TIMEOUT
    assert "1 of 2 pods" in ending.detail and "exceeded quota: small" in ending.detail


def suspend(cluster: Emulation, word: bool) -> None:
    cluster.objects.change("pytorchjobs", FIRST, lambda found: found["spec"]["runPolicy"].update(suspend=word))


def until(cluster: Emulation, check: Callable[[], object]) -> None:
    with cluster.objects.changed:
        assert cluster.objects.changed.wait_for(check, PATIENCE)


def pods(cluster: Emulation) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.objects.all("pods")}


def test_a_queued_job_waits_without_a_timeout_and_logs_it_once(
    cluster: Emulation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = [0.0]
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0]))
    caplog.set_level(logging.WARNING, "holdfast.launch")
    cluster.kubelet.program = each("print('done')", "pass")
    running = Running(launcher(cluster), job(scheduler="kueue", queue="q"))
    until(cluster, cluster.jobs)
    wait_for_words(caplog, f"waiting: job {FIRST} is in its queue")
    offset[0] = 3600.0  # longer than pods may wait
    look(running)
    assert caplog.text.count(f"waiting: job {FIRST} is in its queue") == 1
    suspend(cluster, False)
    assert running.end().code == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["later", "before anybody looks", "before anybody sees the pods go"])
def test_a_job_that_its_queue_suspends_resumes_as_the_same_job(cluster: Emulation, tmp_path: Path, when: str) -> None:
    marker = tmp_path / "reported"
    cluster.kubelet.program = each(SERVE, SERVE)
    running = Running(launcher(cluster), job(scheduler="kueue", queue="q"))
    until(cluster, cluster.jobs)
    suspend(cluster, False)
    running.wait_for("ready")
    former = pods(cluster)
    assert len(former) == 2
    if when != "later":
        cluster.server.away = True
        cluster.server.drop_connections()
    suspend(cluster, True)
    until(cluster, lambda: not pods(cluster))
    wait = f"import os, time\nwhile not os.path.exists({str(marker)!r}): time.sleep(0.1)\n"
    cluster.kubelet.program = each(f"{wait}print('done')", wait)
    if when == "later":
        look(running)
    suspend(cluster, False)
    if when != "later":
        until(cluster, lambda: pods(cluster))
    if when == "before anybody sees the pods go":  # the watch of pods lags behind that of jobs
        cluster.server.faults.append(
            lambda verb, plural: StatusError(500, "later") if (verb, plural) == ("watch", "pods") else None
        )
        first_request = len(cluster.server.requests)
        cluster.server.away = False
        while ("watch", "pytorchjobs") not in cluster.server.requests[first_request:]:
            look(running, 0.1)
        look(running)
        cluster.server.faults.clear()
    cluster.server.away = False
    look(running)
    marker.touch()
    ending = running.end()
    assert (ending.code, ending.log_tail[-1]) == (0, "done")
    assert cluster.jobs() == [FIRST]
    assert cluster.server.requests.count(("create", "pytorchjobs")) == 1


def look(running: Running, seconds: float = 2.0) -> None:
    """The launcher keeps following, as long as it needs to see what happened."""
    running._thread.join(seconds)
    assert running.ending is None and running.error is None


def test_a_rank_that_dies_after_a_job_is_readmitted_is_reported_normally(cluster: Emulation) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    running = Running(launcher(cluster), job(scheduler="kueue", queue="q"))
    until(cluster, cluster.jobs)
    suspend(cluster, False)
    running.wait_for("ready")
    suspend(cluster, True)
    until(cluster, lambda: not pods(cluster))
    die = "import os, time; time.sleep(2); os.kill(os.getpid(), 9)"
    cluster.kubelet.program = lambda pod: python(die) if pod["metadata"]["name"].endswith("1") else python(SERVE)
    suspend(cluster, False)
    ending = running.end()
    assert ending.code == ExitCode.KILLED
    assert ending.detail.startswith(f"node rank 1 (pod {FIRST}-worker-1 on node ")
