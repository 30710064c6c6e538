"""Goodput ledger in the terminal: `holdfast show --ledger`, and its lines in `holdfast show`."""

from collections.abc import Iterator

from rich.table import Table

from holdfast.pipelines.view.terminal import SafeConsole, duration
from holdfast.spec.prices import Prices
from holdfast.telemetry.cost import Cost
from holdfast.telemetry.ledger import CLASSES, Ledger

SHOWN = 0.001  # share below which a class is omitted from a line
MANY = 16  # ranks above which they are not listed individually
WIDE = 120  # columns when the output is not a terminal


def print_ledger(account: Ledger) -> None:
    """Print the classes with their seconds and shares, and the goodput of each rank."""
    console = SafeConsole()
    console = console if console.is_terminal else SafeConsole(width=WIDE)
    if not account.total:
        console.print("No rank of it has reported anything yet.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("class", "rank-seconds", "share"):
        table.add_column(title, justify="left" if title == "class" else "right")
    for name, seconds in account.seconds.items():
        table.add_row(name, f"{seconds:,.1f}", f"{100 * seconds / account.total:.1f} %")
    table.add_row("all", f"{account.total:,.1f}", "")
    console.print(table)
    console.print(f"\n{summary(account)}", highlight=False, soft_wrap=True)
    if 1 < len(account.ranks) <= MANY:
        shares = (f"{rank}: {_goodput(account, rank)}" for rank in sorted(account.ranks))
        console.print(f"by ranks: {', '.join(shares)}", highlight=False, soft_wrap=True)


def summary(account: Ledger) -> str:
    """The goodput, and the time and ranks that it refers to."""
    ranks = len(account.ranks)
    return (
        f"goodput {100 * account.goodput:.1f} % of {duration(account.wall)} x {ranks} rank{'s' if ranks != 1 else ''}"
    )


def lines(account: Ledger) -> Iterator[str]:
    """Lines for the page of a run; empty before a rank has reported."""
    if account.total:
        yield summary(account)
        shares = {name: account.seconds.get(name, 0.0) / account.total for name in CLASSES}
        yield ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= SHOWN)


def _goodput(account: Ledger, rank: int) -> str:
    seconds = account.ranks[rank]
    total = sum(seconds.values())
    return f"{100 * seconds.get('productive', 0.0) / total:.1f} %" if total else "-"


# Resources and cost of a run in the terminal: `holdfast show --cost`, and its lines in `holdfast show`.


def cost_lines(spent: Cost) -> Iterator[str]:
    """The known hours, energy and money; nothing before a rank has reported."""
    if not spent.hours:
        return
    ranks = f"{spent.accelerators} x {spent.accelerator}" if spent.accelerator else f"{spent.accelerators} ranks"
    used = "" if spent.utilisation is None else f", {100 * spent.utilisation:.0f} % busy when they reported it"
    yield f"{spent.hours:,.4g} accelerator-hours of {ranks}{used}"
    if spent.kilowatt_hours is not None and spent.watts is not None:
        carbon = "" if spent.carbon is None else f", {spent.carbon:,.4g} g of carbon dioxide"
        yield (
            f"{spent.kilowatt_hours:,.4g} kWh of the accelerators, {spent.watts:,.0f} W each, metered in "
            f"{100 * spent.metered:.0f} % of these hours{carbon}"
        )
    if spent.price is not None:
        unit_price = spent.price_per_million_tokens
        rate = "" if unit_price is None else f", {money(unit_price, spent.prices)} a million tokens"
        yield f"{money(spent.price, spent.prices)}{rate}"


def money(amount: float, prices: Prices) -> str:
    """An amount with its currency, if known."""
    return f"{amount:,.4g} {prices.currency}".rstrip()
