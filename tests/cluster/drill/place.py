"""What the drill needs of a place where trainings run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class DrillError(Exception):
    """The drill cannot go on, or has found a difference."""


@dataclass(frozen=True)
class Ended:
    """How a launcher ended."""

    code: int
    said: str = ""  # its last lines


class Place(Protocol):
    """Starts launchers of one spec, breaks things under them, and lists what is there."""

    faults: Mapping[str, Callable[[], str]]  # each does it and returns what it hit; "" when there was nothing to hit

    def listed(self) -> frozenset[str]:
        """Every job, lease, pod, ConfigMap and the like, as kind/name. Nothing of the place's own workings."""
        ...

    def launch(self, salt: str) -> None:
        """Start a launcher of the run with that salt: the same mathematics under another id."""
        ...

    def ended(self) -> Ended | None:
        """How that launcher ended; None while it runs."""
        ...

    def training(self) -> bool:
        """Whether ranks run."""
        ...

    def digest(self) -> str:
        """Of the state at the end of the run that was launched last."""
        ...
