"""The interface of a place where the drill runs trainings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class DrillError(Exception):
    """The drill cannot continue, or has found a difference."""


@dataclass(frozen=True)
class Ended:
    """Exit of a launcher."""

    code: int
    last_lines: str = ""  # its last lines


class Place(Protocol):
    """Starts launchers of one spec, injects faults into them, and lists the objects of the namespace."""

    # Each fault returns what it hit; "" when there was nothing to hit.
    faults: Mapping[str, Callable[[], str]]

    def listed(self) -> frozenset[str]:
        """Every job, lease, pod, ConfigMap and similar object, as kind/name, without the place's own objects."""
        ...

    def launch(self, salt: str) -> None:
        """Start a launcher of the run with that salt: the same mathematics under another id."""
        ...

    def ended(self) -> Ended | None:
        """The exit of that launcher; None while it runs."""
        ...

    def training(self) -> bool:
        """Whether ranks run."""
        ...

    def digest(self) -> str:
        """The digest of the final state of the run that was launched last."""
        ...
