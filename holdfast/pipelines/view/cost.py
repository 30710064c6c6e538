"""Resources and cost of a run in the terminal: `holdfast show --cost`, and its lines in `holdfast show`."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.prices import Prices
from holdfast.telemetry.cost import Cost


def lines(spent: Cost) -> Iterator[str]:
    """The known hours, energy and money; nothing before a rank has reported."""
    if not spent.hours:
        return
    ranks = f"{spent.accelerators} x {spent.accelerator}" if spent.accelerator else f"{spent.accelerators} ranks"
    used = "" if spent.utilisation is None else f", {100 * spent.utilisation:.0f} % busy when they told it"
    yield f"{spent.hours:,.4g} accelerator-hours of {ranks}{used}"
    if spent.kilowatt_hours is not None and spent.watts is not None:
        carbon = "" if spent.carbon is None else f", {spent.carbon:,.4g} g of carbon dioxide"
        yield (
            f"{spent.kilowatt_hours:,.4g} kWh of the accelerators, {spent.watts:,.0f} W each, metered in "
            f"{100 * spent.metered:.0f} % of these hours{carbon}"
        )
    if spent.price is not None:
        each = spent.price_per_million_tokens
        rate = "" if each is None else f", {money(each, spent.prices)} a million tokens"
        yield f"{money(spent.price, spent.prices)}{rate}"


def money(amount: float, prices: Prices) -> str:
    """An amount with its currency, if known."""
    return f"{amount:,.4g} {prices.currency}".rstrip()
