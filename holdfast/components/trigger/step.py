"""Trigger: compares the current sources and spec with what the champion was made from.

Nothing is due if the same model would result, or if the result for these inputs is already known. Cheap checks come
first. The same question is measured once. The data and the scores come from the same code as in the steps that it
decides about, because a second implementation would diverge.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from holdfast.components.trigger.decision import Condition, Decay, Decision, Started, judge, of_age, of_decay
from holdfast.corpus import identify, prepare
from holdfast.dataset import Dataset
from holdfast.dataset.manifest import load_manifest
from holdfast.model.exported import require_intact
from holdfast.model.hub import first_weights_digest
from holdfast.runtime.environment import cache_dir
from holdfast.scoring import Measured, key_against
from holdfast.spec import Spec, digest, dump_spec, run_id
from holdfast.spec.data import Tokenizer
from holdfast.spec.errors import DataError, ExitCode, MissingError
from holdfast.spec.identity import Versions, current_versions
from holdfast.steps.jobs import outcomes_in
from holdfast.steps.outcomes import EXIT_HANDLER, first_failure
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_json_object
from holdfast.tracking import Champion, champion, registration_key, trusted_stores
from holdfast.tracking.registrations import described_run

# The same data, spec and code fail again with these codes. Failures that can be fixed elsewhere (credentials, files)
# are not listed.
PERMANENT = (
    ExitCode.BAD_SPEC,
    ExitCode.BAD_DATA,
    ExitCode.DIVERGED,
    ExitCode.PLAN_CHANGED,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.USER_CODE,
)

log = logging.getLogger("holdfast.trigger")


@dataclass(frozen=True)
class _Former:
    """The champion, with the store's record of its run."""

    champion: Champion
    salt: str
    versions: Versions


def run(spec: Spec, store: Store, salt: str = "", now: float | None = None, job: str = "") -> Decision:
    """Decide whether a retraining of `spec` is due, and record it. `salt` is that of the possible retraining. `job` is
    the execution of the DAG that would do it, and empty if nothing is started.

    Raises what `identify` raises, TrackingUnavailable, and what `prepare` raises if the decay must be measured.
    """
    now = time.time() if now is None else now
    former = _former(spec, store)
    dataset_id, weights = identify(spec), first_weights_digest(spec)
    champion_version = None if former is None else former.champion.version
    next_run = run_id(spec, dataset_id, salt, weights)
    key = digest(
        [next_run, dataset_id, champion_version, spec.schedule.model_dump(mode="json"), spec.evaluation.max_tokens]
    )
    decay = None
    if (settled := _settled(spec, store, former, dataset_id, next_run, weights)) is not None:
        conditions: tuple[Condition, ...] = (settled,)
    else:
        assert former is not None
        conditions = tuple(_cheap(spec, former, dataset_id, weights, now))
        most = spec.schedule.max_decay
        if most is not None and not any(condition.due for condition in conditions):
            decay, condition = _decay(spec, store, former.champion, dataset_id, key, most)
            conditions = (*conditions, condition)
        conditions = conditions or (
            Condition(name="new_data", due=False, sentence="Something changed, but no condition of `schedule` is on."),
        )
    word, reason = judge(conditions)
    started = layout.trigger(spec.name, f"started-{next_run}")
    if word == "due" and (failed := _failed(spec, store, started, next_run)) is not None:
        conditions = (*conditions, failed)
        word, reason = "not_due", failed.sentence
    elif word == "due" and job:
        store.put(started, Started(job=job, inputs_digest=_inputs_digest(spec)).model_dump_json().encode())
    decision = Decision(
        word=word,
        reason=reason,
        conditions=conditions,
        dataset_id=dataset_id,
        run_id=next_run,
        registered_model=spec.registered_model,
        champion_version=champion_version,
        champion_run_id=former.champion.run_id if former else "",
        champion_dataset_id=former.champion.dataset_id if former else "",
        champion_age_hours=round((now - former.champion.created) / 3600, 4) if former else None,
        decay=decay,
        key=key,
        decided=now,
    )
    store.put(layout.trigger(spec.name, key), decision.dump())
    log.info("%s: %s", word.replace("_", " "), reason)
    return decision


def _failed(spec: Spec, store: Store, started: str, next_run: str) -> Condition | None:
    """Whether the same retraining failed before, for a reason that only changed inputs remove."""
    record = _read(store, started)
    if record is None or record.get("inputs_digest") != _inputs_digest(spec):
        return None
    outcomes = [outcome for outcome in outcomes_in(store, str(record.get("job"))) if outcome.step != EXIT_HANDLER]
    failure = first_failure(outcomes)
    if failure is None or failure.exit_code not in PERMANENT:
        return None
    return Condition(
        name="failed",
        due=False,
        sentence=f"Run {next_run}, which these data and this spec give, failed at {failure.step} with code "
        f"{failure.exit_code} ({failure.reason}). It is not started again until the data, the spec or the code change; "
        "`holdfast run` starts it nevertheless.",
    )


def _inputs_digest(spec: Spec) -> str:
    """A digest of a retraining's inputs other than its data: the whole spec, and the code."""
    return digest([dump_spec(spec), version("holdfast"), os.environ.get("HOLDFAST_GIT_COMMIT", "")])


def _settled(
    spec: Spec, store: Store, former: _Former | None, dataset_id: str, next_run: str, weights: str
) -> Condition | None:
    """A condition that decides before any condition of the spec. None if there is none."""
    if former is not None:
        current = former.champion
        if run_id(spec, dataset_id, former.salt, weights) == current.run_id:
            return Condition(
                name="same_model",
                due=False,
                sentence=f"Nothing changed: dataset {dataset_id} and the spec are those of {current.model} version "
                f"{current.version}, and the same model would come out.",
            )
    if (answer := _answered(spec, store, former, next_run)) is not None:
        return Condition(name="already_answered", due=False, sentence=answer)
    if former is None:
        return Condition(name="no_champion", due=True, sentence=f"{spec.registered_model} has no champion yet.")
    return None


def _answered(spec: Spec, store: Store, former: _Former | None, next_run: str) -> str | None:
    """The result of the run that a retraining would be, if nothing is left to do for it, else None."""
    if (record := _read(store, layout.registration(next_run, registration_key(spec.registered_model)))) is not None:
        return (
            f"Run {next_run}, which these data and this spec give, is registered as {record['model']} version "
            f"{record['version']} already; who is champion is for people to say."
        )
    against = None if former is None or spec.evaluation.versus_champion == "ignore" else former.champion
    verdict = _read(store, layout.verdict(next_run, key_against(spec, against)))
    if verdict is not None and verdict["word"] != "blessed":
        return f"Run {next_run}, which these data and this spec give, was trained already and not blessed."
    return None


def _cheap(spec: Spec, former: _Former, dataset_id: str, weights: str, now: float) -> Iterator[Condition]:
    """The conditions that need no measurement."""
    current, schedule = former.champion, spec.schedule
    if schedule.on_new_data:
        due = dataset_id != current.dataset_id
        learned = f"{current.model} version {current.version} learned from {current.dataset_id}"
        yield Condition(
            name="new_data",
            due=due,
            sentence=f"The sources give dataset {dataset_id} now, and {learned}."
            if due
            else f"No new data: dataset {dataset_id} is the champion's.",
        )
    if schedule.on_changed_spec:
        same_data = run_id(spec, current.dataset_id, former.salt, weights)
        due = same_data != current.run_id
        yield Condition(
            name="changed_spec",
            due=due,
            sentence=f"Of the champion's data {_cause(spec, former, weights)} would make run {same_data} now, and made "
            f"{current.run_id} then."
            if due
            else "The spec would still make the champion of its data.",
        )
    if schedule.max_age_hours is not None:
        yield of_age((now - current.created) / 3600, schedule.max_age_hours)


def _cause(spec: Spec, former: _Former, weights: str) -> str:
    """What gives the champion's data another run: the spec, versions of Holdfast's results, or several of them."""
    now, then = current_versions(), former.versions

    def at(versions: Versions) -> str:
        return run_id(spec, former.champion.dataset_id, former.salt, weights, versions)

    causes = [] if at(then) == former.champion.run_id else ["the spec"]
    if at(now._replace(data_plane=then.data_plane)) != at(now):
        causes.append(f"Holdfast's arithmetic (version {now.data_plane}, then {then.data_plane})")
    if at(now._replace(generator=then.generator)) != at(now):
        causes.append(f"Holdfast's generator of answers (version {now.generator}, then {then.generator})")
    return " and ".join(causes)


def _decay(
    spec: Spec, store: Store, theirs: Champion, dataset_id: str, key: str, most: float
) -> tuple[Decay | None, Condition]:
    """The champion's decay on fresh text. If it cannot be measured, the condition is not due and its sentence says
    why."""

    def unmeasured(why: str) -> tuple[None, Condition]:
        return None, Condition(name="decay", due=False, sentence=f"The champion's decay was not measured: {why}.")

    if dataset_id == theirs.dataset_id:
        return unmeasured("the data are those it was blessed on")
    try:
        blessed_with = float(theirs.metrics.get("bits_per_byte", "nan"))
        if not blessed_with > 0:
            return unmeasured(f"version {theirs.version} has no bits per byte on record")
        decay = _known_decay(store, spec, key) or _measure(spec, store, theirs, dataset_id, blessed_with)
    except (MissingError, DataError) as error:
        log.warning("the champion's decay was not measured: %s", error)
        return unmeasured(str(error))
    return decay, of_decay(decay, most)


def _measure(spec: Spec, store: Store, theirs: Champion, dataset_id: str, blessed_with: float) -> Decay:
    """Score the champion on the current sources, in its own tokens. Only new data is tokenized.

    Each document alone determines whether it is held out, so the champion was trained on none of them.
    """
    with _in_its_tokens(spec, store, theirs, keep=dataset_id) as fresh:
        measured = _score(spec, theirs, Dataset.open(store, fresh, cache_dir()))
    return Decay(
        dataset_id=fresh, bits_per_byte=measured.bits_per_byte, blessed_with=blessed_with, tokens=measured.tokens
    )


def _score(spec: Spec, theirs: Champion, dataset: Dataset) -> Measured:
    from holdfast.scoring.device import scoring_devices
    from holdfast.scoring.models import score_champion

    return score_champion(theirs, dataset, spec.evaluation.max_tokens, scoring_devices(spec.cluster))[0]


@contextmanager
def _in_its_tokens(spec: Spec, store: Store, theirs: Champion, keep: str) -> Iterator[str]:
    """A dataset of the sources in the champion's tokenizer. It is deleted afterwards if it is new and not dataset
    `keep`."""
    origin = open_store(theirs.store_url)
    require_intact(origin, theirs.export, theirs.export_digest, names=["tokenizer.json"])
    tokenizer = Tokenizer(
        kind="file",
        path=f"{theirs.store_url}/{theirs.export.rstrip('/')}/tokenizer.json",
        end_of_text=load_manifest(origin, theirs.dataset_id).tokenizer.end_of_text,
    )
    in_its_tokens = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": tokenizer})})
    prepared = prepare(in_its_tokens, store)
    try:
        yield prepared.dataset_id
    finally:
        if prepared.created and prepared.dataset_id != keep:
            store.delete(layout.dataset(prepared.dataset_id))  # first: a dataset without it does not exist
            for info in list(store.list(layout.dataset(prepared.dataset_id, ""))):
                store.delete(info.key)


def _known_decay(store: Store, spec: Spec, key: str) -> Decay | None:
    """The earlier measurement for the same question, or None."""
    decision = _read(store, layout.trigger(spec.name, key))
    try:
        return Decision.model_validate(decision).decay if decision is not None else None
    except ValidationError:
        return None


def _former(spec: Spec, store: Store) -> _Former | None:
    current = champion(spec.registered_model, trusted_stores(spec, store))
    if current is None:
        return None
    try:
        described = described_run(open_store(current.store_url), current.run_id, current.run_digest)
    except MissingError:
        described = {}
    now = current_versions()
    then = Versions(
        int(described.get("data_plane_version", now.data_plane)), int(described.get("generator_version", now.generator))
    )
    return _Former(current, str(described.get("salt", "")), then)


def _read(store: Store, key: str) -> dict[str, Any] | None:
    """A JSON object of the store, or None if it does not exist."""
    try:
        return read_json_object(store, key)
    except MissingError:
        return None
