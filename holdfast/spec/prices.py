"""The `cluster.prices` section: what an hour and a kilowatt-hour cost.

The user gives all prices. Nothing is assumed, and a price that is not given is not part of a cost.
"""

from holdfast.spec.section import Section, runtime_field


class Prices(Section):
    """Prices, from which `holdfast plan`, `holdfast show --cost` and the reports compute the cost of a run."""

    accelerator_hour: float | None = runtime_field(
        None,
        "Price of one accelerator for one hour, including its share of the node. With `accelerator: cpu`: of one rank.",
        ge=0,
    )
    spot_accelerator_hour: float | None = runtime_field(
        None,
        "The same on a spot node, which the cloud may reclaim. With `spot_interruptions`, `holdfast plan` shows how "
        "many nodes of each kind to use.",
        ge=0,
    )
    spot_interruptions: float | None = runtime_field(
        None, "How often the cloud reclaims one spot node, per hour, such as 0.02.", ge=0, le=60
    )
    kilowatt_hour: float | None = runtime_field(
        None, "Price of a kilowatt-hour, if electricity is paid separately from the hours.", ge=0
    )
    carbon_per_kilowatt_hour: float | None = runtime_field(
        None, "Grams of carbon dioxide per kilowatt-hour (the intensity of the grid).", ge=0
    )
    currency: str = runtime_field(
        "", "Currency of the prices, such as `EUR`. It is only printed.", pattern=r"^[A-Za-z€$£¥]{0,8}$"
    )
