"""How a run spent its time, as a picture; its goodput, hours, energy and cost, as tiles at the top of a page."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from holdfast.pages.charts import number
from holdfast.pages.shares import draw_shares
from holdfast.telemetry.cost import Cost
from holdfast.telemetry.ledger import CLASSES, Class, Ledger

MOST_RANKS = 32  # ranks that get their own bar


def draw_time(account: Ledger) -> Markup:
    """Time spent by each rank, by class; above MOST_RANKS ranks, one bar for all."""
    bars: list[tuple[str, Mapping[Class, float]]] = [("all ranks", account.seconds)]
    if len(account.ranks) <= MOST_RANKS:
        bars = [(f"rank {rank}", spent) for rank, spent in sorted(account.ranks.items())]
    return draw_shares(bars, CLASSES, "s")


def account_tiles(account: Ledger, spent: Cost) -> list[tuple[str, str, str]]:
    """Title, value and unit of each known figure: goodput, hours, energy, carbon dioxide and cost."""
    if not account.total:
        return []
    tiles = [
        ("Goodput", f"{100 * account.goodput:.1f} %", "of all rank-seconds"),
        ("Accelerator-hours", number(spent.hours), f"of {spent.accelerators} x {spent.accelerator or 'ranks'}"),
    ]
    if spent.kilowatt_hours is not None:
        tiles.append(("Energy", number(spent.kilowatt_hours), f"kWh, metered in {100 * spent.metered:.0f} % of it"))
    if spent.carbon is not None:
        tiles.append(("Carbon dioxide", number(spent.carbon), "grams"))
    if spent.price is not None:
        each = spent.price_per_million_tokens
        told = [spent.prices.currency, "" if each is None else f"{number(each)} a million tokens"]
        tiles.append(("Cost", number(spent.price), ", ".join(filter(None, told))))
    return tiles
