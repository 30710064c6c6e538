"""Traces of real clusters in their published formats, and in Holdfast's CSV.

A line that cannot be a job is counted and reported, never guessed. Times are shifted so that the first submission is on
day 0, where 0 is midnight.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.simulation.cluster import DAY, Job
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import read_file_bounded

MOST_BYTES = 2 * 2**30  # maximum size of a trace
MOST_NUMBER = 1e13  # maximum of any number in a job, such as seconds since 1970
MOST_SECONDS = 1e9  # maximum of a duration: 31 years, in which thousands of nodes fail many times
MOST_SPAN = 4e9  # seconds from the first submission to the last one

log = logging.getLogger("holdfast.simulation")


def load_trace(path: str | Path) -> list[Job]:
    """The jobs of a trace; the content of its file determines the format.

    - Philly: `cluster_job_log`, JSON.
    - Helios: `cluster_log.csv`.
    - Alibaba PAI and GPU v2023: `pai_task_table.csv`, `openb_pod_list_*.csv`.
    - Holdfast's columns: submit, gpus, seconds and any other field of a Job.

    Jobs without accelerators or without an end are omitted. Raises MissingError, or DataError if no line is a job.
    """
    path = Path(path)
    text = _text(path)
    rows, read = _recognised(path, text)
    jobs, skipped = [], 0
    for index, row in enumerate(rows):
        try:
            job = read(row, index)
            sound = job is not None and _is_sound(job)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError):
            job, sound = None, False
        if job is not None and not sound:
            place = f"job {index + 1}" if read is _philly else f"line {index + 2}"
            raise DataError(
                f"{path}, {place}: its times and sizes are no numbers that a cluster could have "
                f"(submitted at {job.submit}, {job.seconds} s, {job.gpus} accelerators); correct or remove it"
            )
        if job is None or job.gpus < 1 or job.seconds <= 0:
            skipped += 1
        else:
            jobs.append(job)
    if not jobs:
        raise DataError(f"{path}: none of its {skipped} lines is a job with accelerators and an end; is it a trace?")
    if skipped:
        log.warning(
            "%s: %d of %d lines are left out: no accelerators, no end, or not readable",
            path,
            skipped,
            skipped + len(jobs),
        )
    first, last = min(job.submit for job in jobs), max(job.submit for job in jobs)
    if last - first > MOST_SPAN:
        raise DataError(
            f"{path}: its jobs are submitted from {first:g} to {last:g}, which is more than "
            f"{MOST_SPAN / DAY / 365:.0f} years; correct or remove the jobs with another clock"
        )
    first = first // DAY * DAY
    return sorted((replace(job, submit=job.submit - first) for job in jobs), key=lambda job: job.submit)


def _text(path: Path) -> str:
    try:
        return read_file_bounded(path, MOST_BYTES).decode("utf-8")
    except MissingError:
        raise MissingError(f"{path}: cannot be read: no such file; name a trace, or synthetic:JOBS") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: is not UTF-8; convert the trace") from None


def _is_sound(job: Job) -> bool:
    """Whether all numbers are finite and small enough for a simulation to end."""
    numbers = [value for value in astuple(job) if isinstance(value, int | float)]
    is_short = max(job.seconds, job.estimate, job.slack) <= MOST_SECONDS
    return is_short and all(math.isfinite(value) and abs(value) <= MOST_NUMBER for value in numbers)


Reader = Callable[[Mapping[str, Any], int], Job | None]


def _recognised(path: Path, text: str) -> tuple[Iterator[Mapping[str, Any]], Reader]:
    if text.lstrip().startswith("["):
        try:
            return iter(json.loads(text)), _philly
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: is not JSON: {error.msg}; download it again") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: is not JSON: {error}; download it again") from None
    table = csv.DictReader(text.splitlines())
    try:
        names = set(table.fieldnames or ())
    except csv.Error as error:
        raise DataError(f"{path}, line 1: is no table: {error}") from None
    for columns, reader in (
        ({"submit", "gpus", "seconds"}, _own),
        ({"gpu_num", "submit_time", "duration"}, _helios),
        ({"gpu_milli", "creation_time", "deletion_time"}, _alibaba_pods),
        ({"plan_gpu", "start_time", "end_time", "inst_num"}, _alibaba_pai),
    ):
        if columns <= names:
            return _rows(path, table), reader
    raise DataError(f"{path}: its columns {sorted(names)[:12]} are those of no known trace; see docs/simulator.md")


def _rows(path: Path, table: csv.DictReader[str]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from table
    except csv.Error as error:
        raise DataError(f"{path}, line {table.line_num}: is no line of a table: {error}") from None


def _own(row: Mapping[str, Any], index: int) -> Job:
    kinds: dict[str, Callable[[str], Any]] = {
        "gpus": int,
        "priority": int,
        "min_gpus": int,
        "max_gpus": int,
        "tenant": str,
        "group": str,
        "id": str,
        "same_rack": lambda text: text.lower() in ("1", "true", "yes"),
    }
    fields = {name: kinds.get(name, float)(value) for name, value in row.items() if value}
    return Job(**{"id": str(index), **fields})


def _philly(row: Mapping[str, Any], _: int) -> Job | None:
    """Jeon et al. 2019: attempts with the accelerators of each server.

    The seconds of all ended attempts add up; the last ended one gives the accelerators.
    """
    attempts = [attempt for attempt in row["attempts"] if attempt.get("end_time") and attempt["end_time"] != "None"]
    if not attempts:
        return None
    seconds = sum(_moment(attempt["end_time"]) - _moment(attempt["start_time"]) for attempt in attempts)
    gpus = sum(len(server["gpus"]) for server in attempts[-1]["detail"])
    return Job(row["jobid"], _moment(row["submitted_time"]), gpus, seconds, tenant=row["vc"])


def _helios(row: Mapping[str, Any], index: int) -> Job:
    """Hu et al. 2021."""
    name = row.get("job_id") or str(index)
    return Job(
        name, _moment(row["submit_time"]), int(row["gpu_num"]), float(row["duration"]), tenant=row.get("vc", "vc")
    )


def _alibaba_pods(row: Mapping[str, Any], index: int) -> Job:
    """Weng et al. 2023 (GPU v2023): a pod is a job, and a share of an accelerator counts as a whole one."""
    start = float(row["creation_time"])
    gpus = max(int(float(row.get("num_gpu") or 0)), 1 if float(row["gpu_milli"] or 0) > 0 else 0)
    return Job(
        row.get("name") or str(index),
        start,
        gpus,
        float(row["deletion_time"]) - start,
        tenant=row.get("qos") or "default",
    )


def _alibaba_pai(row: Mapping[str, Any], index: int) -> Job:
    """Weng et al. 2022 (PAI 2020): `plan_gpu` is in hundredths of an accelerator for each instance."""
    start = float(row["start_time"])
    gpus = -(-float(row["plan_gpu"]) * float(row["inst_num"]) // 100)
    return Job(row.get("job_name") or str(index), start, int(gpus), float(row["end_time"]) - start)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
