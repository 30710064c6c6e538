"""Audit records of a run: one for each stretch of steps that was computed again and compared.

A stretch includes the attempt that computed it, so steps that another attempt computes anew are a different stretch.
"""

import json
import logging
import re
from dataclasses import asdict, dataclass

from holdfast.spec.errors import DataError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json

log = logging.getLogger("holdfast.telemetry")


@dataclass(frozen=True)
class Stretch:
    """The steps above `start` up to `last`, of which `attempt` computed the last."""

    start: int  # a checkpoint; 0: the first state
    last: int
    attempt: int


@dataclass(frozen=True)
class AuditRecord:
    """The result of an audit of a stretch."""

    stretch: Stretch
    time: float  # Unix seconds
    host: str  # the host that computed it again
    seed: int  # seed of the sample
    figures: int  # number of compared figures
    first: int | None  # the first step that differs
    differing: str  # the differences at that step, in words


def put_audit(store: Store, run_id: str, record: AuditRecord) -> None:
    """Write an audit record."""
    at = record.stretch
    store.put(layout.audit(run_id, at.start, at.last, at.attempt), json.dumps(asdict(record)).encode())


def audited_stretches(store: Store, run_id: str) -> set[Stretch]:
    """The stretches of a run that were audited. Reads no record."""
    names = (re.search(r"/(\d+)-(\d+)\.(\d+)\.json$", info.key) for info in store.list(layout.audits(run_id)))
    return {Stretch(*map(int, name.groups())) for name in names if name}


def read_audits(store: Store, run_id: str) -> list[AuditRecord]:
    """The results of all audits of a run, by steps."""
    records = []
    for info in store.list(layout.audits(run_id)):
        try:
            records.append(read_json(store, info.key, AuditRecord))
        except DataError as error:  # a damaged record hides no other
            log.warning("%s", error)
    return records
