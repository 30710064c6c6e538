"""Scheduled retraining: one recurring run of the KFP server for each pipeline.

KFP cannot change a recurring run, and deleting one kills the runs that it started. So a change disables the old one,
creates the new one, and deletes the old one only when none of its runs is active. Otherwise it stays disabled until the
next call. After an interruption at any point, at most one is enabled, and the next call repairs the rest.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import kfp_server_api

from holdfast.pipelines.backends.kubeflow.compile import pipeline_digest, pipeline_text
from holdfast.pipelines.backends.kubeflow.connection import Server
from holdfast.pipelines.backends.kubeflow.submit import (
    CONTAINS,
    UNFINISHED,
    Uploaded,
    experiment,
    in_namespace,
    named,
    upload_text,
)
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import Spec, SpecError
from holdfast.spec.cron import expand
from holdfast.spec.errors import MissingError, Problem
from holdfast.spec.identity import digest

MAX_CONCURRENCY = 1  # the next run would only join one that still runs
# KFP names a run of a schedule after the first 25 letters, digits and dashes of the schedule's name.
_SCHEDULED = "-scheduled-"
_NAME = re.compile(rf"(?P<pipeline>[a-z][a-z0-9-]{{0,50}}){_SCHEDULED}[0-9a-f]{{8}}")
_UTC = ("UTC", "Etc/UTC", "Etc/UCT", "Etc/Zulu", "Zulu", "UCT", "GMT", "Etc/GMT", "Universal", "Etc/Universal")


@dataclass(frozen=True)
class Scheduled:
    """The result of a change to the schedule of a pipeline."""

    recurring_run_id: str
    name: str
    when: str
    link: str
    created: bool
    removed: tuple[str, ...] = ()  # deleted old schedules
    kept: tuple[str, ...] = ()  # disabled old schedules with an active run


@dataclass(frozen=True)
class Entry:
    """A schedule on the server."""

    recurring_run_id: str
    pipeline: str
    when: str
    enabled: bool
    running: int  # active runs that it started


def trigger_of(spec: Spec, controller_timezone: str = "UTC") -> kfp_server_api.V2beta1Trigger:
    """The trigger of the pipeline of `spec` for KFP: six cron fields, and no time zone except the controller's."""
    schedule = spec.schedule
    if schedule.every_minutes is not None:
        return kfp_server_api.V2beta1Trigger(
            periodic_schedule=kfp_server_api.V2beta1PeriodicSchedule(interval_second=schedule.every_minutes * 60)
        )
    if schedule.cron is None:
        raise SpecError(
            [
                Problem(
                    "schedule",
                    None,
                    "says neither cron nor every_minutes",
                    "give one of them, such as schedule.cron: '0 3 * * 1'",
                )
            ],
        )
    if schedule.timezone != controller_timezone and not {schedule.timezone, controller_timezone} <= set(_UTC):
        raise SpecError(
            [
                Problem(
                    "schedule.timezone",
                    schedule.timezone,
                    f"is not the one that KFP's scheduler counts in ({controller_timezone}); KFP knows no time zone of "
                    "a schedule",
                    "write the cron expression in UTC, use every_minutes, or set CRON_SCHEDULE_TIMEZONE of "
                    "ml-pipeline-scheduledworkflow and say so with --controller-timezone; Argo's CronWorkflow has them",
                )
            ],
        )
    expression = f"0 {expand(schedule.cron)}"  # seconds first
    return kfp_server_api.V2beta1Trigger(cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=expression))


def schedule(server: Server, wanted: RunRequest, *, controller_timezone: str = "UTC") -> Scheduled:
    """Make the recurring run of `wanted`'s spec the only enabled one of its pipeline."""
    trigger = trigger_of(wanted.spec, controller_timezone)
    text = pipeline_text(wanted.spec, wanted.image or None, scheduled=True)
    version = upload_text(server, wanted.spec.name, text)
    body = _body(server, wanted, trigger, version, pipeline_digest(text))
    name = body.display_name
    previous = [recurring for recurring in _of(server, wanted.spec.name) if recurring.display_name != name]
    for recurring in previous:
        if _enabled(recurring):
            server.ask(server.recurring_runs.recurring_run_service_disable_recurring_run, recurring.recurring_run_id)
    current, created = server.ensure(
        lambda: _oldest(recurring for recurring in _of(server, wanted.spec.name) if recurring.display_name == name),
        lambda **timeout: server.recurring_runs.recurring_run_service_create_recurring_run(
            recurring_run=body, **timeout
        ),
    )
    current_list = _of(server, wanted.spec.name)  # a concurrent client may have created the same one, or another one
    current = _oldest(recurring for recurring in current_list if recurring.display_name == name) or current
    duplicates = [recurring for recurring in current_list if recurring.recurring_run_id != current.recurring_run_id]
    for recurring in duplicates:
        if _enabled(recurring):
            server.ask(server.recurring_runs.recurring_run_service_disable_recurring_run, recurring.recurring_run_id)
    if not _enabled(current):
        server.ask(server.recurring_runs.recurring_run_service_enable_recurring_run, current.recurring_run_id)
    former_ids = {recurring.recurring_run_id for recurring in previous}
    removed, kept = _remove(
        server,
        [
            recurring
            for recurring in duplicates
            if recurring.display_name == name or recurring.recurring_run_id in former_ids
        ],
    )
    return Scheduled(
        current.recurring_run_id,
        name,
        when(trigger),
        server.link("recurringrun", current.recurring_run_id),
        created,
        removed,
        kept,
    )


def _body(
    server: Server, wanted: RunRequest, trigger: kfp_server_api.V2beta1Trigger, version: Uploaded, pipeline: str
) -> kfp_server_api.V2beta1RecurringRun:
    identity = [when(trigger), pipeline, wanted.question(), wanted.service_account, MAX_CONCURRENCY]
    return kfp_server_api.V2beta1RecurringRun(
        experiment_id=experiment(server, wanted.spec.experiment),
        display_name=f"{wanted.spec.name}{_SCHEDULED}{digest(identity)[:8]}",
        description=f"Holdfast: {wanted.spec.name}, {when(trigger)}",
        pipeline_version_reference=version.reference,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=wanted.escaped_parameters()),
        service_account=wanted.service_account or None,
        trigger=trigger,
        mode=kfp_server_api.RecurringRunMode.ENABLE,
        max_concurrency=str(MAX_CONCURRENCY),
        no_catchup=True,  # a retraining takes the newest data, so making up for missed runs would only repeat it
    )


def entries(server: Server) -> list[Entry]:
    """All schedules that Holdfast created, by name of the pipeline."""
    matches = [
        (recurring, match) for recurring in _listed(server) if (match := _NAME.fullmatch(recurring.display_name or ""))
    ]
    return sorted(
        (
            Entry(
                recurring.recurring_run_id,
                match["pipeline"],
                when(recurring.trigger),
                _enabled(recurring),
                len(_running(server, recurring)),
            )
            for recurring, match in matches
        ),
        key=lambda entry: (entry.pipeline, not entry.enabled),
    )


def pause(server: Server, pipeline: str) -> list[str]:
    """Disable the schedules of `pipeline`. Returns the ids of those that were enabled. Their active runs continue."""
    enabled = [recurring.recurring_run_id for recurring in _some(server, pipeline) if _enabled(recurring)]
    for identity in enabled:
        server.ask(server.recurring_runs.recurring_run_service_disable_recurring_run, identity)
    return enabled


def delete(server: Server, pipeline: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Disable and delete the schedules of `pipeline`.

    Returns the ids of the deleted ones, and of those that stay because of an active run. Call it again after that run.
    """
    pause(server, pipeline)
    return _remove(server, _some(server, pipeline))


def when(trigger: Any) -> str:
    """The firing times of a trigger, for people."""
    if trigger is not None and trigger.cron_schedule is not None:
        return f"cron {trigger.cron_schedule.cron}"
    if trigger is not None and trigger.periodic_schedule is not None:
        return f"every {int(trigger.periodic_schedule.interval_second) // 60} minutes"
    return "never"


def _remove(server: Server, disabled: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Delete the disabled schedules without active runs."""
    removed, kept = [], []
    for recurring in disabled:
        if _running(server, recurring):
            kept.append(recurring.recurring_run_id)
            continue
        with suppress(MissingError):  # deleted by a try with a lost response, or by another client
            server.ask(server.recurring_runs.recurring_run_service_delete_recurring_run, recurring.recurring_run_id)
        removed.append(recurring.recurring_run_id)
    return tuple(removed), tuple(kept)


def _running(server: Server, one: Any) -> list[Any]:
    runs = server.every(
        server.runs.run_service_list_runs, "runs", experiment_id=one.experiment_id, sort_by="created_at desc"
    )
    return [
        run
        for run in runs
        if run.recurring_run_id == one.recurring_run_id and (run.state or UNFINISHED[0]) in (*UNFINISHED, "CANCELING")
    ]


def _some(server: Server, pipeline: str) -> list[Any]:
    if recurring_runs := _of(server, pipeline):
        return recurring_runs
    raise MissingError(f"{pipeline!r}: has no schedule on {server.host}; `holdfast schedule --list` shows all of them")


def _of(server: Server, pipeline: str) -> list[Any]:
    """All schedules of `pipeline`, enabled or not."""
    return [
        recurring
        for recurring in _listed(server, pipeline)
        if (match := _NAME.fullmatch(recurring.display_name or "")) and match["pipeline"] == pipeline
    ]


def _listed(server: Server, pipeline: str = "") -> Iterator[Any]:
    yield from server.every(
        server.recurring_runs.recurring_run_service_list_recurring_runs,
        "recurring_runs",
        filter=named(f"{pipeline}{_SCHEDULED}", CONTAINS),
        **in_namespace(server),
    )


def _oldest(found: Iterable[Any]) -> Any | None:
    return min(found, key=lambda one: (not _enabled(one), str(one.created_at), one.recurring_run_id), default=None)


def _enabled(one: Any) -> bool:
    # The server responds with `status`; a new one may only have `mode`.
    return (one.status or one.mode) in ("ENABLED", "ENABLE")
