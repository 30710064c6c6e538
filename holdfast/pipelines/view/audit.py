"""Output of `holdfast audit batch`, `holdfast audit diff` and `holdfast audit replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from holdfast.pipelines.view.checkpoints import print_difference
from holdfast.pipelines.view.report import WIDE
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.pipelines.view.terminal import SafeConsole

if TYPE_CHECKING:
    from holdfast.audit.document_losses import StepLosses
    from holdfast.audit.replay_job import ReplayResult
    from holdfast.audit.sampling import Audit
    from holdfast.checkpoint.tools import Divergence
    from holdfast.corpus.batch import Batch, Passage

SHOWN_FIELDS = 12  # differing fields of the specs; --json has all
SHOWN_DOCUMENTS = 20  # with the highest loss; --json has all


def print_batch(run_id: str, found: Batch, text: bool) -> None:
    """Print the rows of a batch with their documents and, if requested, their text."""
    console = _console()
    console.print(f"step {found.step:,} of run {run_id}: {len(found.rows):,} rows of dataset {found.dataset_id}")
    if found.note:
        console.print(f"[yellow]note:[/yellow] {escape(found.note)}", highlight=False)
    for row in found.rows:
        console.print(
            f"\n[bold]row {row.number}[/bold], micro-batch {row.micro_batch}: {escape(row.source)} from token "
            f"{row.position:,}, {row.counted:,} targets",
            highlight=False,
        )
        table = Table(box=None, pad_edge=False, show_header=False)
        for passage in row.passages:
            table.add_row(f"  {passage.tokens[0]:>6}-{passage.tokens[1]}", escape(_named(passage)))
        console.print(table)
        if text:
            console.print(row.text, markup=False, highlight=False, soft_wrap=True)


def print_divergence(
    one: RunRecord, other: RunRecord, found: Divergence, differences: dict[str, tuple[Any, Any]]
) -> None:
    """Print how far two runs are equal, and where they diverge."""
    console = _console()
    for name, values in list(differences.items())[:SHOWN_FIELDS]:
        console.print(
            f"[dim]{escape(name)}[/dim]: {escape(str(values[0]))}, and {escape(str(values[1]))}", highlight=False
        )
    if len(differences) > SHOWN_FIELDS:
        console.print(f"and {len(differences) - SHOWN_FIELDS} more fields of the specs: --json has them all")
    if found.none:
        last = min(found.steps)
        suffix = f"; {other.run_id} continues to {found.steps[1]:,}" if found.steps[1] > last else ""
        suffix = f"; {one.run_id} continues to {found.steps[0]:,}" if found.steps[0] > last else suffix
        state = f", and so is the state at step {found.equal_at:,}" if found.equal_at is not None else ""
        console.print(f"equal: {found.compared:,} steps are the same bit for bit{state}{suffix}", highlight=False)
        return
    if found.first is not None:
        console.print(f"[red]the runs part at step {found.first:,}[/red]", highlight=False)
        for figure in found.figures:
            console.print(f"  {figure.name}: {figure.values[0]!r}, and {figure.values[1]!r}", highlight=False)
    else:
        console.print("[red]the figures of all steps are the same, and the states are not[/red]", highlight=False)
    if found.equal_at is not None:
        console.print(f"the states are still equal at step {found.equal_at:,}", highlight=False)
    if found.differs_at is None or found.difference is None:
        console.print("no checkpoint after it is left of both: so that no tensor can be named", highlight=False)
        return
    console.print(f"the first checkpoint of both that differs is that of step {found.differs_at:,}:", highlight=False)
    print_difference(found.difference, "")


def print_replayed(run_id: str, found: ReplayResult) -> None:
    """Print the result of a replay."""
    console = _console()
    origin = f"from the checkpoint at step {found.start:,}" if found.start else "from the first state"
    console.print(
        f"run {run_id}: computed again {origin} to step {found.last:,} ({escape(found.plan)})", highlight=False
    )
    if found.none:
        console.print(
            f"equal: {found.figures:,} figures, {found.digests:,} of them state digests, are the same bit for bit",
            highlight=False,
        )
        return
    console.print(f"[red]step {found.first:,} is not what the run recorded[/red]", highlight=False)
    for difference in found.differing:
        console.print(
            f"  {difference.name}: {difference.recorded!r} recorded, {difference.computed!r} here", highlight=False
        )


def print_losses(found: StepLosses) -> None:
    """Print the documents of a step with the highest loss, and whether all of them make up the recorded loss."""
    console = _console()
    if found.note:
        console.print(f"[yellow]note:[/yellow] {escape(found.note)}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("loss", "tokens", "share", "row"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in the row", no_wrap=True)
    table.add_column("source", overflow="fold")
    table.add_column("text", overflow="fold")
    for document in found.documents[:SHOWN_DOCUMENTS]:
        table.add_row(
            "not finite" if document.loss is None else f"{document.loss:.4f}",
            f"{document.counted:,}",
            "" if document.share is None else f"{document.share:.1%}",
            str(document.row),
            f"{document.tokens[0]}-{document.tokens[1]}",
            escape(document.where or document.source),
            escape(" ".join(document.text.split())),
        )
    console.print(table)
    if len(found.documents) > SHOWN_DOCUMENTS:
        console.print(f"and {len(found.documents) - SHOWN_DOCUMENTS:,} more documents: --json has them all")
    loss, recorded = ("not finite" if value is None else f"{value!r}" for value in (found.loss, found.recorded))
    comparison = "the same within 1e-6" if found.agrees else "[red]not the same within 1e-6[/red]"
    console.print(
        f"step {found.step:,}: the mean of the documents' losses, weighted by their {found.counted:,} tokens, is "
        f"{loss}; the record has {recorded}, which was added in fp32: {comparison}",
        highlight=False,
    )


def print_audit(found: Audit) -> None:
    """Print the result of an audit sample."""
    console = _console()
    for replayed in found.audited:
        print_replayed(replayed.run_id, replayed.found)
    for refused in found.refused:
        console.print(
            f"run {refused.run_id}: steps {refused.stretch.start + 1:,} to {refused.stretch.last:,} cannot be computed "
            f"again here (code {int(refused.code)}): {escape(refused.reason)}",
            highlight=False,
        )
    console.print(
        f"seed {found.seed}: {len(found.audited)} computed again, {len(found.refused)} refused, {found.left} left for "
        "another sample",
        highlight=False,
    )


@contextmanager
def steps_done(quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show the number of computed steps on standard error, if that is a terminal."""
    console = SafeConsole(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("steps", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def spec_differences(one: RunRecord, other: RunRecord) -> dict[str, tuple[Any, Any]]:
    """The differences between two runs' specs and datasets, by dotted names."""
    first, second = ({**dict(flatten(run.spec)), "dataset": run.dataset_id} for run in (one, other))
    names = [*first, *(name for name in second if name not in first)]
    return {
        name: (first.get(name, "not set"), second.get(name, "not set"))
        for name in names
        if first.get(name, "not set") != second.get(name, "not set")
    }


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A tree of JSON values as dotted names and values. A list of plain values is one value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from flatten(inner, f"{name}.{number}")
    else:
        yield name, value


def _named(passage: Passage) -> str:
    if passage.of is None:
        return "a document"
    return f"{passage.where}, its tokens {passage.of[0]:,}-{passage.of[1]:,}"


def _console() -> Console:
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=max(WIDE, console.width))
