"""What an accelerator's driver tells of it: how busy it is, its power, memory, heat and clock.

Promises that what nobody told is None and never 0. The energy meter of train asks; events carry it, views show it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

# Why a clock is below what it could be, as NVIDIA numbers it (nvml.h, nvmlClocksEventReasons), where that is a fault of
# the machine. A cap of the power by software is none: an accelerator at work meets it.
SLOWED = {0x08: "slowed by its hardware", 0x20: "hot", 0x40: "too hot", 0x80: "short of power"}


class Figures(BaseModel):
    """Of one accelerator, when it was asked. None: it does not tell that."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    joules: float | None = None  # used since it was asked before
    utilisation: float | None = None  # share of the last moments in which a kernel ran, from 0 to 1
    watts: float | None = None
    memory_used: int | None = None  # bytes, by whomever
    memory_total: int | None = None  # bytes
    celsius: float | None = None
    sm_megahertz: float | None = None
    clock_reasons: int | None = None  # bits of nvmlClocksEventReasons: why the clock is not higher

    @property
    def tells(self) -> bool:
        """Whether anything is known of how it is."""
        return any(getattr(self, name) is not None for name in Figures.model_fields)

    @property
    def slowed(self) -> str:
        """What holds its clock back that should not; empty if nothing does or is known to."""
        return ", ".join(words for bit, words in SLOWED.items() if (self.clock_reasons or 0) & bit)
