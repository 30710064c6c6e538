"""Catalog of the runs in a store, from their objects alone.

Many runs are read concurrently. A name, an id or the beginning of an id finds one run without reading other runs. A run
with an unreadable object is listed.
"""

import math
from collections.abc import Sequence
from functools import partial

from holdfast.pipelines.view.run_record import RunRecord, read_run
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.store.parallel import in_parallel

RUNS, NAMES = "runs/", "names/"
CONCURRENT_READS = 32  # runs to read concurrently
LONGEST_ID = 128  # characters
SHOWN_IDS = 5  # in a message


def all_runs(store: Store, limit: int | None = None) -> list[RunRecord]:
    """The runs in the store, newest first: all, or the `limit` that were started or submitted last."""
    return some_runs(store, limit)[0]


def some_runs(store: Store, limit: int | None = None) -> tuple[list[RunRecord], int]:
    """The same runs, and the number of unread ones."""
    ids, unread = list(store.folders(RUNS)), 0
    if limit is not None and len(ids) > limit:
        started: dict[str, float] = {}
        for info in store.list(NAMES):
            run_id = info.key.rpartition("/")[2]
            started[run_id] = max(started.get(run_id, 0.0), info.modified)
        newest_first = sorted(ids, key=lambda run_id: started.get(run_id, math.inf), reverse=True)
        unknown = sum(run_id not in started for run_id in ids)  # they may be newer than all known ones
        ids, unread = newest_first[: limit + unknown], max(0, len(ids) - limit - unknown)
    records = {
        record.run_id: record
        for record in in_parallel(partial(read_run, store), ids, CONCURRENT_READS)
        if record is not None
    }
    listed_records = (
        record for record in records.values() if _worked_on(store, record) not in records.keys() - {record.run_id}
    )
    newest = sorted(listed_records, key=lambda record: record.changed, reverse=True)
    if limit is not None and len(newest) > limit:
        newest, unread = newest[:limit], unread + len(newest) - limit
    return newest, unread


def _worked_on(store: Store, record: RunRecord) -> str:
    """The run that the steps of a submission work on, if only the submission is known of this run.

    It differs from the id at submission if the steps' machines have other sources.
    """
    from holdfast.pipelines.backends.record import as_it_ran, read_record

    submitted = read_record(record.submission) if record.submission and not record.described else None
    return record.run_id if submitted is None else as_it_ran(store, submitted).identity


def find_run(store: Store, wanted: str) -> RunRecord:
    """The run whose id or backend id begins with `wanted`, or the newest one with that name. Raises MissingError."""
    if wanted:
        ids = list(store.folders(f"{RUNS}{wanted}")) if _may_be_id(wanted) else []
        records = [record for record in in_parallel(partial(read_run, store), ids[:SHOWN_IDS]) if record is not None]
        if len(records) == 1 and (other := _worked_on(store, records[0])) != records[0].run_id:
            records = [read_run(store, other) or records[0]]
        if len(records) > 1 and wanted not in ids:
            raise MissingError(f"{wanted!r}: names {len(ids)} runs: {_ids(ids)}; write more of the id")
        if records:
            return next((record for record in records if record.run_id == wanted), records[0])
        for info in sorted(store.list(layout.named(wanted)), key=lambda info: info.modified, reverse=True):
            if (candidate := read_run(store, info.key.rpartition("/")[2])) is not None:
                other = _worked_on(store, candidate)
                return candidate if other == candidate.run_id else read_run(store, other) or candidate
    return _submitted(store, wanted) or _searched(store, wanted)


def _submitted(store: Store, wanted: str) -> RunRecord | None:
    """The run whose backend id begins with `wanted`; None without such a submission."""
    from holdfast.pipelines.backends.record import find_record

    record = find_record(store, wanted)
    if record is None or record.is_sweep:
        return None
    return read_run(store, record.identity) or read_run(store, record.run_id)  # the run may have no objects yet


def _may_be_id(text: str) -> bool:
    """Whether a text can be the beginning of the id of a run."""
    return text.isascii() and text.isalnum() and len(text) <= LONGEST_ID


def _searched(store: Store, wanted: str) -> RunRecord:
    """The newest run with a name that the index of names lacks. Raises MissingError."""
    records = all_runs(store)
    if not records:
        raise MissingError(f"{store.url}: has no runs yet; start one with `holdfast run examples/quickstart.yaml`")
    if matches := [record for record in records if wanted and record.name == wanted]:
        return matches[0]
    id_text = _ids([record.run_id for record in records])
    raise MissingError(f"{wanted!r}: no run in {store.url} has that id or name; `holdfast runs` lists: {id_text}")


def _ids(ids: Sequence[str]) -> str:
    text = ", ".join(ids[:SHOWN_IDS])
    return text + (f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else "")
