"""Metrics: a scraper sees the content of the events."""

import re
import signal
import socket
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.spec.operations import Telemetry
from holdfast.telemetry import emit
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    HangDetected,
    LaunchBegan,
    LaunchEnded,
    Progress,
    SaveCommitted,
    SaveFailed,
    StragglerDetected,
    TimeSpent,
)
from holdfast.telemetry.metrics import METRICS, Metrics, Server
from holdfast.telemetry.serving import showing_metrics
from tests.ports import free_neighbours, free_port
from tests.train.tiny_run import new_store, start_training, tiny_spec

SAMPLE = re.compile(r"^(\w+)\{(.*?)\} (\S+)$", re.M)


def scraped(port: int) -> dict[str, float]:
    """The metrics at a port, once it is served."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            return {f"{name}{{{labels}}}": float(value) for name, labels, value in SAMPLE.findall(text)}
        except OSError:  # also of a server that has no core yet
            assert time.monotonic() < deadline, "nothing is served"
            time.sleep(0.05)


def until_served(port: int, name: str) -> dict[str, float]:
    """The metrics at a port, once a given one is among them."""
    deadline = time.monotonic() + 120
    while not any(line.startswith(name) for line in scraped(port)):
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.2)
    return scraped(port)


def at(when: float, event: Event, attempt: int | None = None) -> Event:
    return event.model_copy(update={"time": when, "attempt": attempt, "writer": "w"})


STORY = [
    at(100, LaunchBegan(launch=1, job="j", nodes=1, processes=2)),
    at(101, AttemptBegan(world=2, step=0, steps=90), 1),
    at(105, TimeSpent(rank=1, step=0, seconds={"build": 4.0}, peak_memory=512), 1),
    at(110, SaveCommitted(step=5, seconds=1, stall_seconds=0.25), 1),
    at(112, SaveFailed(step=6, reason="no", lag=1), 1),
    at(113, StragglerDetected(rank=1, phase="data", step=7, ratio=1.5, seconds=0.1), 1),
    at(114, HangDetected(rank=1, phase="data", step=7, seconds=2, message="hangs")),
    at(120, Progress(step=9, steps=90, loss=2.5, grad_norm=0.5, tokens_per_second=1e4, seconds_left=9, mfu=0.4,
                     learning_rate=0.01, step_seconds=0.5, phase_seconds={"forward": 0.2}, peak_memory=1024), 1),
    at(121, LaunchEnded(launch=1, code=137, restart_in=0.0)),
    at(122, LaunchBegan(launch=2, job="j", nodes=1, processes=2)),
    at(125, AttemptBegan(world=2, step=5, steps=90), 2),
    at(126, TimeSpent(rank=1, step=5, seconds={"build": 4.0}, peak_memory=512, utilisation=0.5, watts=512.0, celsius=71,
                      memory_used=60 << 30, memory_total=80 << 30, sm_megahertz=1755, clock_reasons=0x24), 2),
]  # fmt: skip


def test_served_metrics_match_the_events() -> None:
    metrics, port = Metrics("r", whole=True), free_port()
    for event in STORY:
        metrics.take(event)
    metrics.look(130.0)
    with closing(Server(metrics, "127.0.0.1", port)):
        samples = scraped(port)
    assert {name.split("{")[0] for name in samples} == set(METRICS)
    expected = {
        "step": 5, "steps": 90, "ranks": 2, "attempt": 2, "step_seconds": 0.5, "tokens_per_second": 1e4,
        "mfu_ratio": 0.4, "loss": 2.5, "grad_norm": 0.5, "learning_rate": 0.01, "checkpoint_step": 5,
        "checkpoint_lag_steps": 0, "checkpoint_timestamp_seconds": 110, "checkpoint_failures": 1,
        "checkpoint_stall_seconds": 0.25, "restarts": 1, "hangs": 1, "stragglers": 1,
        "last_event_timestamp_seconds": 126,
    }  # fmt: skip
    assert {name: samples[f'holdfast_{name}{{run="r"}}'] for name in expected} == expected
    assert samples['holdfast_phase_seconds{phase="forward",run="r"}'] == 0.2
    assert samples['holdfast_peak_memory_bytes{rank="1",run="r"}'] == 512
    spent = {name: value for name, value in samples.items() if name.startswith("holdfast_rank_seconds")}
    assert sum(spent.values()) == pytest.approx(2 * 30)
    assert 0 < samples['holdfast_goodput_ratio{run="r"}'] < 1


def test_accelerator_metrics_have_dcgm_names_and_units_while_reported() -> None:
    metrics = Metrics("r")

    def shown(rank: int) -> dict[str, float | None]:
        samples = (sample for family in metrics.registry.collect() for sample in family.samples)
        return {
            sample.name.removeprefix("DCGM_FI_DEV_"): sample.value
            for sample in samples
            if sample.name.startswith("DCGM") and sample.labels == {"run": "r", "rank": str(rank)}
        }

    last_event = STORY[-1]
    assert isinstance(last_event, TimeSpent)
    for event in (last_event, last_event.model_copy(update={"rank": 0, "watts": 640.0})):
        metrics.take(event)
    whole = {
        "GPU_UTIL": 50, "POWER_USAGE": 512, "FB_USED": 60 * 1024, "FB_TOTAL": 80 * 1024, "GPU_TEMP": 71,
        "SM_CLOCK": 1755, "CLOCKS_EVENT_REASONS": 0x24,
    }  # fmt: skip
    assert shown(1) == whole
    metrics.take(last_event.model_copy(update={"watts": None}))  # its driver reports it no longer
    assert shown(1) == {name: value for name, value in whole.items() if name != "POWER_USAGE"}
    metrics.take(at(130, AttemptBegan(world=1, step=5, steps=90), 3))
    assert (shown(0), shown(1)) == (whole | {"POWER_USAGE": 640}, {})
    metrics.take(at(131, LaunchEnded(launch=2, code=0)))
    assert shown(0) == {}
    metrics.take(last_event)
    assert shown(1) == whole


def test_the_lag_of_checkpoints_is_the_steps_since_the_newest_one() -> None:
    metrics = Metrics("r")
    for event in STORY[:8]:
        metrics.take(event)
    assert metrics.registry.get_sample_value("holdfast_checkpoint_lag_steps", {"run": "r"}) == 4
    resumed = Metrics("r")
    for event in (at(125, AttemptBegan(world=2, step=7, steps=90), 2), STORY[7]):
        resumed.take(event)
    assert resumed.registry.get_sample_value("holdfast_checkpoint_lag_steps", {"run": "r"}) == 2


def test_metrics_are_served_only_with_a_port_and_from_this_process() -> None:
    with showing_metrics(Telemetry(), "r") as none:
        assert none is None
    port = free_port()
    with showing_metrics(Telemetry(metrics_port=port), "r") as exporter:
        assert exporter is not None
        scraped(port)
        emit(STORY[7])
        assert scraped(port)['holdfast_step{run="r"}'] == 9


def test_the_metrics_port_is_released_at_the_end() -> None:
    port = free_port()
    for step in (9, 10):  # the second server would find the port in use
        with showing_metrics(Telemetry(metrics_port=port), f"r{step}") as exporter:
            emit(STORY[7].model_copy(update={"step": step}))
            assert exporter is not None
            assert scraped(port)[f'holdfast_step{{run="r{step}"}}'] == step
        emit(STORY[7].model_copy(update={"step": 77}))
        assert exporter.registry.get_sample_value("holdfast_step", {"run": f"r{step}"}) == step
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_an_occupied_metrics_port_is_logged_and_does_not_fail(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with closing(Server(Metrics("a"), "127.0.0.1", port)) as first:
        assert first.wait()
        with closing(Server(Metrics("b"), "127.0.0.1", port, seconds=0.0)) as second:
            assert not second.wait()
        scraped(port)
    assert "set telemetry.metrics_port" in caplog.text


@pytest.mark.drill
def test_rank_0_and_the_launcher_of_a_training_are_scraped_while_it_trains(tmp_path: Path) -> None:
    store, port = new_store(tmp_path / "store"), free_neighbours()
    spec = tiny_spec("training.steps=1000000", f"telemetry.metrics_port={port}", "parallel.processes=2")
    process = start_training(spec, store.url, tmp_path)
    try:
        of_rank = until_served(port, "holdfast_loss")
        assert {name.split("{")[0] for name in of_rank} >= {"holdfast_tokens_per_second", "holdfast_phase_seconds"}
        until_served(port + 1, "holdfast_goodput_ratio")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def test_a_ledger_of_a_part_of_the_events_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.telemetry.metrics.LEDGER_EVENTS", 5)
    metrics = Metrics("r", whole=True)
    for event in STORY[:4]:
        metrics.take(event)
    metrics.look(115.0)
    assert metrics.registry.get_sample_value("holdfast_goodput_ratio", {"run": "r"}) is not None
    for event in STORY * 2:
        metrics.take(event)
    metrics.look(500.0)
    assert metrics.registry.get_sample_value("holdfast_goodput_ratio", {"run": "r"}) is None
