"""Summary of a run: the verdict and its reasons, figures, locations, and next commands."""

import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from holdfast.dataset.manifest import find_manifest
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.runtime.environment import store_url
from holdfast.scoring.verdict import solved_shares
from holdfast.spec.errors import HoldfastError
from holdfast.store import Store, layout, open_store

SHORT_ID = 8  # hexadecimal digits of run ids in next commands


def print_summary(console: Console, store: Store, record: RunRecord, log: Path | None) -> None:
    """Print the summary of a finished run."""
    colour = "green" if record.word == "blessed" or not record.is_evaluated else "yellow"
    title = f"{escape(record.name)}  run {record.run_id}  [{colour}]{escape(outcome(record))}[/{colour}]"
    _print(console, f"\n[bold]{title}[/bold]\n")
    for label, value in _rows(store, record, log):
        if label and not value:  # a script has no verdict and no report
            continue
        _print(console, f"  [dim]{label:<11}[/dim] {escape(value)}")
    _print(console, "")


def outcome(record: RunRecord) -> str:
    """The outcome of the run in a few words."""
    if record.registration is None:
        return record.state
    word = record.word.replace("_", " ") or record.state
    alias = record.registration.get("alias")
    return f"{word}, registered as {record.model_version}" + (f" (made {alias})" if alias else "")


def figures(record: RunRecord) -> str:
    """The known values of loss, perplexity and bits per byte, and the shares of solved prompts."""
    parts = []
    if record.loss is not None:
        parts.append(f"training loss {record.loss:.4f}")
    verdict = record.verdict or {}
    metrics, answers = verdict.get("metrics", {}), verdict.get("settings", {}).get("answers", 1)
    parts += [f"{name} {share:.1%}" for name, share in solved_shares(metrics, answers)]
    for name, label in (("loss", "held-out loss"), ("perplexity", "perplexity"), ("bits_per_byte", "bits per byte")):
        value = metrics.get(name)
        if isinstance(value, int | float):
            parts.append(f"{label} {value:.4g}" if math.isfinite(value) else f"{label} {value}")
    for name, value in metrics.items():
        if name.startswith("metric.") and isinstance(value, int | float):
            parts.append(f"{name.removeprefix('metric.')} {value:.4g}")
    return ", ".join(parts)


def place(store: Store, key: str) -> str:
    """The location of an object in the store: a local path if possible, otherwise a URL."""
    path = store.local_path(key)
    return str(path) if path is not None else f"{store.url}/{key}"


def model_place(store: Store, record: RunRecord) -> str:
    """The location of the exported model's folder; empty without one."""
    export = str((record.result or {}).get("export") or "").rstrip("/")
    if not export:
        return ""
    name = "config.json"
    if record.is_script:  # any name
        with suppress(HoldfastError):  # a store that is away hides the path, not the summary
            name = next((info.key.removeprefix(f"{export}/") for info in store.list(f"{export}/")), name)
    return place(store, f"{export}/{name}").removesuffix(f"/{name}")


def report_place(store: Store, record: RunRecord) -> str:
    """The location of the report; empty without one."""
    if record.verdict is None:
        return ""
    return place(store, layout.verdict(record.run_id, record.verdict_key, "html"))


def reasons(record: RunRecord) -> list[str]:
    """The reasons of the verdict."""
    return [str(reason) for reason in (record.verdict or {}).get("reasons", [])]


def drops(store: Store, record: RunRecord) -> list[str]:
    """Data of its sources that the run's dataset lacks, with an example for each reason."""
    manifest = find_manifest(store, record.dataset_id) if record.dataset_id else None
    return manifest.drops() if manifest is not None else []


def next_commands(store: Store, record: RunRecord) -> list[str]:
    """Suggested next commands."""
    short = record.run_id[:SHORT_ID]
    prompts = (record.spec.get("evaluation") or {}).get("prompts") or ["Once upon a time"]
    prompt = " ".join(str(prompts[0]).split()) or "Once upon a time"
    store_option = [] if open_store(store_url()).url == store.url else ["--store", store.url]
    talks = (record.spec.get("data") or {}).get("kind", "text") != "text"
    use = ["chat", short] if talks else ["models", "generate", short, prompt]
    if record.is_script:
        use = ["checkpoints", "list", short]
    elif (record.spec.get("data") or {}).get("kind") == "prompts":
        use = ["rollouts", short]
    commands = [["show", short, *store_option], ["ui"]]
    if not record.is_script or record.step:  # a script without a session has no checkpoint
        commands.insert(0, [*use, *store_option])
    return [shlex.join(["holdfast", *command]) for command in commands]


def _rows(store: Store, record: RunRecord, log: Path | None) -> Iterator[tuple[str, str]]:
    for index, reason in enumerate(reasons(record)):
        yield ("why" if index == 0 else ""), reason
    yield "figures", figures(record)
    for index, line in enumerate(drops(store, record)):
        yield ("dropped" if index == 0 else ""), line
    yield "model", model_place(store, record)
    yield "report", report_place(store, record)
    if log is not None:
        yield "log", str(log)
    for index, command in enumerate(next_commands(store, record)):
        yield ("next" if index == 0 else ""), command


def _print(console: Console, markup: str) -> None:
    console.print(markup, highlight=False, soft_wrap=True)
