"""Figures that an accelerator's driver reports: utilization, power, memory, temperature and clock.

An unreported figure is None, never 0. The energy meter of train reads them, events carry them, views show them.
"""

from pydantic import BaseModel

# Why a clock is below its maximum, by NVIDIA's numbers (nvml.h, nvmlClocksEventReasons), where that is a fault of the
# machine. A power cap by software is no fault: an accelerator at work reaches it.
SLOWED = {0x08: "slowed by its hardware", 0x20: "hot", 0x40: "too hot", 0x80: "short of power"}


class Figures(BaseModel, frozen=True, extra="ignore"):
    """Of one accelerator, when it was read. None: its driver does not report it."""

    joules: float | None = None  # used since the previous reading
    utilisation: float | None = None  # share of the last moments in which a kernel ran, from 0 to 1
    watts: float | None = None
    memory_used: int | None = None  # bytes, by any process
    memory_total: int | None = None  # bytes
    celsius: float | None = None
    sm_megahertz: float | None = None
    clock_reasons: int | None = None  # bits of nvmlClocksEventReasons: why the clock is not higher

    @property
    def tells(self) -> bool:
        """Whether any figure is known."""
        return any(getattr(self, name) is not None for name in Figures.model_fields)

    @property
    def slowed(self) -> str:
        """The faults that slow its clock; empty if none is known."""
        return ", ".join(words for bit, words in SLOWED.items() if (self.clock_reasons or 0) & bit)
