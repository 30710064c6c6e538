"""What the machine tells of this rank's accelerator: the energy that it has used, and how busy it is.

Promises that what the machine does not tell is not guessed but said (`unknown`), that a meter which fails costs no
training, and that nothing waits for the device: NVML asks the driver.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Reading:
    """What is known since the reading before."""

    joules: float | None = None
    utilisation: float | None = None  # now, from 0 to 1


class Meter:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self.unknown = ""  # why no energy is known; empty where it is
        self._nvml: Any = None
        self._handle: Any = None
        self._before: float | None = None  # joules since the driver was loaded
        try:
            self._open(device)
        except Exception as error:  # noqa: BLE001 - whatever a driver answers, the training goes on
            self.unknown = self.unknown or f"NVML does not tell it: {error}"

    def read(self) -> Reading:
        """Since the last call, or since this was made."""
        if self._handle is None:
            return Reading()
        joules, now, utilisation = None, None, None
        with suppress(self._nvml.NVMLError):
            now = self._joules()
        with suppress(self._nvml.NVMLError):
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        if now is not None and self._before is not None and now >= self._before:
            joules = now - self._before
        self._before = now
        return Reading(joules, utilisation)

    def _open(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.unknown = "there is no accelerator, and processors have no meter that is read"
        elif device.type != "cuda" or torch.version.hip is not None:
            self.unknown = "only NVIDIA's accelerators have a meter that is read"
        if self.unknown:
            return
        try:
            import pynvml
        except ImportError:
            self.unknown = "install holdfast[nvml]"
            return
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if _divided(pynvml, handle):
            self.unknown = "it is one of several MIG slices, and the meter is that of the whole accelerator"
            return
        self._nvml, self._handle = pynvml, handle
        self._before = self._joules()  # from here on one that counts no energy still says how busy it is

    def _joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000


def _divided(nvml: Any, handle: Any) -> bool:
    """Whether MIG divides the accelerator."""
    with suppress(nvml.NVMLError):  # one that does not know MIG
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return False
