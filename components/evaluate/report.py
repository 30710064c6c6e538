"""The report: one self-contained HTML page with the verdict, the curves, the data, the lineage and the samples.

Promises that it loads nothing and runs nothing (its own policy forbids both), that whatever a model, a spec or a source
says is shown as text, and that the same run gives the same page. It reads well in a browser and in the KFP UI's frame.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from holdfast.components.checkpoint import list_attempts
from holdfast.components.dataset import Manifest
from holdfast.components.evaluate.charts import Chart, Series, draw_chart, number, smooth
from holdfast.components.evaluate.verdict import Measured, Verdict
from holdfast.components.spec.load import dump_spec
from holdfast.components.spec.plan import Segment, changes_in_words
from holdfast.components.spec.tree import Spec
from holdfast.components.store import Store, layout
from holdfast.components.store.sequence import record_key
from holdfast.components.telemetry import Event, Row, read_events, read_history

NEWS = 50  # lines of what happened, the last ones


def draw(spec: Spec, verdict: Verdict, manifest: Manifest, store: Store) -> str:
    """The whole page. What the store no longer has is left out."""
    history = read_history(store, verdict.run_id)
    result = _json(store, layout.result(verdict.run_id)) or {}
    attempts = _attempts(store, verdict.run_id, history)
    body = [
        _header(spec, verdict),
        _tiles(verdict, result, history),
        _checks(verdict),
        _curves(verdict, history, attempts),
        _champion(verdict),
        _samples(spec, verdict),
        _data(manifest),
        _training(attempts, result, read_events(store, verdict.run_id)),
        _plans([Segment.model_validate(each) for each in result.get("segments", [])]),
        _lineage(verdict, manifest, store),
        _section("Spec", f"<details><summary>Show every field</summary><pre>{escape(dump_spec(spec))}</pre></details>"),
    ]
    style = files("holdfast.components.evaluate").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(spec.name)} · {escape(verdict.run_id)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _header(spec: Spec, verdict: Verdict) -> str:
    word = verdict.word.replace("_", " ")
    symbol = "✓" if verdict.blessed else "✕"
    return (
        f'<header class="{verdict.word}"><div><p class="eyebrow">Evaluation · run <code>{escape(verdict.run_id)}</code>'
        f" · step {verdict.step:,}</p><h1>{escape(spec.name)}</h1></div>"
        f'<p class="badge"><span aria-hidden="true">{symbol}</span> {word}</p></header>\n'
    )


def _tiles(verdict: Verdict, result: dict[str, Any], history: Sequence[Row]) -> str:
    speeds = [row["tokens_per_second"] for row in history if "tokens_per_second" in row]
    tiles = [
        ("Held-out loss", f"{verdict.metrics['loss']:.4f}", "nats a token"),
        ("Perplexity", f"{verdict.metrics['perplexity']:.4g}", "exp of the loss"),
        ("Bits per byte", f"{verdict.metrics['bits_per_byte']:.4f}", "of UTF-8 text"),
        ("Parameters", number(result["parameters"]), "trained") if result.get("parameters") else None,
        ("Tokens", number(result["tokens"]), f"in {verdict.step:,} steps") if result.get("tokens") else None,
        ("Throughput", number(statistics.median(speeds)), "tokens a second, median") if speeds else None,
        ("Wall time", _duration(result["seconds"]), "first start to end") if "seconds" in result else None,
    ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(unit)}</small></dd></div>"
        for name, value, unit in filter(None, tiles)
    )
    return f'<dl class="tiles">{cells}</dl>\n'


def _checks(verdict: Verdict) -> str:
    ordered = sorted(verdict.checks, key=lambda check: check.passed)
    items = "".join(
        f'<li class="{"passed" if check.passed else "failed"}"><span class="mark-word">'
        f"{'passed' if check.passed else 'failed'}</span><span>{escape(check.sentence)}</span>"
        f"<code>{escape(check.name)}</code></li>"
        for check in ordered
    )
    return _section("Verdict", f'<ul class="checks">{items}</ul>')


def _curves(verdict: Verdict, history: Sequence[Row], attempts: Sequence[_Attempt]) -> str:
    if len(history) < 2:
        return _section("Training", '<p class="muted">The history of this run has fewer than two steps.</p>')
    marks = [
        (attempt.steps[0], f"attempt {attempt.number} went on at step {attempt.steps[0]:,}")
        for attempt in attempts[1:]
        if attempt.steps is not None
    ]
    loss = _points(history, "loss")
    large = Chart(
        "Training loss, nats a token",
        [Series("loss", loss, "faint"), Series("average", smooth(loss), "first")],
        level=("held-out", float(verdict.metrics["loss"])),
        marks=marks,
    )
    small = [
        Chart("Gradient norm", [Series("norm", _points(history, "grad_norm"), "second")], 520, 190, True, marks=marks),
        Chart("Learning rate", [Series("rate", _points(history, "learning_rate"), "third")], 520, 190, True),
        Chart(
            "Throughput, tokens a second",
            [Series("tokens/s", _points(history, "tokens_per_second"), "fourth")],
            1080,
            170,
            True,
            marks=marks,
        ),
    ]
    legend = '<p class="legend"><span class="key first"></span>average <span class="key faint"></span>each step'
    legend += ' <span class="key dashed"></span>held-out' + (' <span class="key dot"></span>resumed' if marks else "")
    figures = "".join(
        f"<figure{' class=wide' if chart.width > 600 else ''}><figcaption>{escape(chart.title)}</figcaption>"
        f"{draw_chart(chart)}</figure>"
        for chart in small
    )
    table = _table(
        ("Step", "Loss", "Gradient norm", "Learning rate", "Tokens/s"),
        [
            [
                f"{row['step']:,}",
                *(_cell(row, name) for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second")),
            ]
            for row in _evenly(history, 20)
        ],
        numbers=True,
    )
    return _section(
        "Training",
        f'<figure class="wide"><figcaption>{escape(large.title)}</figcaption>{legend}</p>{draw_chart(large)}</figure>'
        f'<div class="pair">{figures}</div><details><summary>The same as a table</summary>{table}</details>',
    )


def _champion(verdict: Verdict) -> str:
    champion = verdict.champion
    if champion is None:
        return ""
    who = f"{champion.model} version {champion.version}"
    if champion.measured is None:
        return _section("Champion", f"<p>{escape(champion.note)}</p>")
    ours = Measured.model_validate(verdict.metrics)
    rows = []
    for name, title in (
        ("bits_per_byte", "Bits per byte"),
        ("loss", "Loss, nats a token"),
        ("perplexity", "Perplexity"),
    ):
        mine, theirs = getattr(ours, name), getattr(champion.measured, name)
        change = f"{(mine / theirs - 1):+.2%}" if theirs and math.isfinite(mine / theirs) else "–"
        rows.append([title, f"{mine:.4f}", f"{theirs:.4f}", change])
    rows.append(["Tokens scored", f"{ours.tokens:,}", f"{champion.measured.tokens:,}", ""])
    rows.append(["Bytes of text", f"{ours.text_bytes:,}", f"{champion.measured.text_bytes:,}", ""])
    table = _table(("", "This model", f"Champion: {who}", "Change"), rows, numbers=True)
    return _section(
        "Champion",
        f"{table}<p class='muted'>{escape(champion.note)} Lower is better in the first three rows; only bits per byte "
        f"can be compared between tokenizers. Champion's run: <code>{escape(champion.run_id)}</code>.</p>",
    )


def _samples(spec: Spec, verdict: Verdict) -> str:
    if not verdict.samples:
        return ""
    shown = "".join(
        f'<figure class="sample"><pre><b>{escape(sample.prompt)}</b>{escape(sample.text)}</pre></figure>'
        for sample in verdict.samples
    )
    settings = f"Prompt in bold. Temperature {spec.evaluation.temperature:g}, seed {spec.training.seed}."
    return _section("Samples", f'<p class="muted">{settings}</p>{shown}')


def _data(manifest: Manifest) -> str:
    reasons = sorted({reason for source in manifest.sources for reason, count in source.dropped.items() if count})
    rows = []
    for source in manifest.sources:
        cells = [f"<code>{escape(source.uri)}</code>"]
        for split in ("train", "validation"):
            found = source.splits.get(split)
            cells += [f"{found.documents:,}", f"{found.tokens:,}"] if found else ["0", "0"]
        cells += [f"{source.dropped.get(reason, 0):,}" for reason in reasons]
        rows.append(cells)
    titles = ["Source", "Documents", "Tokens", "Held-out documents", "Held-out tokens"]
    titles += [f"Dropped: {reason.replace('_', ' ')}" for reason in reasons]
    table = _table(titles, rows, numbers=True, safe=True)
    tokenizer = manifest.tokenizer
    return _section(
        "Data",
        f"{table}<p class='muted'>Tokenizer: {tokenizer.vocabulary:,} tokens, texts end with "
        f"<code>{escape(tokenizer.end_of_text)}</code>.</p>",
    )


def _training(attempts: Sequence[_Attempt], result: dict[str, Any], events: Sequence[Event]) -> str:
    if not attempts:
        return ""
    rows = [
        [
            str(attempt.number),
            _instant(attempt.claimed),
            attempt.host,
            "none kept" if attempt.steps is None else f"{attempt.steps[0]:,} to {attempt.steps[1]:,}",
        ]
        for attempt in attempts
    ]
    count = len(attempts) - 1
    said = "It ran through without an interruption." if not count else (
        f"It was interrupted {count} time{'s' if count > 1 else ''} and went on from the last checkpoint each time."
    )  # fmt: skip
    wall = f" Wall time {_duration(result['seconds'])}, interruptions included." if "seconds" in result else ""
    table = _table(("Attempt", "Began", "Host", "Steps in the history"), rows)
    news = [(_instant(event.time), event.source, event.text) for event in events if event.is_news][-NEWS:]
    happened = f"<p>What happened on the way:</p>{_table(('When', 'Who', 'What'), news)}" if news else ""
    return _section("Attempts", f"<p>{said}{wall}</p>{table}{happened}")


def _plans(segments: Sequence[Segment]) -> str:
    """Under which plans the run was computed: bits are promised for these segments in this order."""
    if not segments:
        return ""
    count = len(segments) - 1
    said = "It was computed under one plan." if not count else (
        f"Its plan was changed {count} time{'s' if count > 1 else ''}: the same segments in this order give the same "
        "bits, another plan throughout does not."
    )  # fmt: skip
    changes = changes_in_words(segments)
    rows = [
        [f"{segment.from_step:,}", str(segment.attempt), "; ".join(changed) or "the first plan", segment.fingerprint]
        for segment, changed in zip(segments, changes, strict=True)
    ]
    plan = segments[-1].plan
    facts = [[name, str(value)] for name, value in {**plan.settings, **plan.surroundings}.items()]
    return _section(
        "Plan",
        f"<p>{said}</p>{_table(('From step', 'Attempt', 'What changed', 'Fingerprint'), rows)}"
        f"<details><summary>The {'last ' if count else ''}plan</summary>{_table(('', 'Value'), facts)}</details>",
    )


def _lineage(verdict: Verdict, manifest: Manifest, store: Store) -> str:
    from holdfast.components.tracking.lineage import git_commit

    facts = [
        ("Run", verdict.run_id),
        ("Dataset", verdict.dataset_id),
        ("Checkpoint", verdict.checkpoint),
        ("State digest", verdict.state_digest),
        ("Exported model", verdict.export),
        ("Store", store.url),
        ("Verdict", layout.verdict(verdict.run_id, verdict.key)),
        ("Code, Git commit", git_commit() or "not in a Git repository"),
        ("Tokenizer digest", manifest.tokenizer.digest),
    ]
    for source in manifest.sources:
        lineage = source.lineage
        facts.append((f"Source {source.uri}", f"{lineage.kind}, {lineage.files:,} files, digest {lineage.digest}"))
        if lineage.revision:
            kind = "DVC revision" if lineage.kind == "dvc" else "Revision"
            where = f" of {lineage.repository}" if lineage.repository else ""
            facts.append((f"{kind} of {source.uri}", f"{lineage.revision}{where}"))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>' for name, value in facts
    )
    return _section("Lineage", f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>')


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, safe: bool = False) -> str:
    """A table whose first column names the row. `numbers`: the others are right-aligned; `safe`: cells are HTML."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = ""
    for row in rows:
        first, *others = row if safe else [escape(cell) for cell in row]
        body += f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>"
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _points(history: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in history if isinstance(row.get(name), int | float)]


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


def _attempts(store: Store, run_id: str, history: Sequence[Row]) -> list[_Attempt]:
    claims = [
        (attempt, written, _json(store, record_key(layout.attempts(run_id), attempt)) or {})
        for attempt, written in list_attempts(store, run_id)
    ]
    starts = [float(claim.get("claimed", written)) for _, written, claim in claims]
    ends = [*starts[1:], math.inf][: len(starts)]
    attempts = []
    for (attempt, _, claim), start, end in zip(claims, starts, ends, strict=True):
        steps = [row["step"] for row in history if start <= row.get("time", 0) < end]
        attempts.append(_Attempt(attempt, str(claim.get("host", "")), start, (steps[0], steps[-1]) if steps else None))
    return attempts


def _json(store: Store, key: str) -> dict[str, Any] | None:
    if store.stat(key) is None:
        return None
    value = json.loads(store.get(key))
    return value if isinstance(value, dict) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{value} {unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0 s"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
