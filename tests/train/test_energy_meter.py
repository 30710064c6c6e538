"""The accelerator metrics of a rank, read through the driver's real binding, or the reason why there are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.rank.measure.energy_meter import Meter
from holdfast.rank.measure.phase_timer import PhaseTimeReporter
from holdfast.rank.observers import METER_SECONDS, SystemMetrics
from holdfast.telemetry.accelerators import Figures
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import TimeSpent
from tests.train.nvml import FIGURES, USUAL, Driver, compiled, install

GPU = torch.device("cuda", 0)
ASKS = """
import types, torch
torch.cuda.get_device_properties = lambda _device: types.SimpleNamespace(uuid="12-34")
from holdfast.rank.measure.energy_meter import Meter
meter = Meter(torch.device("cuda", 0))
assert not meter.unknown and not meter.missing_metrics, (meter.unknown, meter.missing_metrics)
print(meter.read().model_dump_json())
"""
NOW = Figures(
    joules=0.0, utilisation=0.9, watts=512.0, memory_used=60 << 30, memory_total=80 << 30, celsius=71,
    sm_megahertz=1755, clock_reasons=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(library, tmp_path / "figures", monkeypatch)


def test_a_machine_without_an_accelerator_reports_no_energy() -> None:
    meter = Meter(torch.device("cpu"))
    assert "no accelerator" in meter.unknown
    assert meter.read() == meter.now() == Figures()
    assert not meter.read().tells


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="NVIDIA's driver is here")
def test_a_machine_without_the_driver_reports_the_nvml_error() -> None:
    meter = Meter(GPU)
    assert "NVML" in meter.unknown
    assert meter.read() == Figures()


@pytest.mark.slow
def test_the_binding_finds_the_driver_where_the_loader_does(library: Path, tmp_path: Path) -> None:
    folder = Driver(tmp_path / "figures").folder
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), FIGURES: str(folder)}
    process = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert Figures.model_validate(json.loads(process.stdout)) == NOW


@pytest.mark.usefixtures("driver")
def test_all_driver_metrics_are_read_in_their_units() -> None:
    meter = Meter(GPU)
    assert (meter.unknown, meter.missing_metrics) == ("", {})
    assert meter.read() == NOW
    assert meter.now() == NOW.model_copy(update={"joules": None})


def test_energy_is_what_the_driver_counted_since_the_last_look(driver: Driver) -> None:
    meter = Meter(GPU)
    driver.tell(millijoules=1_250_500)
    meter.now()  # the reading resets nothing
    assert meter.read().joules == pytest.approx(250.5)
    driver.tell(millijoules=1_000)  # the driver was reloaded
    assert meter.read().joules is None
    driver.tell(millijoules=None)
    assert meter.read().joules is None
    driver.tell(millijoules=3_000)
    assert meter.read().joules is None  # the use before the counter was lost is unknown
    driver.tell(millijoules=4_000)
    assert meter.read().joules == 1.0
    driver.tell(millijoules=5 * 2**32 * 1000)  # more than 32 bits hold
    assert meter.read().joules == 5 * 2**32 - 4


def test_a_slice_of_an_accelerator_is_not_billed_for_the_whole(driver: Driver) -> None:
    driver.tell(mig=1)
    meter = Meter(GPU)
    assert "MIG" in meter.unknown
    assert meter.read() == Figures()


@pytest.mark.parametrize(
    ("refused", "missing_metrics"),
    [
        ("millijoules", {"joules"}),
        ("milliwatts", {"watts"}),
        ("busy", {"utilisation"}),
        ("memory_used", {"memory_used", "memory_total"}),
        ("celsius", {"celsius"}),
        ("megahertz", {"sm_megahertz"}),
        ("reasons", {"clock_reasons"}),
        ("mig", set()),  # a device that does not know MIG is whole
    ],
)
def test_a_metric_that_the_driver_refuses_is_reported_missing_and_the_rest_is_read(
    refused: str, missing_metrics: set[str], driver: Driver
) -> None:
    driver.tell(**{refused: None})
    meter = Meter(GPU)
    assert meter.missing_metrics == dict.fromkeys(meter.missing_metrics, "Not Supported")
    assert set(meter.missing_metrics) == missing_metrics
    assert meter.read() == NOW.model_copy(update=dict.fromkeys(missing_metrics))
    assert ("Not Supported" in meter.unknown) == (refused == "millijoules")


def test_a_lost_accelerator_loses_only_its_metrics(driver: Driver) -> None:
    meter = Meter(GPU)
    driver.tell(**dict.fromkeys(USUAL, -15))
    assert meter.read() == Figures()


def test_a_rank_reports_the_energy_of_its_reported_seconds(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "events"))
    with PhaseTimeReporter(0, 1, 0, torch.device("cpu"), Meter(GPU)):
        driver.tell(millijoules=1_007_000, reasons=0x24)
    time_events = [event for event in PipeEvents(tmp_path / "events").new() if isinstance(event, TimeSpent)]
    assert [event.joules for event in time_events] == [None, 7.0]  # the first seconds are from before the meter
    assert [(event.utilisation, event.watts, event.memory_used) for event in time_events] == [
        (0.9, 512.0, 60 << 30)
    ] * 2
    assert [event.slowed for event in time_events] == ["", "hot"]  # a power cap is no fault


def test_the_history_has_the_metrics_of_rank_0_and_the_driver_is_polled_rarely(driver: Driver) -> None:
    now = [0.0]
    system = SystemMetrics(Meter(GPU), lambda: now[0])
    assert system.sample()["system.gpu_watts"] == 512.0
    driver.tell(milliwatts=600_000)
    now[0] = METER_SECONDS / 2
    assert "system.gpu_watts" not in system.sample()
    now[0] = METER_SECONDS
    sample = system.sample()
    assert sample["system.gpu_watts"] == 600.0
    assert {name for name in sample if name.startswith("system.gpu_")} == {
        f"system.gpu_{name}" for name in Figures.model_fields if name != "joules"
    }
