"""The exit handler: it always sends a summary, and it never fails the DAG."""

import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from holdfast.components import notify
from holdfast.components.notify import PipelineExit, Summary
from holdfast.components.notify import summary as notify_summary
from holdfast.spec import ExitCode, parse_spec
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import emit, read_events, recording
from holdfast.telemetry.events import Progress, SaveFailed
from tests.http_server import QuietHandler, running

SPEC = "name: story\ndata:\n  sources:\n    - uri: corpus/*.txt\n"
RUN_ID = "fedcba9876543210"
SECRET = "T0KEN-that-nobody-may-see"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOLDFAST_STORE", "HOLDFAST_WEBHOOK", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(notify_summary, "TIMEOUT", 120.0)
    monkeypatch.setattr(notify_summary, "TOTAL", 300.0)
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(f"file://{home / 'store'}")


class Webhook:
    """A real HTTP server that answers with the given statuses in order, and repeats the last one."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        hook = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                status = statuses[min(len(hook.bodies), len(statuses) - 1)]
                hook.bodies.append(json.loads(self.body()))
                place = {"Location": f"http://127.0.0.1:{hook.port}/elsewhere"} if status == 302 else {}
                self.answer(status, **place)

            def do_GET(self) -> None:
                raise AssertionError("the redirect was followed")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/services/{SECRET}"


def run(
    status: str, spec: str = "", store: str = "", run_id: str = "", *, overrides: Sequence[str] = (), **of_end: Any
) -> Summary:
    return notify.run(PipelineExit(status, **of_end), spec, store, run_id, overrides=overrides)


@contextmanager
def listening(*statuses: int) -> Iterator[Webhook]:
    hook = Webhook(*statuses)
    with running(hook.server):
        yield hook


def write_finished_run(store: Store, word: str, key: str = "k-none", *overrides: str) -> None:
    store.put(layout.result(RUN_ID), json.dumps({"run_id": RUN_ID, "step": 300, "loss": 1.5}).encode())
    settings = parse_spec(SPEC, overrides).evaluation.model_dump(mode="json")
    verdict = {"word": word, "key": key, "reasons": ["Perplexity 3.5."], "metrics": {"perplexity": 3.5}}
    store.put(layout.verdict(RUN_ID, key), json.dumps({**verdict, "settings": settings}).encode())
    if word == "blessed":
        record = {"model": "story", "version": 3, "alias": "champion"}
        store.put(layout.registration(RUN_ID, "r"), json.dumps(record).encode())


def test_the_model_of_a_script_has_no_command_that_generates_text(store: Store) -> None:
    write_finished_run(store, "blessed")
    script = run("SUCCEEDED", "name: story\ntrain: {script: train.py}\n", run_id=RUN_ID)
    assert script.registered == "models:/story/3"
    assert script.next_command == ""


def test_a_registered_run_is_summarised_with_figures_and_the_next_command(home: Path, store: Store) -> None:
    write_finished_run(store, "blessed")
    log = home / "logs" / RUN_ID / "attempt-000001.log"
    log.parent.mkdir(parents=True)
    log.write_text("…")
    summary = run("SUCCEEDED", SPEC, run_id=RUN_ID)
    assert summary.text.splitlines() == [
        f"**story (run {RUN_ID}): registered as models:/story/3**",
        "",
        "- trained: 300 steps, last loss 1.5000",
        "- perplexity: 3.5",
        "- verdict: blessed (Perplexity 3.5.)",
        "- registered: models:/story/3 as champion",
        f"- report: `{store.url}/{layout.verdict(RUN_ID, 'k-none', 'html')}`",
        f"- log: `{log}`",
        '- next: `holdfast models generate story@champion "Once upon a time"`',
    ]
    record = json.loads(store.get(layout.run(RUN_ID, "summary.json")))
    assert record["status"] == "succeeded"
    assert record["text"] == summary.text


def test_the_summary_of_a_failed_run_has_its_progress_and_events(store: Store) -> None:
    with recording(store, RUN_ID, "rank 0", attempt=2):
        emit(Progress(step=40, steps=300, loss=2.25, grad_norm=1, tokens_per_second=1, seconds_left=1))
        for step in range(12):
            emit(SaveFailed(step=step, reason="503 [slow down]", lag=3))
    summary = run("FAILED", SPEC, run_id=RUN_ID, failed_step="train", message="train: ended")
    assert "- trained: 40 steps, last loss 2.2500" in summary.text.splitlines()
    assert len(summary.happened) == 11 and summary.happened[0] == "2 things more, before"
    assert "503 \\[slow down\\]" in summary.markdown
    *_, last_event = read_events(store, RUN_ID)
    assert (last_event.source, last_event.text) == ("notify", "the run failed: train: ended")


@pytest.mark.parametrize(("status", "reported", "code"), [
    ("SUCCEEDED", None, 0), ("FAILED", 18, 18), ("FAILED", None, None), ("CANCELLED", 204, 204),
])  # fmt: skip
def test_the_summary_record_has_the_exit_code(
    store: Store, status: str, reported: int | None, code: int | None
) -> None:
    before = time.time()
    run(status, SPEC, run_id=RUN_ID, exit_code=reported)
    record = json.loads(store.get(layout.run(RUN_ID, "summary.json")))
    assert record["exit_code"] == code
    assert before <= record["ended"] <= time.time()


def test_the_summary_has_only_the_verdict_under_the_settings_of_the_spec(store: Store) -> None:
    write_finished_run(store, "not_blessed", "mine-none")
    write_finished_run(store, "blessed", "other-none", "evaluation.max_perplexity=9")
    summary = run("SUCCEEDED", SPEC, run_id=RUN_ID)
    assert (summary.verdict, summary.registered) == ("not_blessed", "")
    assert "mine-none" in summary.report
    other = run("SUCCEEDED", SPEC, run_id=RUN_ID, overrides=["evaluation.max_perplexity=9"])
    assert (other.verdict, other.registered) == ("blessed", "models:/story/3")
    assert run("SUCCEEDED", SPEC, run_id=RUN_ID, overrides=["evaluation.max_loss=1"]).verdict == ""


LEFT_ALONE = (ExitCode.CHAMPION_CHANGED, ExitCode.FENCED, ExitCode.CANCELLED)


def test_the_next_command_is_a_fix_after_a_permanent_failure_and_a_retry_after_a_temporary_one() -> None:
    for code in (*(code for code in ExitCode if 5 < code < 128 and code not in LEFT_ALONE), 1, 99):
        next_command = run("FAILED", SPEC, message="why", exit_code=code).next_command
        assert next_command and "run the same command again" not in next_command, code
        assert run("FAILED", SPEC, message=f"main: Error (exit code {code})").next_command == next_command
    for code in (ExitCode.CHAMPION_CHANGED, *(code for code in ExitCode if code.retryable)):
        assert run("FAILED", SPEC, exit_code=code).next_command.startswith("run the same command again"), code


def test_the_message_of_a_step_is_escaped_in_markdown() -> None:
    message = "*.txt: <script>alert(1)</script> [x](http://y) `rm`\n_a_ learning_rate __b__"
    message += "\n\n# no heading\n- no item\n1. no list\n==="
    summary = run("FAILED", SPEC, message=message)
    assert message in summary.text
    html = MarkdownIt().render(summary.markdown)
    assert html.count("<strong>") == 1  # the headline
    assert not re.findall(r"<(?:script|a|h1|img|em|ol)\b", html)
    assert html.count("<li>") == summary.text.count("\n- ") - 1  # all but the one in the reason
    visible_text = unescape(re.sub(r"<[^>]+>", "", html))
    for line in (
        "*.txt: <script>alert(1)</script> [x](http://y) `rm`",
        "_a_ learning_rate __b__",
        "# no heading",
        "- no item",
        "1. no list",
        "===",
    ):
        assert line in visible_text


def test_the_summary_of_an_early_failure_has_step_reason_and_log() -> None:
    summary = run(
        "FAILED", SPEC, failed_step="preprocess", message="corpus/*.txt: no file matches", log_place="https://kfp/run/1"
    )
    assert "- failed step: preprocess" in summary.text
    assert "- reason: corpus/*.txt: no file matches" in summary.text
    assert "- log: `https://kfp/run/1`" in summary.text
    assert "run the same command again" in summary.next_command


def test_a_spec_that_was_refused_is_no_obstacle() -> None:
    summary = run("FAILED", "name: Story!\n", failed_step="preprocess", message="bad spec")
    assert summary.status == "failed"
    assert "name" in summary.unknown[0]
    assert "not known" not in summary.text


def test_a_spec_that_no_step_could_read_is_the_reason_of_the_failure() -> None:
    summary = run("FAILED", SPEC, overrides=["training.optimizer.learning_rate=-1"])
    assert "training.optimizer.learning_rate" in summary.reason
    assert (summary.exit_code, summary.unknown) == (ExitCode.BAD_SPEC, [])
    first, _, reason, *_ = summary.text.splitlines()
    assert (first, reason.startswith("- reason: ")) == ("**The pipeline: failed**", True)
    assert "learning_rate" in summary.markdown and "\\_" not in summary.markdown


@pytest.mark.parametrize(("status", "posted"), [("FAILED", 1), ("SUCCEEDED", 1), ("CANCELED", 0)])
def test_a_cancelled_run_is_recorded_and_posts_no_alert(
    store: Store, monkeypatch: pytest.MonkeyPatch, status: str, posted: int
) -> None:
    with listening(200) as hook:
        monkeypatch.setenv("HOLDFAST_WEBHOOK", hook.url)
        run(status, SPEC, run_id=RUN_ID)
    assert len(hook.bodies) == posted
    assert store.get(layout.run(RUN_ID, "summary.json"))


def test_an_unusable_store_is_in_the_summary() -> None:
    summary = run("CANCELED", SPEC, "ftp://nowhere", RUN_ID)
    assert summary.status == "cancelled"
    assert "ftp://nowhere" in summary.unknown[0]


def test_a_store_that_cannot_be_written_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    summary = run("FAILED", SPEC, "file:///proc/version", RUN_ID)
    assert summary.status == "failed"
    assert "summary:" in caplog.text


def test_damaged_records_are_reported_and_the_rest_is_summarized(store: Store) -> None:
    write_finished_run(store, "blessed")
    store.put(layout.verdict(RUN_ID, "k-none"), b"{torn")
    summary = run("SUCCEEDED", SPEC, run_id=RUN_ID)
    assert summary.name == "story"
    assert summary.unknown


def test_the_webhook_gets_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(200) as hook:
        monkeypatch.setenv("HOLDFAST_WEBHOOK", hook.url)
        summary = run("FAILED", SPEC, failed_step="train", message="diverged")
    [body] = hook.bodies
    assert body["text"] == summary.text
    assert body["failed_step"] == "train"


def test_a_webhook_in_trouble_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify_summary, "PAUSE", 0.0)
    with listening(500, 503, 200) as hook:
        assert notify_summary.post(hook.url, {"text": "hello"})
    assert len(hook.bodies) == 3


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (404, 1), (302, 1)])
def test_a_webhook_that_refuses_is_logged_without_its_url(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(notify_summary, "PAUSE", 0.0)
    with listening(status) as hook:
        monkeypatch.setenv("HOLDFAST_WEBHOOK", hook.url)
        run("FAILED", SPEC)
    assert len(hook.bodies) == tries
    assert f"status {status}" in caplog.text
    assert SECRET not in caplog.text


def test_a_webhook_that_hangs_is_left_after_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify_summary, "TIMEOUT", 0.2)
    monkeypatch.setattr(notify_summary, "PAUSE", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, but no process answers
        monkeypatch.setenv("HOLDFAST_WEBHOOK", f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}")
        run("FAILED", SPEC)
    assert "TimeoutError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("url", [f"file:///etc/{SECRET}", f"http://host:port/{SECRET}", f"http://\n/{SECRET}"])
def test_a_webhook_that_is_no_web_address_is_refused_quietly(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify_summary, "PAUSE", 0.0)
    monkeypatch.setenv("HOLDFAST_WEBHOOK", url)
    run("FAILED", SPEC)
    assert "HOLDFAST_WEBHOOK" in caplog.text
    assert SECRET not in caplog.text


def test_the_reason_carries_no_credentials() -> None:
    assert "hunter2" not in run("FAILED", SPEC, message="cannot reach https://me:hunter2@host/x").text


def test_the_notify_command_always_exits_with_zero(tmp_path: Path) -> None:
    broken = tmp_path / "spec.yaml"
    broken.write_bytes(b"\xff: [")
    command = [sys.executable, "-m", "holdfast.components.notify", "--status", "failed", "--spec", str(broken)]
    command += ["--store", "nonsense", "--message", "lost", "--output", str(tmp_path / "out.json")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert json.loads((tmp_path / "out.json").read_text())["reason"] == "lost"
