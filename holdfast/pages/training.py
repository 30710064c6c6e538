"""The page of a training run: its figures, its curves over the steps, and how its ranks spent their time.

One HTML page that loads and runs nothing; the same run gives the same page. The page of an unfinished run shows the
data up to now and their time. It makes the browser reload the file, which the caller rewrites.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from holdfast.pages.accelerators import accelerator_charts, accelerator_rows
from holdfast.pages.accounts import account_tiles, draw_time
from holdfast.pages.charts import Chart, Series, draw_chart, number, points, smooth
from holdfast.pages.render import render
from holdfast.spec import Spec
from holdfast.spec.errors import MissingError
from holdfast.spec.sizes import BatchSizes
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.telemetry import Event, Row, read_history
from holdfast.telemetry.cost import cost
from holdfast.telemetry.events import AttemptBegan, Progress
from holdfast.telemetry.history import PHASE_SECONDS
from holdfast.telemetry.ledger import ledger
from holdfast.telemetry.phases import STEP_PHASES

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
    if used:
        charts.append(Chart("MFU, percent", [Series("MFU", used, "second")], height=190, from_zero=True))
    charts += [_where_time_goes(rows), *accelerator_charts(events)]
    step = int(rows[-1]["step"]) if rows else 0
    tiles = [("Training loss", f"{loss[-1][1]:.4f}", "nats a token, the last step")] if loss else []
    if result:
        tiles.append(("Parameters", number(result["parameters"]), "trained"))
    tokens = BatchSizes.of(spec.training).before(step) * spec.model.context
    tiles.append(("Tokens", number(tokens), f"in {step:,} steps"))
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


def _with_newest(history: Sequence[Row], events: Sequence[Event]) -> list[Row]:
    """The history up to the newest checkpoint, and the progress that rank 0 reported since."""
    rows = list(history)
    last = rows[-1]["step"] if rows else 0
    told = {event.step: event for event in events if isinstance(event, Progress) and event.step > last}
    for step in sorted(told):
        given = told[step].model_dump(exclude_none=True)
        row: Row = {name: given[name] for name in given if name != "phase_seconds"}
        rows.append(row | {PHASE_SECONDS + name: seconds for name, seconds in told[step].phase_seconds.items()})
    return rows


def _result(store: Store, run_id: str) -> dict[str, Any]:
    """The result of the train step; empty before the run has finished."""
    try:
        return read_json_object(store, layout.result(run_id))
    except MissingError:
        return {}


def _where_time_goes(history: Sequence[Row]) -> Chart:
    """Milliseconds per step of the longest phases."""
    found = {name: points(history, PHASE_SECONDS + name) for name in STEP_PHASES}
    longest = sorted(found, key=lambda name: -sum(y for _, y in found[name]))[: len(COLOURS)]
    lines = [
        Series(name, [(step, 1000 * seconds) for step, seconds in found[name]], colour)
        for name, colour in zip(longest, COLOURS, strict=True)
        if found[name]
    ]
    return Chart("Milliseconds of a step, the phases that take longest", lines, height=190, from_zero=True)
