"""Energy use and condition of this rank's accelerator, as NVML reports them.

Missing figures are not guessed but reported (`unknown`, `missing_metrics`). A meter that fails does not affect
training. Nothing waits for the device, because NVML queries the driver.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from holdfast.telemetry.accelerators import Figures

log = logging.getLogger("holdfast.train")

# The NVML call for each figure, in its unit.
_NVML: dict[str, Callable[[Any, Any], float]] = {
    "joules": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,  # since the driver was loaded
    "utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "memory_used": lambda nvml, gpu: _memory(nvml, gpu).used,
    "memory_total": lambda nvml, gpu: _memory(nvml, gpu).total,
    "celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_megahertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clock_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
}


class Meter:
    """The meter of one device."""

    def __init__(self, device: torch.device) -> None:
        self.unknown = ""  # why no energy is known; empty if it is known
        self.missing_metrics: dict[str, str] = {}  # figures that this driver does not report, with its message
        self._nvml: Any = None
        self._handle: Any = None
        self._before: float | None = None  # joules since the driver was loaded
        try:
            self._open(device)
        except Exception as error:  # noqa: BLE001 - a failure of the driver does not end the training
            self._give_up(error)

    def read(self) -> Figures:
        """The condition now, and the energy since the last call or since construction."""
        return self._or_nothing(self._since)

    def now(self) -> Figures:
        """The condition now, without the energy."""
        return self._or_nothing(lambda: Figures.model_validate(self._ask(*_NVML.keys() - {"joules"})))

    def _or_nothing(self, query: Callable[[], Figures]) -> Figures:
        try:
            return query()
        except Exception as error:  # noqa: BLE001 - a binding of another version may answer anything
            self._give_up(error)
            log.warning("the accelerator is not metered any more: %s", self.unknown)
            return Figures()

    def _give_up(self, error: Exception) -> None:
        self._handle, self.unknown = None, f"NVML does not tell it: {error}"

    def _since(self) -> Figures:
        figures = self._ask(*_NVML)
        now, before = figures.pop("joules", None), self._before
        self._before = now
        if now is not None and before is not None and now >= before:
            figures["joules"] = now - before
        return Figures.model_validate(figures)

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
        self._before = self._ask(*_NVML, missing_metrics=self.missing_metrics).get("joules")
        if "joules" in self.missing_metrics:
            self.unknown = f"NVML does not tell it: {self.missing_metrics['joules']}"

    def _ask(self, *names: str, missing_metrics: dict[str, str] | None = None) -> dict[str, float]:
        """The reported figures of `names`. Reasons for missing ones go into `missing_metrics`."""
        figures: dict[str, float] = {}
        for name in names if self._handle is not None else ():
            try:
                figures[name] = _NVML[name](self._nvml, self._handle)
            except (self._nvml.NVMLError, AttributeError) as error:  # or the library has no such call (any more)
                if missing_metrics is not None:
                    missing_metrics[name] = str(error)
        return figures


def _memory(nvml: Any, handle: Any) -> Any:
    """Memory in its second version, which does not count the driver's reserve as used."""
    return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)


def _divided(nvml: Any, handle: Any) -> bool:
    """Whether MIG divides the accelerator."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # it does not support MIG
        return False
