"""The checker of a run's history: every sample once, one writer per step, ordered commits, equal bits."""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.checkpoint import read_manifest
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.rank.observers import samples_digest
from holdfast.store import Store, layout
from holdfast.telemetry import read_events, read_history
from holdfast.telemetry.events import SaveCommitted
from holdfast.telemetry.history import PURE_FIELDS

Row = Mapping[str, Any]


def wrongs(
    steps: int,
    rows: Sequence[Row],
    lineage: Sequence[tuple[int, int]],
    commits: Sequence[tuple[int, int]],
    measured: Iterable[tuple[int, Row]],
    samples: Sequence[str],
) -> list[str]:
    """The problems of a run of `steps` steps, in words. Empty if the history is sound.

    `rows` are the rows of its history. `lineage` lists the (after, attempt) pairs of its last checkpoint. `commits`
    lists the reported (attempt, step) pairs in order. `measured` is every row that any attempt (the first item) wrote.
    `samples` are the digests of the dataset's samples for the steps.
    """
    problems = []
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        problems.append(f"the history has the steps {[row['step'] for row in rows]}, not each of {steps} once")
    for row, expected in zip(rows, samples, strict=False):
        if row["samples"] != expected:
            problems.append(f"step {row['step']} was fed other samples than those of the dataset for it")
    if len({after - before for before, after in pairwise(row["tokens"] for row in rows)}) > 1:
        problems.append("steps consumed different numbers of tokens: samples are lost or repeated")
    for (after, attempt), (later, successor) in pairwise(lineage):
        if not (after < later and attempt < successor):
            problems.append(f"attempt {successor} resumed above {later} after attempt {attempt} above {after}")
    for writer in {attempt for attempt, _ in commits}:
        own = [step for attempt, step in commits if attempt == writer]
        if any(second <= first for first, second in pairwise(own)):
            problems.append(f"attempt {writer} committed {own}, not in the order of the steps")
    for (attempt, _), (following, step) in pairwise(commits):
        if following < attempt:
            problems.append(f"attempt {following} committed step {step} after attempt {attempt} had")
    first_bits: dict[int, tuple[int, list[Any]]] = {}
    for attempt, row in measured:
        pure = [row[name] for name in PURE_FIELDS]
        first, bits = first_bits.setdefault(row["step"], (attempt, pure))
        if bits != pure:
            problems.append(f"step {row['step']} of attempt {attempt} has other bits than that of attempt {first}")
    return problems


def samples_of(store: Store, assignment: Assignment) -> list[str]:
    """The digests of the dataset's samples for the steps of a run."""
    training, weights = assignment.training, assignment.source_weights
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.open(store, assignment.dataset_id, Path(folder))
        batches = dataset.training(
            assignment.model.context, training.global_batch, training.seed, weights, assignment.shuffle
        )
        return [f"{samples_digest(batches.batch(step)):016x}" for step in range(training.steps)]


def require_sound_history(store: Store, assignment: Assignment) -> None:
    """Fail with a list of all problems unless a finished run's history is sound."""
    run_id, steps = assignment.run_id, assignment.training.steps
    commits = [
        (event.attempt or 0, event.step) for event in read_events(store, run_id) if isinstance(event, SaveCommitted)
    ]
    measured = [
        (int(info.key.rpartition(".jsonl")[0].rpartition(".")[2]), json.loads(line))
        for info in store.list(layout.run(run_id, "metrics/"))
        for line in store.get(info.key).splitlines()
    ]
    lineage = read_manifest(store, run_id, steps).history
    problems = wrongs(steps, read_history(store, run_id), lineage, commits, measured, samples_of(store, assignment))
    assert not problems, "\n".join(problems)
