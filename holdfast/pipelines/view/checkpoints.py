"""Output of `holdfast checkpoints`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from holdfast.pipelines.view.report import WIDE, ago
from holdfast.pipelines.view.terminal import SafeConsole
from holdfast.spec.plan import changes_in_words

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint
    from holdfast.checkpoint.tools import CheckpointInfo, Collected, Difference, Verified

SHOWN_TENSORS = 20  # differing tensors to show; --json has all


def print_list(run_id: str, found: Sequence[CheckpointInfo]) -> None:
    """Print the checkpoints of a run, oldest first."""
    table = _table(f"checkpoints of run {run_id}", "step", "when", "state", "new", "attempt", "kept because")
    for info in found:
        if info.damaged:
            reason_text = f"[red]{escape(info.damaged)}[/red]"
        else:
            pins = "; ".join(f"by {pin.name}" + (f": {pin.reason}" if pin.reason else "") for pin in info.pins)
            reasons = [f"pinned {pins}" if reason == "pinned" else reason for reason in info.kept]
            reason_text = escape("; ".join(reasons)) or "nothing: the next collection takes it"
        state, new = (size(info.bytes), size(info.fresh)) if info.bytes else ("", "")
        table.add_row(
            f"{info.step:,}", ago(time.time() - info.committed), state, new, str(info.attempt or ""), reason_text
        )
    _console().print(table)


def print_checkpoint(checkpoint: Checkpoint) -> None:
    """Print one checkpoint."""
    manifest, console = checkpoint.manifest, _console()
    total = sum(info.elements * info.itemsize for info in manifest.tensors.values())
    facts = {
        "run": manifest.run_id,
        "step": f"{manifest.step:,}",
        "committed": f"{ago(time.time() - manifest.created)}, by attempt {manifest.attempt}",
        "state": f"{size(total)} in {len(manifest.tensors):,} tensors; {size(manifest.fresh)} were new",
        "digest": manifest.state_digest,
        "written from": ", ".join(f"{name} {value}" for name, value in manifest.layout.items()),
        "writers": f"{manifest.writers:,}",
        "dataset": manifest.dataset_id,
        "numbers": ", ".join(f"{name} {value}" for name, value in manifest.scalars.items()),
    }
    for segment, changes in zip(manifest.segments, changes_in_words(manifest.segments), strict=True):
        plan_text = "; ".join(changes) or segment.plan.summary
        facts[f"from step {segment.from_step}"] = f"attempt {segment.attempt}: {plan_text}"
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(f"[dim]{escape(name)}[/dim]", escape(value))
    console.print(table)
    tensors = _table("", "tensor", "dtype", "shape", "bytes")
    for name, info in manifest.tensors.items():
        tensors.add_row(escape(name), info.dtype, _index(info.shape), size(info.elements * info.itemsize))
    console.print(tensors)


def print_verified(found: Verified) -> None:
    """Print the result of verifying a checkpoint."""
    console = _console()
    subject = f"step {found.step:,}{', exported model' if found.export else ''}"
    if found.collected:
        console.print(f"{subject}: collected meanwhile, as retention wants it")
    elif found.intact:
        console.print(f"{subject}: intact, {size(found.bytes)} read")
    else:
        console.print(f"[red]{subject}: DAMAGED[/red]", highlight=False)
        for damage in found.damages:
            tensor = f" ({damage.tensor})" if damage.tensor else ""
            console.print(f"  {escape(damage.key)}{escape(tensor)}: {escape(damage.reason)}", highlight=False)


def print_difference(found: Difference, digest: str) -> None:
    """Print the differences of two checkpoints."""
    console = _console()
    if found.none:
        console.print(f"equal: both have the state digest {digest}")
        return
    for label, names in (("only in the first", found.only_one), ("only in the second", found.only_other)):
        if names:
            console.print(f"{label}: {escape(', '.join(names))}", highlight=False)
    for difference in found.unlike:
        console.print(f"of another form: {escape(difference)}", highlight=False)
    for scalar in found.scalars:
        console.print(f"{escape(scalar.name)}: {scalar.values[0]}, and {scalar.values[1]}", highlight=False)
    if found.tensors:
        table = _table(
            f"{len(found.tensors):,} tensors differ", "tensor", "elements", "first at", "there", "ulp", "most ulp"
        )
        for tensor in found.tensors[:SHOWN_TENSORS]:
            values = " | ".join(f"{value:.9g}" for value in tensor.values)
            ulps = ["" if count is None else f"{count:,}" for count in (tensor.ulps, tensor.most_ulps)]
            table.add_row(
                escape(tensor.name), f"{tensor.elements:,} of {tensor.of:,}", _index(tensor.first), values, *ulps
            )
        console.print(table)
        if len(found.tensors) > SHOWN_TENSORS:
            console.print(f"and {len(found.tensors) - SHOWN_TENSORS:,} more: --json has them all")


def print_collected(run_id: str, found: Collected, dry_run: bool) -> None:
    """Print the deletions of a collection, or those that it would make."""
    console, verb = _console(), "would delete" if dry_run else "deleted"
    if found.held_back:
        console.print(f"note: {escape(found.held_back)}", highlight=False)
    if not found.objects:
        reason = "" if found.held_back else f": retention keeps every checkpoint (holdfast checkpoints list {run_id})"
        console.print(f"{verb} nothing{reason}", highlight=False)
        return
    description = "no checkpoint, only what no checkpoint needs"
    if found.steps:
        steps, several = ", ".join(f"{step:,}" for step in found.steps), len(found.steps) > 1
        description = f"the checkpoint{'s' * several} of step{'s' * several} {steps}, and what nothing else needs"
    console.print(f"{verb} {description}: {found.objects:,} objects, {size(found.bytes)}", highlight=False)
    if dry_run:
        console.print("nothing was deleted: leave --dry-run out to delete it", highlight=False)


@contextmanager
def bytes_read(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of reading in bytes on standard error, if that is a terminal."""
    console = SafeConsole(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def _index(numbers: Sequence[int]) -> str:
    return escape(f"[{', '.join(map(str, numbers))}]")


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title=title or None, title_justify="left")
    for column in columns:
        right = column in ("step", "state", "new", "attempt", "elements", "bytes", "ulp", "most ulp")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _console() -> Console:
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=max(WIDE, console.width))
