"""The page of a training run: its figures, its curves over the steps, and how its ranks spent their time.

One HTML page that loads and runs nothing; the same run gives the same page. The page of an unfinished run shows the
data up to now and their time. It makes the browser reload the file, which the caller rewrites.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from holdfast.pages.accelerators import accelerator_charts, accelerator_rows
from holdfast.pages.charts import Chart, Series, draw_chart, draw_shares, number, points, render, smooth
from holdfast.spec import Spec
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.telemetry import Event, Row, read_history
from holdfast.telemetry.cost import Cost, cost
from holdfast.telemetry.events import AttemptBegan, Progress
from holdfast.telemetry.exactness import read_exactness
from holdfast.telemetry.history import OBJECTIVE, PHASE_SECONDS
from holdfast.telemetry.ledger import CLASSES, Class, Ledger, ledger
from holdfast.telemetry.phases import STEP_PHASES

# How a run spent its time, as a picture; its goodput, hours, energy and cost, as tiles at the top of a page.

MOST_RANKS = 32  # ranks that get their own bar


def draw_time(account: Ledger) -> Markup:
    """Time spent by each rank, by class; above MOST_RANKS ranks, one bar for all."""
    bars: list[tuple[str, Mapping[Class, float]]] = [("all ranks", account.seconds)]
    if len(account.ranks) <= MOST_RANKS:
        bars = [(f"rank {rank}", seconds) for rank, seconds in sorted(account.ranks.items())]
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
        price = spent.price_per_million_tokens
        notes = [spent.prices.currency, "" if price is None else f"{number(price)} a million tokens"]
        tiles.append(("Cost", number(spent.price), ", ".join(filter(None, notes))))
    return tiles


MEMORY = ("system.gpu_memory_bytes", "system.rank0_peak_memory_bytes")  # of the accelerator, otherwise of the process
COLOURS = ("first", "second", "third", "fourth")


def draw_training(
    spec: Spec,
    run_id: str,
    store: Store,
    events: Sequence[Event],
    now: float | None = None,
    again: int | None = None,
    *,
    history: Sequence[Row] | None = None,
) -> str:
    """The page of a run with these events and this `history` (default: the store's).

    `now` (unix seconds) is the end of the accounting of an unfinished run. `again` is the number of seconds after which
    a browser reloads the page.
    """
    rows = _with_newest(read_history(store, run_id) if history is None else history, events)
    result = _result(store, run_id)
    loss, norm, rate, speed = (
        points(rows, name) for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    )
    used = [(step, 100 * share) for step, share in points(rows, "mfu")]
    charts = [
        Chart("Training loss, nats a token", [Series("loss", loss, "faint"), Series("average", smooth(loss), "first")]),
        Chart("Gradient norm", [Series("norm", norm, "second")], height=190, from_zero=True),
        Chart("Learning rate", [Series("rate", rate, "third")], height=190, from_zero=True),
        Chart("Throughput, tokens a second", [Series("tokens/s", speed, "fourth")], height=190, from_zero=True),
    ]
    charts += answer_charts(rows)
    if used:
        charts.append(Chart("MFU, percent", [Series("MFU", used, "second")], height=190, from_zero=True))
    charts += [_where_time_goes(rows), *accelerator_charts(events)]
    step = int(rows[-1]["step"]) if rows else 0
    tiles = [("Training loss", f"{loss[-1][1]:.4f}", "nats a token, the last step")] if loss else []
    if "parameters" in result:
        tiles.append(("Parameters", number(result["parameters"]), "trained"))
    if spec.train.script is None:
        tokens = BatchSizes.of(spec.training).before(step) * spec.model.context
        tiles.append(("Tokens", number(tokens), f"in {step:,} steps"))
    else:
        tiles.append(("Steps", f"{step:,}", "done"))
        if (exactness := read_exactness(store, run_id)) is not None:
            tiles.append(("Resumption", "exact" if exactness.is_exact else "not verified", exactness.text))
    attempts = len({event.attempt for event in events if isinstance(event, AttemptBegan)})
    tiles.append(("Attempts", str(result.get("attempts", attempts)), "gangs that formed"))
    if speed:
        tiles.append(("Throughput", number(statistics.median(y for _, y in speed)), "tokens a second, median"))
    if used:
        tiles.append(("MFU", f"{statistics.median(y for _, y in used):.1f} %", "of the accelerators' peak, median"))
    if memory := next(filter(None, ([y for _, y in points(rows, name)] for name in MEMORY)), None):
        tiles.append(("Memory", number(max(memory)), "bytes at most, rank 0"))
    account = ledger(events, now)
    tiles += account_tiles(account, cost(spec, events, account))
    return render(
        "curves.html",
        name=spec.name,
        run_id=run_id,
        step=step,
        steps=spec.training.steps,
        tiles=tiles,
        curves=[(chart, draw_chart(chart)) for chart in charts],
        time=draw_time(account),
        accelerators=accelerator_rows(events),
        again=again,
        written="" if again is None or now is None else time.strftime("%H:%M:%S UTC", time.gmtime(now)),
    )


def answer_charts(rows: Sequence[Row]) -> list[Chart]:
    """The curves of a run that learns from its own answers. None of another run."""
    titles = {
        "reward": "Reward of an answer",
        "answer_tokens": "Length of an answer, tokens",
        "kl": "Divergence from the reference model, nats a token",
        "entropy": "Entropy of a sampled token, nats",
        "no_signal_share": "Groups whose answers have one reward, share",
    }
    found = {name: points(rows, f"{OBJECTIVE}{name}") for name in titles}
    if not found["reward"]:
        return []
    return [
        Chart(titles[name], [Series(name, values, colour)], height=190, from_zero=True)
        for (name, values), colour in zip(found.items(), ("first", "second", "third", "fourth", "second"), strict=True)
        if values
    ]


def _with_newest(history: Sequence[Row], events: Sequence[Event]) -> list[Row]:
    """The history up to the newest checkpoint, and the progress that rank 0 reported since."""
    rows = list(history)
    last = rows[-1]["step"] if rows else 0
    newer = {event.step: event for event in events if isinstance(event, Progress) and event.step > last}
    for step in sorted(newer):
        fields = newer[step].model_dump(exclude_none=True)
        row: Row = {name: fields[name] for name in fields if name != "phase_seconds"}
        rows.append(row | {PHASE_SECONDS + name: seconds for name, seconds in newer[step].phase_seconds.items()})
    return rows


def _result(store: Store, run_id: str) -> dict[str, Any]:
    """The result of the train step; empty before the run has finished."""
    try:
        return read_json_object(store, layout.result(run_id))
    except MissingError:
        return {}


def _where_time_goes(history: Sequence[Row]) -> Chart:
    """Milliseconds per step of the longest phases."""
    by_phase = {name: points(history, PHASE_SECONDS + name) for name in STEP_PHASES}
    longest = sorted(by_phase, key=lambda name: -sum(y for _, y in by_phase[name]))[: len(COLOURS)]
    lines = [
        Series(name, [(step, 1000 * seconds) for step, seconds in by_phase[name]], colour)
        for name, colour in zip(longest, COLOURS, strict=True)
        if by_phase[name]
    ]
    return Chart("Milliseconds of a step, the phases that take longest", lines, height=190, from_zero=True)
