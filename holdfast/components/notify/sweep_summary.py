"""Summary of a sweep with all its trials.

As for `summary`, a summary is always made and never fails the DAG. A sweep with a failed trial is reported as failed,
together with the results of the remaining trials.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from holdfast.components.notify.ending import PipelineExit, compared, end_jobs_left, exit_status_of, headline_of
from holdfast.components.notify.summary import (
    MAX_REASON,
    Summary,
    attempt,
    checked_spec,
    code_of_end,
    found_of,
    next_command,
    tell,
)
from holdfast.runtime.environment import store_url
from holdfast.runtime.secrets import redact
from holdfast.scoring.comparison import BLESSED, Comparison, TrialList, read_comparison, sweep_id, sweep_name, trials_of
from holdfast.spec import Spec, dump_spec
from holdfast.spec.errors import DataError
from holdfast.steps.outcomes import Outcome, first_failure
from holdfast.store import Store, layout, open_store

Trial = tuple[tuple[str, ...], Spec, str]  # overrides, spec, run


def run_sweep(
    end: PipelineExit, trials: str, spec: str, store: str, *, overrides: Sequence[str] = (), salt: str = ""
) -> Summary:
    """Summarize a sweep that ended. It ends jobs that the trials left on the cluster, logs the summary, records it as
    `sweeps/<id>/summary.json` and posts it. `trials` are the overrides as JSON. The remaining parameters are those of
    `summary.run`."""
    unknown, outcomes = list(end.unknown), end.outcomes
    status, failed_step, message = end.status, end.failed_step, end.message
    checked, refused = checked_spec(spec, overrides)
    if refused and not message.strip() and status == "failed":
        message = refused
    elif refused and refused not in message:
        unknown.append(refused)
    opened = attempt(lambda: open_store(store or store_url(checked)), unknown)
    known = attempt(lambda: _known(checked, trials, salt, outcomes), unknown) if checked else None
    identity = _search_of(trials) or (sweep_id([run for _, _, run in known]) if known else "")
    ended = [end_jobs_left(dump_spec(trial_spec), (), run) for _, trial_spec, run in known or ()]
    found = attempt(lambda: read_comparison(opened, identity), unknown) if opened and compared(outcomes) else None
    failure = None if exit_status_of(status) == "succeeded" and found is None else first_failure(outcomes)
    if failure is None and found is not None and found.failed:  # the outcomes of the execution cannot be read
        failed_step, message = found.failed[0].step, found.failed[0].reason
    status_word = exit_status_of(status)
    if found is not None and status_word != "cancelled":
        status_word = "failed" if failure is not None or found.failed else "succeeded"
    best = _best(found, known or (), opened, unknown) if found is not None and opened is not None else {}
    summary = Summary(
        status=status_word,
        headline=headline_of(
            status_word, outcomes, verdict=best.get("verdict", ""), registered=bool(best.get("registered"))
        ),
        name=sweep_name(checked) if checked else "",
        run_id=identity,
        kind="sweep",
        failed_step=failure.name if failure else failed_step if status_word != "succeeded" else "",
        reason=redact((failure.reason if failure else message if status_word != "succeeded" else "").strip())[
            :MAX_REASON
        ],
        happened=[*_lines(found, len(known or ())), *(line for done, _ in ended for line in done)],
        log=end.log_place,
        store=opened.url if opened else "",
        next_command=f"holdfast show {identity}" if found else next_command(status_word, {}, _code(failure)),
        unknown=[*unknown, *(line for _, lines in ended for line in lines)],
        exit_code=code_of_end(status_word, _code(failure)),
        ended=time.time(),
        **best,
    )
    tell(summary, opened, layout.sweep(identity, "summary.json") if identity else "")
    return summary


def _known(spec: Spec, trials: str, salt: str, outcomes: Sequence[Outcome]) -> list[Trial]:
    """The trials, if the dataset is known."""
    dataset = next((outcome.result for outcome in outcomes if outcome.step == "preprocess" and outcome.result), "")
    if not dataset and spec.data.sources:
        return []
    return list(trials_of(spec, TrialList.from_text(trials).trials, dataset, salt))


def _search_of(trials: str) -> str:
    with suppress(DataError):
        return TrialList.from_text(trials).search
    return ""


def _lines(found: Comparison | None, trials: int) -> list[str]:
    if found is None:
        return [f"no comparison of {trials} trials was made"] if trials else []
    name, value = next(iter(found.best.figures.items()), ("training_loss", math.nan))
    called = "best" if found.best.word == BLESSED else f"none is blessed, best {name}"
    best = f"{called} {', '.join(found.best.changes)} (run {found.best.run_id}, {name} {value:.4f})"
    counts = f"{len(found.rows)} of {len(found.rows) + len(found.failed) + len(found.stopped)} trials compared"
    return [f"{counts}: {best}", *(redact(trial.text) for trial in found.failed)]


def _best(found: Comparison, trials: Sequence[Trial], store: Store, unknown: list[str]) -> dict[str, Any]:
    """The summary's fields for the best trial."""
    best = found.best
    spec = next((trial_spec for _, trial_spec, run in trials if run == best.run_id), None)
    _, verdict, registration = attempt(lambda: found_of(store, best.run_id, spec, unknown), unknown) or ({}, {}, {})
    return {
        "verdict": best.word,
        "reasons": [str(reason) for reason in verdict.get("reasons") or []],
        "metrics": {name: value for name, value in best.figures.items() if name != "training_loss"},
        "registered": f"models:/{registration['model']}/{registration['version']}" if registration else "",
        "alias": registration.get("alias", ""),
        "report": f"{store.url}/{layout.verdict(best.run_id, verdict['key'], 'html')}" if "key" in verdict else "",
    }


def _code(failure: Outcome | None) -> int | None:
    return failure.exit_code if failure else None
