"""The `cluster.prices` section: what an hour and a kilowatt-hour cost where the run is paid for.

A table of the user's own: nothing in it is assumed, and what is not said is not part of a cost.
"""

from __future__ import annotations

from holdfast.spec.section import Section, runtime_field


class Prices(Section):
    """What is paid, from which `holdfast plan`, `holdfast cost` and the reports say what a run costs."""

    accelerator_hour: float | None = runtime_field(
        None,
        "Price of one accelerator's hour, its share of the node included; on `accelerator: cpu` of one rank's hour.",
        ge=0,
    )
    spot_accelerator_hour: float | None = runtime_field(
        None,
        "The same of a spot node, which the cloud may take back: with `spot_interruptions`, `holdfast plan` says how "
        "many nodes to take of either kind.",
        ge=0,
    )
    spot_interruptions: float | None = runtime_field(
        None, "How often the cloud takes a spot node back: times in an hour of one node, such as 0.02.", ge=0, le=60
    )
    kilowatt_hour: float | None = runtime_field(
        None, "Price of a kilowatt-hour, where electricity is paid for apart from the hours.", ge=0
    )
    carbon_per_kilowatt_hour: float | None = runtime_field(
        None, "Grams of carbon dioxide that a kilowatt-hour stands for (the grid's intensity).", ge=0
    )
    currency: str = runtime_field(
        "", "What the prices are in, such as `EUR`; it is only printed.", pattern=r"^[A-Za-z€$£¥]{0,8}$"
    )
