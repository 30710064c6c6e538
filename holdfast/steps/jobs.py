"""The outcomes of the steps of one execution of the DAG, kept in the store: on a cluster, steps share nothing else.

An unreachable store or a broken spec fails no step here; the log names what could not be kept.
`holdfast.steps.outcomes` defines an outcome.
"""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from holdfast.runtime.environment import outcomes_folder, store_url
from holdfast.spec import parse_spec
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.steps.outcomes import Outcome, read_outcomes
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_json
from holdfast.store.parallel import in_parallel

DEADLINE = 20.0  # seconds for a record, all retries included: its step matters more
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

log = logging.getLogger("holdfast.jobs")


def is_job(job: str) -> bool:
    """Whether `job` is the id of an execution of the DAG; false outside of a cluster."""
    return _JOB.fullmatch(job) is not None


def recorder(job: str) -> Callable[[str, Outcome], None] | None:
    """A function that stores an outcome of `job` at a URL; None if `job` is no id, as outside of a cluster."""
    if not is_job(job):
        return None

    interrupted: list[int] = []  # interrupted tries of the step so far; empty until the store was read

    def record(url: str, outcome: Outcome) -> None:
        try:
            store = open_store(url, deadline=DEADLINE)
            if not interrupted:
                before = outcome_of(store, job, outcome.name)
                interrupted.append(before.interrupted + 1 if before is not None and before.was_interrupted else 0)
            updated = replace(outcome, interrupted=interrupted[0])
            store.put(layout.job(job, outcome.name), updated.as_json())
        except (HoldfastError, OSError) as error:
            log.warning("the outcome of %s is not kept for the summary: %s", outcome.step, error)

    return record


def outcome_of(store: Store, job: str, step: str) -> Outcome | None:
    """The outcome of one step of `job`; None if unknown."""
    with suppress(MissingError, DataError):
        return read_json(store, layout.job(job, step), Outcome)
    return None


def known_outcomes(job: str, spec: str = "", overrides: Sequence[str] = (), store: str = "") -> list[Outcome]:
    """The outcomes so far of the execution that this process belongs to: from the folder of a local run, else of `job`
    in the store."""
    folder = outcomes_folder()
    return read_outcomes(folder) if folder else outcomes_of(job, spec, overrides, store)


def outcomes_of(job: str, spec: str, overrides: Sequence[str] = (), store: str = "") -> list[Outcome]:
    """The outcomes of `job`, in the order in which its steps began. On failure, empty, with a log message."""
    if not is_job(job):
        return []
    try:
        return outcomes_in(open_store(store or store_url(parse_spec(spec, overrides)), deadline=DEADLINE), job)
    except (HoldfastError, OSError) as error:
        log.warning("the outcomes of the steps cannot be read: %s", error)
        return []


def outcomes_in(store: Store, job: str) -> list[Outcome]:
    """The outcomes of `job` in a store, in the order in which its steps began; empty if `job` is no id."""
    if not _JOB.fullmatch(job):
        return []
    keys = [info.key for info in store.list(layout.job(job))]
    outcomes = [item for item in in_parallel(lambda key: _outcome(store, key), keys) if item is not None]
    return sorted(outcomes, key=lambda outcome: outcome.started)


def _outcome(store: Store, key: str) -> Outcome | None:
    """An outcome; None, with a log message, for a damaged record, so that it hides no other."""
    try:
        return read_json(store, key, Outcome)
    except (DataError, MissingError) as error:
        log.warning("%s", error)
        return None
