"""The multiples of a unit that a remedy names."""

from __future__ import annotations


def nearest_multiples(value: int, unit: int, least: int = 1) -> str:
    """The multiples of `unit` on both sides of `value`, from `least` on, the nearest one first: "384 or 396"."""
    below = value // unit * unit
    choices = [choice for choice in (below, below + unit) if choice >= least]
    return " or ".join(str(choice) for choice in sorted(choices, key=lambda choice: abs(choice - value)))
