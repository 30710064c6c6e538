"""Tables of runs and models, and the page of one run: `holdfast runs`, `holdfast models list`, `holdfast show`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.audit.records import read_audits
from holdfast.dataset.manifest import find_manifest
from holdfast.model.config.fixed_fields import fixed_fields
from holdfast.pages.accelerators import newest_figures
from holdfast.pipelines.view.ledger import cost_lines
from holdfast.pipelines.view.ledger import lines as ledger_lines
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.pipelines.view.summary import drops, figures, model_place, next_commands, outcome, reasons, report_place
from holdfast.pipelines.view.terminal import SafeConsole
from holdfast.pipelines.view.throughput import lines as accelerator_lines
from holdfast.pipelines.view.throughput import throughput
from holdfast.runtime.environment import log_dir
from holdfast.spec.plan import Segment, changes_in_words
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.telemetry import read_events
from holdfast.telemetry.cost import cost
from holdfast.telemetry.events import AttemptBegan, Event, Progress, SaveCommitted
from holdfast.telemetry.exactness import read_exactness
from holdfast.telemetry.ledger import is_active, ledger

if TYPE_CHECKING:
    from holdfast.tracking import Champion

# Timeline of a run for `holdfast show`, one line per event.


def timeline(events: Sequence[Event]) -> Iterator[tuple[str, str, str]]:
    """Time, source and text of the notable `events` (in order), and at the end the latest progress.

    Consecutive saved checkpoints share one line.
    """
    saved: list[SaveCommitted] = []
    for event in events:
        if isinstance(event, SaveCommitted) and (not saved or event.attempt == saved[0].attempt):
            saved.append(event)
        elif event.notable:
            yield from _saves(saved)
            saved = [event] if isinstance(event, SaveCommitted) else []
            if not saved:
                yield _when(event), event.source, event.text
    yield from _saves(saved)
    reported = [event for event in events if not event.silent]
    if reported and not reported[-1].notable:
        yield _when(reported[-1]), reported[-1].source, reported[-1].text


def _saves(saved: Sequence[SaveCommitted]) -> Iterator[tuple[str, str, str]]:
    if len(saved) == 1:
        yield _when(saved[0]), saved[0].source, saved[0].text
    elif saved:
        stall = sum(event.stall_seconds for event in saved)
        text = (
            f"saved {len(saved)} checkpoints, steps {saved[0].step} to {saved[-1].step}; training waited {stall:.2f} s"
        )
        yield _when(saved[-1]), saved[-1].source, text


def _when(event: Event) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.time))


WIDE = 120  # columns when the output is not a terminal, so nothing is truncated in a file or pipe


def print_runs(records: Sequence[RunRecord], store_url: str, where: str = "") -> None:
    """Print the table of runs, in their order. `where` is the condition that excluded the rest of the store, if any."""
    console = _console()
    if not records and where:
        message = f"No run in {store_url} matches --where: {where}. List all: holdfast runs --limit 0"
        console.print(message, markup=False, highlight=False, soft_wrap=True)
        return
    if not records:
        console.print(f"No runs in {store_url} yet. Start one: holdfast run examples/quickstart.yaml", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    tagged = any(record.tags for record in records)
    for title in ("run", "name", "state", "step", "loss", "verdict", "version", "when", *(["tags"] if tagged else [])):
        table.add_column(title, no_wrap=True, justify="right" if title in ("step", "loss") else "left")
    for record in records:
        table.add_row(
            record.run_id,
            escape(record.name),
            record.state,
            f"{record.step}/{record.steps}" if record.steps else str(record.step),
            "" if record.loss is None else f"{record.loss:.4f}",
            record.word.replace("_", " "),
            escape(record.model_version),
            ago(time.time() - record.changed),
            *([escape(", ".join(record.tags))] if tagged else []),
        )
    console.print(table)


def print_models(versions: Sequence[tuple[Champion, Sequence[str]]]) -> None:
    """Print the table of registered models."""
    console = _console()
    if not versions:
        console.print("No registered models yet. A run whose model passes its evaluation registers one.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("model", "version", "alias", "run", "loss", "perplexity", "when"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("version", "loss", "perplexity") else "left")
    for version, aliases in versions:
        loss, perplexity = (version.metrics.get(name) for name in ("loss", "perplexity"))
        table.add_row(
            escape(version.model),
            str(version.version),
            escape(", ".join(aliases)) + ("[red] foreign[/red]" if version.foreign else ""),
            escape(version.run_id),
            f"{loss:.4f}" if isinstance(loss, int | float) else "",
            f"{perplexity:.4g}" if isinstance(perplexity, int | float) else "",
            ago(time.time() - version.created),
        )
    console.print(table)
    for version, _ in versions:
        if version.foreign:
            console.print(f"[red]foreign, not used[/red]: {escape(version.foreign)}", highlight=False, soft_wrap=True)


def print_run(record: RunRecord, store: Store, whole_spec: bool = False) -> None:
    """Print all data about a run. The spec comes last, without defaults unless `whole_spec`."""
    console, events = _console(), read_events(store, record.run_id)
    for label, value in _facts(record, store, events):
        if label and not value:  # a script has no dataset
            continue
        console.print(f"[dim]{label:<11}[/dim] {escape(value)}", highlight=False, soft_wrap=True)
    rows = list(timeline(events))
    if rows:
        console.print("\n[dim]what happened[/dim]")
    for when, source, text in rows:
        console.print(f"[dim]{when}  {escape(source):<10}[/dim] {escape(text)}", highlight=False, soft_wrap=True)
    if record.spec:
        valid_spec = None if whole_spec else record.whole_spec()
        shown_spec = record.spec if valid_spec is None else valid_spec.model_dump(mode="json", exclude_defaults=True)
        console.print("\n[dim]spec[/dim]" + ("" if whole_spec else "[dim], without the defaults (--spec: all)[/dim]"))
        console.print(yaml.safe_dump(shown_spec, sort_keys=False), markup=False, highlight=False, soft_wrap=True)


def accounts(record: RunRecord, store: Store) -> dict[str, object]:
    """Dropped data, ledger and cost of a run, for `--json`."""
    events, spec = read_events(store, record.run_id), record.whole_spec()
    account = ledger(events, time.time() if is_active(events) else None)
    spent = None if spec is None else cost(spec, events, account).as_json()
    return {**_dropped(record, store), "ledger": account.as_json(), "cost": spent}


def _dropped(record: RunRecord, store: Store) -> dict[str, object]:
    manifest = find_manifest(store, record.dataset_id) if record.dataset_id else None
    if manifest is None:
        return {}
    examples = {reason: sample for reason in manifest.dropped() if (sample := manifest.example(reason))}
    return {
        "dropped": manifest.dropped(),
        "dropped_examples": {reason: example.model_dump() for reason, example in examples.items()},
        "left_out": [line for source in manifest.sources for line in source.lineage.left_out_in_words()],
    }


def ago(seconds: float) -> str:
    """An approximate time span before now."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _origin(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The salt and the fork that distinguish it from other runs of its spec."""
    if salt := record.described.get("salt"):
        yield "salt", str(salt)
    if record.parent:
        yield "forked", f"from step {record.parent.get('step')} of run {record.parent.get('run_id')}"


def _model(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The published model that the run started from, and the fields that its weights determine."""
    if (spec := record.whole_spec()) is not None and spec.model.init_from:
        fields = fixed_fields(spec.model)
        shape = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        yield "from", f"{spec.model.init_from}: {shape}, context {spec.model.context}"


def _facts(record: RunRecord, store: Store, events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    yield "run", record.run_id
    yield "name", record.name
    yield "state", outcome(record)
    yield from _listed("tags", [", ".join(record.tags)] if record.tags else [])
    yield from _listed("note", record.note.splitlines())
    yield from _listed("made by", _maker(record))
    yield "dataset", record.dataset_id
    yield from _listed("dropped", drops(store, record))
    yield from _origin(record)
    yield from _model(record)
    yield "step", f"{_reached(record, events)}, in {record.attempts} attempt{'s' if record.attempts != 1 else ''}"
    newest = _newest(record, store)
    if digest := newest.get("state_digest"):
        yield "digest", f"{digest}" + ("" if record.result is not None else f", of step {newest['step']}")
    yield from _listed("plan", _plans(newest))
    yield from _micro_batch(record, store)
    if (exactness := read_exactness(store, record.run_id)) is not None:
        yield "verified", exactness.text
    if sizes := _sizes(events):
        yield "ranks", sizes
    yield from _listed("speed", throughput(events))
    if is_active(events):
        began = next((event for event in reversed(events) if isinstance(event, AttemptBegan)), None)
        yield from _listed("devices", accelerator_lines(newest_figures(events), began))
    account = ledger(events, time.time() if is_active(events) else None)
    yield from _listed("time", ledger_lines(account))
    if (spec := record.whole_spec()) is not None:
        yield from _listed("cost", cost_lines(cost(spec, events, account)))
    if record.checkpoints:
        yield "checkpoints", ", ".join(str(step) for step in sorted(record.checkpoints))
    if record.result is not None:
        yield "figures", figures(record)
        yield "model", model_place(store, record)
    yield from _listed("audited", _audits(record, store))
    yield from _listed("why", [*reasons(record), *_why_stopped(record)])
    if record.verdict is not None:
        yield "report", report_place(store, record)
    logs = sorted(log_dir(record.run_id).glob("run-*.log"))
    if logs:
        yield "log", str(logs[-1])
    yield "changed", time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(record.changed))
    if record.result is not None:
        yield from _listed("next", next_commands(store, record))
    elif command := record.stopped.get("next_command"):
        yield "next", str(command)


def _maker(record: RunRecord) -> Iterator[str]:
    """The versions of Holdfast that differ from this one's, and the run of the same inputs before this one."""
    if maker := record.maker.in_words:
        yield maker + ("; this Holdfast makes another run of its spec" if record.maker.other_results else "")
    if earlier := record.described.get("earlier_run"):
        yield f"a newer Holdfast than run {earlier}, which has the same spec"


def _audits(record: RunRecord, store: Store) -> Iterator[str]:
    """The audited steps, and the differences."""
    audits = read_audits(store, record.run_id)
    steps = sum(audit.stretch.last - audit.stretch.start for audit in audits)
    differing = [audit for audit in audits if audit.first is not None]
    if audits:
        result = f"{len(differing)} of them differ" if differing else "all the same bit for bit"
        yield f"{steps:,} steps in {len(audits)} stretches: {result}"
    for audit in differing:
        yield f"step {audit.first:,} on {audit.host}: {audit.differing}"


def _listed(label: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Several lines, the first with the label."""
    for index, line in enumerate(lines):
        yield (label if index == 0 else ""), line


def _reached(record: RunRecord, events: Sequence[Event]) -> str:
    """The progress of the training: the last step that the ranks reported, and the last saved one."""
    progress = next((event for event in reversed(events) if isinstance(event, Progress)), None)
    steps = record.steps or (progress.steps if progress else 0)
    if record.result is not None or progress is None or progress.step <= record.step:
        return f"{record.step} of {steps}" if steps else str(record.step)
    return f"{progress.step} of {steps} ({f'step {record.step}' if record.step else 'none'} is saved)"


def _why_stopped(record: RunRecord) -> Iterator[str]:
    if reason := str(record.stopped.get("reason", "")):
        step = record.stopped.get("failed_step")
        yield f"{step}: {reason}" if step else reason


def _micro_batch(record: RunRecord, store: Store) -> Iterator[tuple[str, str]]:
    """The choice of `training.micro_batch: auto`, or that its trial is still to come."""
    spec = record.whole_spec()
    if spec is None or not spec.training.auto_micro_batch:
        return
    from holdfast.launch.micro_batch import find_choice

    choice = find_choice(store, record.run_id, spec)
    yield "micro-batch", "auto: " + ("no trial yet" if choice is None else choice.words)


def _sizes(events: Sequence[Event]) -> str:
    """The number of ranks by first step, if it changed."""
    began = [event for event in events if isinstance(event, AttemptBegan)]
    changes = [attempt for index, attempt in enumerate(began) if index == 0 or began[index - 1].world != attempt.world]
    return ", ".join(f"{attempt.world} from step {attempt.step}" for attempt in changes) if len(changes) > 1 else ""


def _newest(record: RunRecord, store: Store) -> dict[str, Any]:
    """The result, otherwise the newest checkpoint's root; empty without both."""
    if record.result is None and record.checkpoints:
        return read_json_object(store, layout.checkpoint(record.run_id, max(record.checkpoints)))
    return record.result or {}


def _plans(result: Mapping[str, Any]) -> Iterator[str]:
    """The plans of the run's segments, one per line."""
    segments = [Segment.model_validate(each) for each in result.get("segments", [])]
    for segment, changes in zip(segments, changes_in_words(segments), strict=True):
        yield f"from step {segment.from_step}: {'; '.join(changes) or segment.plan.summary}"


def _console() -> Console:
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=WIDE)
