"""The nearest multiples of a unit, for remedies."""

from __future__ import annotations


def nearest_multiples(value: int, unit: int, least: int = 1) -> str:
    """The multiples of `unit` below and above `value`, at least `least`, nearest first: "384 or 396"."""
    below = value // unit * unit
    choices = [choice for choice in (below, below + unit) if choice >= least]
    return " or ".join(str(choice) for choice in sorted(choices, key=lambda choice: abs(choice - value)))
