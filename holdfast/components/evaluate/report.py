"""Report of a run: one self-contained HTML page with verdict, curves, data, lineage and samples.

The page loads nothing and runs nothing, and its content security policy forbids both. All text from models, specs and
sources is shown as text. The same run gives the same page, for browsers and for the frame of the KFP UI. This module
gathers the content, and `templates` has the design.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint import list_attempts
from holdfast.dataset import Manifest
from holdfast.pages import (
    Chart,
    Series,
    account_tiles,
    answer_charts,
    draw_chart,
    draw_time,
    number,
    points,
    render,
    smooth,
)
from holdfast.scoring.verdict import Measured, Verdict, solved_shares
from holdfast.spec.load import dump_spec
from holdfast.spec.plan import Segment, changes_in_words
from holdfast.spec.tree import Spec
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.store.sequence import record_key
from holdfast.telemetry import Event, Row, read_events, read_history
from holdfast.telemetry.cost import cost
from holdfast.telemetry.ledger import ledger

NEWS = 50  # newest events that are listed
OWN = "metric."  # begins the names of metrics of user code
CURVES = ("loss", "grad_norm", "learning_rate", "tokens_per_second")


def draw(spec: Spec, verdict: Verdict, manifest: Manifest | None, store: Store) -> str:
    """The whole page. Data that the store no longer has is left out. A script may have no dataset (`manifest`)."""
    history = read_history(store, verdict.run_id)
    result = _json(store, layout.result(verdict.run_id)) or {}
    attempts, events = _attempts(store, verdict.run_id, history), read_events(store, verdict.run_id)
    account = ledger(events)
    return render(
        "report.html",
        name=spec.name,
        spec=spec,
        spec_yaml=dump_spec(spec),
        verdict=verdict,
        tiles=_tiles(verdict, result, history) + account_tiles(account, cost(spec, events, account)),
        curves=_curves(verdict, history, attempts) if len(history) > 1 else None,
        comparison=_comparison(verdict),
        data=_data(manifest) if manifest is not None else None,
        attempts=[attempt.row for attempt in attempts],
        news=_news(events),
        time=draw_time(account) if account.total else None,
        wall=_duration(result["seconds"]) if "seconds" in result else "",
        plan=_plan([Segment.model_validate(segment) for segment in result.get("segments", [])]),
        lineage=_lineage(spec, verdict, manifest, store),
    )


def _tiles(verdict: Verdict, result: dict[str, Any], history: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Title, value and unit of the figures at the top."""
    is_text = "loss" in verdict.metrics
    speeds = [row["tokens_per_second"] for row in history if "tokens_per_second" in row]
    tiles = [
        ("Held-out loss", f"{verdict.metrics['loss']:.4f}", "nats a token") if is_text else None,
        ("Perplexity", f"{verdict.metrics['perplexity']:.4g}", "exp of the loss") if is_text else None,
        ("Bits per byte", f"{verdict.metrics['bits_per_byte']:.4f}", "of UTF-8 text") if is_text else None,
        *(
            (name, f"{share:.1%}", "of the held-out prompts")
            for name, share in solved_shares(verdict.metrics, verdict.settings.answers)
        ),
        ("Parameters", number(result["parameters"]), "trained") if result.get("parameters") else None,
        ("Tokens", number(result["tokens"]), f"in {verdict.step:,} steps") if result.get("tokens") else None,
        ("Throughput", number(statistics.median(speeds)), "tokens a second, median") if speeds else None,
        ("Wall time", _duration(result["seconds"]), "first start to end") if "seconds" in result else None,
    ]
    tasks = [
        (f"Task {task.task}", f"{task.value:.4g}", f"{task.metric}, {task.examples:,} examples")
        for task in verdict.tasks
    ]
    own = [
        (name.removeprefix(OWN), f"{value:.4g}", "metric of your own")
        for name, value in verdict.metrics.items()
        if name.startswith(OWN)
    ]
    return [tile for tile in tiles if tile is not None] + own + tasks


def _curves(verdict: Verdict, history: Sequence[Row], attempts: Sequence[_Attempt]) -> dict[str, Any]:
    marks = [
        (attempt.steps[0], f"attempt {attempt.number} resumed at step {attempt.steps[0]:,}")
        for attempt in attempts[1:]
        if attempt.steps is not None
    ]
    loss, norm, rate, speed = (points(history, name) for name in CURVES)
    held_out = verdict.metrics.get("loss")
    large = Chart(
        "Training loss, nats a token" if held_out is not None else "Training loss",
        [Series("loss", loss, "faint"), Series("average", smooth(loss), "first")],
        level=None if held_out is None else ("held-out", float(held_out)),
        marks=marks,
    )
    small = [
        Chart("Gradient norm", [Series("norm", norm, "second")], 520, 190, True, marks=marks),
        Chart("Learning rate", [Series("rate", rate, "third")], 520, 190, True),
        Chart("Throughput, tokens a second", [Series("tokens/s", speed, "fourth")], 1080, 170, True, marks=marks),
    ]
    small += [replace(chart, width=520) for chart in answer_charts(history)]
    small = [chart for chart in small if held_out is not None or chart.series[0].points]  # a script logs what it likes
    return {
        "large": _drawn(large) if loss or held_out is not None else None,
        "level": held_out is not None,
        "small": [_drawn(chart) for chart in small],
        "resumed": bool(marks),
        "rows": [[f"{row['step']:,}", *(_cell(row, name) for name in CURVES)] for row in _evenly(history, 20)],
    }


def _drawn(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "drawn": draw_chart(chart), "wide": chart.width > 600}


def _comparison(verdict: Verdict) -> list[list[str]] | None:
    """This model and the champion, row by row. None if nothing was compared."""
    if verdict.champion is None or verdict.champion.measured is None:
        return None
    theirs = verdict.champion.measured
    own = [
        [f"Metric {name}", f"{verdict.metrics[f'{OWN}{name}']:.4f}", f"{other:.4f}", ""]
        for name, other in theirs.own.items()
        if f"{OWN}{name}" in verdict.metrics
    ]
    if not isinstance(theirs, Measured):
        return own
    ours, rows = Measured.model_validate(verdict.metrics), []
    for title, value, other in (
        ("Bits per byte", ours.bits_per_byte, theirs.bits_per_byte),
        ("Loss, nats a token", ours.loss, theirs.loss),
        ("Perplexity", ours.perplexity, theirs.perplexity),
    ):
        change = f"{(value / other - 1):+.2%}" if other and math.isfinite(value / other) else "–"
        rows.append([title, f"{value:.4f}", f"{other:.4f}", change])
    pairs = ((task, score.value) for task in verdict.tasks for score in theirs.tasks if task.asks_the_same(score))
    for task, other in pairs:
        change = f"{task.value - other:+.4f}"
        rows.append([f"Task {task.task}, {task.metric}", f"{task.value:.4f}", f"{other:.4f}", change])
    rows += own
    rows.append(["Tokens scored", f"{ours.tokens:,}", f"{theirs.tokens:,}", ""])
    rows.append(["Bytes of text", f"{ours.text_bytes:,}", f"{theirs.text_bytes:,}", ""])
    return rows


def _data(manifest: Manifest) -> dict[str, Any]:
    reasons = sorted({reason for source in manifest.sources for reason, count in source.dropped.items() if count})
    rows = []
    for source in manifest.sources:
        cells = [source.uri]
        for split in ("train", "validation"):
            counts = source.splits.get(split)
            cells += [f"{counts.documents:,}", f"{counts.tokens:,}"] if counts else ["0", "0"]
        rows.append([*cells, *(f"{source.dropped.get(reason, 0):,}" for reason in reasons)])
    titles = ["Source", "Documents", "Tokens", "Held-out documents", "Held-out tokens"]
    titles += [f"Dropped: {reason.replace('_', ' ')}" for reason in reasons]
    return {"titles": titles, "rows": rows, "drops": manifest.drops(), "tokenizer": manifest.tokenizer}


def _news(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """Time, source and text of the newest notable events of the run."""
    return [(_instant(event.time), event.source, event.text) for event in events if event.is_news][-NEWS:]


def _plan(segments: Sequence[Segment]) -> dict[str, Any] | None:
    """The plans of the run. Bits are promised for these segments in this order."""
    if not segments:
        return None
    changes = [
        [f"{segment.from_step:,}", str(segment.attempt), "; ".join(changed) or "the first plan", segment.fingerprint]
        for segment, changed in zip(segments, changes_in_words(segments), strict=True)
    ]
    plan = segments[-1].plan
    return {
        "changes": changes,
        "facts": [[name, str(value)] for name, value in {**plan.settings, **plan.surroundings}.items()],
    }


def _lineage(spec: Spec, verdict: Verdict, manifest: Manifest | None, store: Store) -> list[tuple[str, str]]:
    from holdfast.tracking.artifacts import git_commit

    facts = [
        ("Run", verdict.run_id),
        *([("Dataset", verdict.dataset_id)] if verdict.dataset_id else []),
        *([("Your code", spec.code)] if spec.code else []),
        ("Checkpoint", verdict.checkpoint),
        ("State digest", verdict.state_digest),
        ("Exported model", verdict.export),
        ("Store", store.url),
        ("Verdict", layout.verdict(verdict.run_id, verdict.key)),
        ("Scored on", verdict.device),
        ("Code, Git commit", git_commit() or "not in a Git repository"),
    ]
    if manifest is not None:
        facts.append(("Tokenizer digest", manifest.tokenizer.digest))
    for source in () if manifest is None else manifest.sources:
        lineage = source.lineage
        facts.append((f"Source {source.uri}", f"{lineage.kind}, {lineage.files:,} files, digest {lineage.digest}"))
        if lineage.revision:
            kind = "DVC revision" if lineage.kind == "dvc" else "Revision"
            repository = f" of {lineage.repository}" if lineage.repository else ""
            facts.append((f"{kind} of {source.uri}", f"{lineage.revision}{repository}"))
    return facts


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    return number(value) if isinstance(value, int | float) else ""


def _evenly(rows: Sequence[Row], count: int) -> list[Row]:
    if len(rows) <= count:
        return list(rows)
    return [rows[index * (len(rows) - 1) // (count - 1)] for index in range(count)]


@dataclass(frozen=True)
class _Attempt:
    """One start of the gang, and the steps of the history that it computed."""

    number: int
    host: str
    claimed: float  # unix seconds
    steps: tuple[int, int] | None  # first and last

    @property
    def row(self) -> list[str]:
        """A row of the table."""
        steps = "none kept" if self.steps is None else f"{self.steps[0]:,} to {self.steps[1]:,}"
        return [str(self.number), _instant(self.claimed), self.host, steps]


def _attempts(store: Store, run_id: str, history: Sequence[Row]) -> list[_Attempt]:
    claims = [
        (attempt, moment, _json(store, record_key(layout.attempts(run_id), attempt)) or {})
        for attempt, moment in list_attempts(store, run_id)
    ]
    starts = [float(claim.get("claimed", moment)) for _, moment, claim in claims]
    ends = [*starts[1:], math.inf][: len(starts)]
    attempts = []
    for (attempt, _, claim), start, end in zip(claims, starts, ends, strict=True):
        steps = [row["step"] for row in history if start <= row.get("time", 0) < end]
        attempts.append(_Attempt(attempt, str(claim.get("host", "")), start, (steps[0], steps[-1]) if steps else None))
    return attempts


def _json(store: Store, key: str) -> dict[str, Any] | None:
    if store.stat(key) is None:
        return None
    return read_json_object(store, key)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    texts = [f"{value} {unit}" for value, unit in parts if value][:2]
    return " ".join(texts) or "0 s"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
