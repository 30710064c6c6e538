"""What a rank tells of its accelerator: the meter of the driver, or why there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from holdfast.components.telemetry.channel import PIPE
from holdfast.components.telemetry.event_log import PipeEvents
from holdfast.components.telemetry.events import TimeSpent
from holdfast.components.train.accounts import Accounts
from holdfast.components.train.meter import Meter

GPU = torch.device("cuda", 0)


class Driver(ModuleType):
    """NVML with one accelerator, as its Python face behaves: what it cannot tell raises NVMLError."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.millijoules: int | None = 1_000_000
        self.busy: int | None = 90
        self.divided = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-12-34":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, _handle: str) -> tuple[int, int]:  # noqa: N802
        return self.divided, self.divided

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: str) -> int:  # noqa: N802
        if self.millijoules is None:
            raise self.NVMLError("Not Supported")
        return self.millijoules

    def nvmlDeviceGetUtilizationRates(self, _handle: str) -> SimpleNamespace:  # noqa: N802
        if self.busy is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy, memory=0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="12-34"))
    return made


def test_a_machine_without_an_accelerator_says_that_nothing_is_measured() -> None:
    meter = Meter(torch.device("cpu"))
    assert "no accelerator" in meter.unknown
    assert (meter.read().joules, meter.read().utilisation) == (None, None)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="NVIDIA's driver is here")
def test_a_machine_without_the_driver_says_what_the_library_says() -> None:
    meter = Meter(GPU)
    assert "NVML" in meter.unknown
    assert meter.read().joules is None


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Meter(GPU).unknown == "install holdfast[nvml]"


def test_energy_is_what_the_driver_counted_since_the_last_look(driver: Driver) -> None:
    meter = Meter(GPU)
    assert meter.unknown == ""
    driver.millijoules = 1_250_500
    assert (read := meter.read()).joules == pytest.approx(250.5)
    assert read.utilisation == 0.9
    driver.millijoules = 1_000  # it was loaded anew
    assert meter.read().joules is None
    driver.millijoules = None
    assert meter.read().joules is None
    driver.millijoules, driver.busy = 3_000, None
    assert meter.read().joules is None  # it is not known what was used before the counter was lost
    driver.millijoules = 4_000
    assert (meter.read().joules, meter.read().utilisation) == (1.0, None)


def test_a_slice_of_an_accelerator_is_not_billed_for_the_whole(driver: Driver) -> None:
    driver.divided = 1
    meter = Meter(GPU)
    assert "MIG" in meter.unknown
    assert meter.read().joules is None


def test_an_accelerator_that_counts_no_energy_still_tells_how_busy_it_is(driver: Driver) -> None:
    driver.millijoules = None
    meter = Meter(GPU)
    assert "Not Supported" in meter.unknown
    assert meter.read().utilisation == 0.9


def test_a_rank_tells_the_energy_of_the_seconds_that_it_tells(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "events"))
    with Accounts(0, 1, 0, torch.device("cpu"), Meter(GPU)):
        driver.millijoules = 1_007_000
    told = [event for event in PipeEvents(tmp_path / "events").new() if isinstance(event, TimeSpent)]
    assert [event.joules for event in told] == [None, 7.0]  # the first are of a time before the meter
    assert [event.utilisation for event in told] == [0.9, 0.9]
