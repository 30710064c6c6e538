"""Throughput: MFU by the stated formula, against a known peak and never against a guess."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Attempt
from holdfast.collectives import Gang
from holdfast.engines.interface import StepOutput
from holdfast.model.initialise import flops_per_token
from holdfast.planning import ACCELERATORS
from holdfast.planning.hardware import by_device
from holdfast.rank.measure.energy_meter import Meter
from holdfast.rank.measure.phase_timer import PhaseTimeReporter
from holdfast.rank.measure.throughput import Throughput
from holdfast.rank.observers import BatchDigest, FinishedStep, History, Progress
from holdfast.telemetry import events, phases
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import TimeSpent
from holdfast.telemetry.phases import Lap
from tests.train.tiny_run import VOCABULARY, tiny_assignment

H100 = "NVIDIA H100 80GB HBM3"


def finished(step: int, lap: Lap) -> FinishedStep:
    return FinishedStep(step, 0.1, StepOutput(torch.tensor(1.0), torch.tensor(1.0)), float(step), lap=lap)


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989.4e12), ("fp32", 66.9e12)])
def test_mfu_is_model_flops_over_the_peak_of_all_accelerators(precision: str, peak: float) -> None:
    spec = tiny_assignment(f"training.precision={precision}")
    throughput = Throughput.of(spec, VOCABULARY, 4, H100)
    tokens = 8 * 16
    assert (throughput.tokens, throughput.peak, throughput.unknown) == (tokens, 4 * peak, "")
    assert throughput.mfu(0.5) == tokens * flops_per_token(spec.model, VOCABULARY) / (0.5 * 4 * peak)


@pytest.mark.parametrize("device", ["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD EPYC 9654", ""])
def test_an_unknown_device_has_no_mfu_without_a_peak_in_the_spec(device: str) -> None:
    unknown = Throughput.of(tiny_assignment(), VOCABULARY, 2, device)
    assert unknown.mfu(1.0) is None
    assert unknown.unknown == f"the peak of {device} is in no table, and is not guessed; telemetry.peak_tflops says it"
    assert Throughput.of(tiny_assignment("telemetry.peak_tflops=2"), VOCABULARY, 2, device).peak == 4e12


def test_a_precision_that_an_accelerator_does_not_have_has_no_mfu() -> None:
    spec = tiny_assignment()
    changed_spec = spec.model_copy(update={"training": spec.training.model_copy(update={"precision": "fp8"})})
    throughput = Throughput.of(changed_spec, VOCABULARY, 1, "NVIDIA A100-SXM4-80GB")
    assert throughput.mfu(1.0) is None
    assert "A100 at fp8" in throughput.unknown


def test_frozen_weights_have_no_gradient_and_a_reference_has_a_forward_pass() -> None:
    spec = tiny_assignment()
    adapted = spec.training.model_copy(update={"lora": spec.training.lora.model_copy(update={"rank": 4})})
    whole, frozen, preferring = (
        Throughput.of(spec.model_copy(update=changes), VOCABULARY, 1, H100).flops
        for changes in ({}, {"training": adapted}, {"objective": "dpo"})
    )
    attention = 8 * 16 * 12 * 2 * 32 * 16  # tokens x 12 x layers x width of all heads x context
    assert frozen == pytest.approx(attention + (whole - attention) * 2 / 3)
    assert preferring == pytest.approx(whole * 4 / 3)


def test_the_planner_and_the_ranks_read_one_table() -> None:
    assert by_device(H100) is ACCELERATORS["H100"]


def test_rows_have_the_time_of_each_step_and_where_it_went_since_the_rows_were_read_last() -> None:
    spec = tiny_assignment("telemetry.peak_tflops=1")
    throughput = Throughput.of(spec, VOCABULARY, 1, "")
    history = History(spec, Attempt("run", 1), 0, BatchDigest(Gang(), speaks=True), throughput=throughput)
    history.on_step(finished(1, Lap({"data": 1.0, "forward": 3.0})))
    history.on_step(finished(2, Lap({"forward": 1.0, "save": 1.0})))
    history.latest()
    first, second = history._rows
    assert (first["step_seconds"], first["tokens_per_second"], first["mfu"]) == (4.0, 32.0, throughput.mfu(4.0))
    assert "phase_seconds.data" not in first
    assert {name: second[name] for name in second if name.startswith("phase")} == {
        "phase_seconds.data": 0.5, "phase_seconds.forward": 2.0, "phase_seconds.save": 0.5,
    }  # fmt: skip
    assert second["system.rank0_peak_memory_bytes"] > 0


def test_device_timestamps_are_synchronized_only_when_a_row_is_read() -> None:
    class Mark:
        def __init__(self, at: float) -> None:
            self.at, self.waited = at, False

        def elapsed_time(self, end_event: phases.Stamp) -> float:
            assert isinstance(end_event, Mark)
            return end_event.at - self.at

        def synchronize(self) -> None:
            self.waited = True

    marks = [Mark(0.0), Mark(250.0), Mark(1000.0)]
    lap = Lap({"forward": 0.001}, [("data", marks[0]), ("forward", marks[1]), ("check", marks[2])])
    history = History(tiny_assignment(), Attempt("run", 1), 0, BatchDigest(Gang(), speaks=True))
    history.on_step(finished(1, lap))
    assert not any(mark.waited for mark in marks)
    row = history.latest()
    assert row is not None
    assert (row["step_seconds"], row["phase_seconds.data"], row["phase_seconds.forward"]) == (1.0, 0.25, 0.75)


def test_progress_has_the_metrics_and_a_rank_accounts_for_all_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "pipe"))
    monkeypatch.setattr("holdfast.rank.measure.phase_timer.SECONDS", 0.0)
    spec = tiny_assignment("telemetry.peak_tflops=1")
    throughput = Throughput.of(spec, VOCABULARY, 1, "")
    history = History(spec, Attempt("run", 1), 0, BatchDigest(Gang(), speaks=True), throughput=throughput)
    phases.lap()
    phases.enter("restore")
    accounts = PhaseTimeReporter(0, 1, 0, torch.device("cpu"), Meter(torch.device("cpu")))
    laps = [Lap({"data": 0.25, "forward": 0.5}), Lap({"forward": 0.5})]
    progress = Progress(spec, history, 0, throughput)
    with accounts:
        for step, lap in enumerate(laps, 1):
            for observer in (history, progress, accounts):
                observer.on_step(finished(step, lap))
    all_events = PipeEvents(tmp_path / "pipe").new()
    progress_events = [event for event in all_events if isinstance(event, events.Progress)]
    assert [event.phase_seconds for event in progress_events] == [{"data": 0.25, "forward": 0.5}, {"forward": 0.5}]
    assert all(event.mfu and event.peak_memory and event.step_seconds for event in progress_events)
    phase_seconds: Counter[str] = Counter()
    for event in all_events:
        if isinstance(event, TimeSpent):
            phase_seconds.update(event.seconds)
            assert event.peak_memory > 0
    assert (phase_seconds["data"], phase_seconds["forward"]) == (0.25, 1.0)
    assert phase_seconds["restore"] > 0
