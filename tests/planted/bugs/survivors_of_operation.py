"""Bugs that once passed the whole suite, in what runs and shows a training, and neighbours of their kinds."""

from __future__ import annotations

from tests.planted.bug import Bug

_TRIGGER = "tests/trigger/test_measuring.py"
_PUBLISH = (
    "tests/serving/test_publish.py::test_a_challenger_is_entered_in_the_registry_and_neither_served_nor_called_champion"
)
_SUCCESSION = "tests/register/test_promotion.py::test_killed_at_any_write_to_mlflow_there_is_a_champion_to_go_back_to"
_VERIFY = "tests/pipelines/cli/test_checkpoints.py::test_damage_of_an_older_checkpoint_of_a_run_ends_verify_with_13"
_LIVE = "tests/pipelines/view/test_live.py"
_LEDGER = "tests/telemetry/test_ledger.py"
_EVENTS = (
    "tests/telemetry/test_events.py"
    "::test_while_the_store_is_away_the_oldest_lines_that_matter_least_go_and_none_that_is_being_written"
)
_SLEPT = (
    "tests/launch/node/test_watchdog.py"
    "::test_a_machine_that_slept_for_an_hour_has_hung_ranks_for_no_longer_than_two_looks"
)
_EMIT = "tests/pipelines/backends/slurm/test_emit.py"
_DRIVER = "tests/pipelines/backends/ray/test_driver.py"
_RUN = "tests/pipelines/backends/local/test_run.py"
_SCHEDULING = (
    "tests/pipelines/doctor/test_scheduling.py"
    "::test_a_node_counts_when_it_has_exactly_what_one_node_of_the_gang_takes_or_more"
)
_RIGHTS = "tests/pipelines/doctor/test_namespace.py::test_each_right_of_the_launchers_role_is_asked_for_and_missed"
_THEORY = " ".join(
    f"tests/simulation/test_against_theory.py::{name}"
    for name in (
        "test_of_tenants_with_equal_shares_the_first_by_name_starts_and_of_its_jobs_the_first_submitted",
        "test_what_a_tenant_used_counts_half_after_a_half_life",
        "test_an_evicted_job_keeps_what_it_could_save_in_the_notice_and_pays_its_restart_once",
        "test_the_schedule_of_every_policy_is_the_same_from_version_to_version",
    )
)
_QUOTA = "tests/pipelines/doctor/test_namespace.py::test_a_quota_has_room_for_what_is_exactly_left_of_it"
_PARTITION = "tests/pipelines/doctor/test_scheduling.py::test_a_partition_of_slurm_that_fits_exactly_is_fine"

BUGS = [
    Bug(
        "holdfast/components/trigger/step.py",
        "if prepared.created and prepared.dataset_id != keep:",
        "if prepared.created:",
        _TRIGGER,
        "the dataset that a retraining needs would be deleted",
    ),
    Bug(
        "holdfast/components/trigger/step.py",
        "if prepared.created and prepared.dataset_id != keep:",
        "if prepared.dataset_id != keep:",
        _TRIGGER,
        "a dataset that was there before it was measured by would be deleted",
    ),
    Bug(
        "holdfast/serving/publishing.py",
        "        if champion:\n            registry.point",
        "        if version:\n            registry.point",
        _PUBLISH,
        "a challenger would be called champion in the registry",
    ),
    Bug(
        "holdfast/serving/publishing.py",
        "if champion and spec.serving.kserve is not None:",
        "if spec.serving.kserve is not None:",
        _PUBLISH,
        "a challenger would be served",
    ),
    Bug(
        "holdfast/tracking/registry.py",
        """        former = version_by_alias(client, model, CHAMPION)
        if former is not None and int""",
        """        former = version_by_alias(client, model, CHAMPION)
        set_alias(client, model, CHAMPION, version)
        if former is not None and int""",
        _SUCCESSION,
        "no rollback after a crash: the alias moves before the former champion is remembered",
    ),
    Bug(
        "holdfast/pipelines/cli/checkpoints.py",
        "    if any(each.damages for each in found):\n",
        "    if found[-1].damages:\n",
        _VERIFY,
        "`verify RUN` would end with 0 where an older checkpoint is damaged",
    ),
    Bug(
        "holdfast/pipelines/cli/checkpoints.py",
        "if at else list(checkpoint_times(opened, identity))",
        "if at else list(checkpoint_times(opened, identity))[-1:]",
        _VERIFY,
        "`verify RUN` would look at the newest alone",
    ),
    Bug(
        "holdfast/pipelines/view/live.py",
        "and (began is None or began.time < ended.time)",
        "and began is not None",
        _LIVE,
        "`watch` would end on a run that was resumed",
    ),
    Bug(
        "holdfast/pipelines/view/live.py",
        "ended.restart_in is None and (",
        "(",
        _LIVE,
        "`watch` would end between two launches",
    ),
    Bug(
        "holdfast/telemetry/ledger.py",
        "kept = min(each.step for each in later)",
        "kept = later[0].step",
        _LEDGER,
        "lost work would count as productive after several failures",
    ),
    Bug(
        "holdfast/telemetry/ledger.py",
        "attempt.lost_from = -math.inf if kept < attempt.step else",
        "attempt.lost_from = math.inf if kept < attempt.step else",
        _LEDGER,
        "an attempt of which nothing was kept would count as productive",
    ),
    Bug(
        "holdfast/telemetry/event_log.py",
        "(index for index in kept if not self._waiting[index][1])",
        "(index for index in kept if self._waiting[index][1])",
        _EVENTS,
        "a history with holes: what matters would go first",
    ),
    Bug(
        "holdfast/telemetry/event_log.py",
        "kept = range(self._flying, len(self._waiting))",
        "kept = range(len(self._waiting))",
        _EVENTS,
        "a history with holes: a line that is being written would go, and another one with it",
    ),
    Bug(
        "holdfast/telemetry/event_log.py",
        "if not self._waiting[index][1]), self._flying)",
        "if not self._waiting[index][1]), len(self._waiting) - 1)",
        _EVENTS,
        "a history with holes: the newest would go and not the oldest",
    ),
    Bug(
        "holdfast/launch/node/watchdog.py",
        "passed, last = min(now - last, 2 * self._tick), now",
        "passed, last = now - last, now",
        _SLEPT,
        "sound ranks would be killed after a machine slept",
    ),
    Bug(
        "holdfast/launch/node/watchdog.py",
        "passed, self._asked_at = min(now - self._asked_at, 2 * ASK_SECONDS), now",
        "passed, self._asked_at = now - self._asked_at, now",
        _SLEPT,
        "sound ranks of other nodes would be killed after a machine slept",
    ),
    Bug(
        "holdfast/pipelines/backends/slurm/emit.py",
        '    yield "requeue"\n',
        "",
        _EMIT,
        "a step of Slurm whose node was lost would never come back",
    ),
    Bug(
        "holdfast/pipelines/backends/slurm/emit.py",
        '    yield "requeue"\n',
        '    if step.launches:\n        yield "requeue"\n',
        _EMIT,
        "a step beside the training would never come back",
    ),
    Bug(
        "holdfast/pipelines/backends/slurm/emit.py",
        '    yield "open-mode=append"  # a job that comes back goes on in its log\n',
        "",
        _EMIT,
        "a job that comes back would overwrite its log",
    ),
    Bug(
        "holdfast/pipelines/step_process.py",
        "        return 128 - code if code < 0 else code",
        "        return code",
        _DRIVER,
        "a training step that was killed would not be tried again on Ray",
    ),
    Bug(
        "holdfast/pipelines/backends/ray/driver.py",
        "return self._spec.cluster.retries.budget if",
        "return self._spec.cluster.retries.budget - 1 if",
        _DRIVER,
        "the training step on Ray would have one try fewer, and none without a budget",
    ),
    Bug(
        "holdfast/pipelines/backends/ray/task.py",
        '"retry_exceptions": [LostError] if self._budget else False',
        '"retry_exceptions": False',
        _DRIVER,
        "a task whose process was killed would not be tried again on Ray",
    ),
    Bug(
        "holdfast/pipelines/backends/local/run.py",
        'if (record := finished(made)) is not None and all(o.exit_code == 0 for o in outcomes if o.step != "notify"):',
        "if (record := finished(made)) is not None and all(o.exit_code == 0 for o in outcomes):",
        _RUN,
        "a failed notify would fail a good run",
    ),
    Bug(
        "holdfast/pipelines/doctor/accelerators.py",
        'get(resource, "0"))) >= each',
        'get(resource, "0"))) > each',
        _SCHEDULING,
        "a node that fits exactly would not be counted",
    ),
    Bug(
        "holdfast/pipelines/doctor/permissions.py",
        'WATCH = ("get", "list", "watch")',
        'WATCH = ("get", "list")',
        _RIGHTS,
        "a missing right to watch pods would not be seen",
    ),
    Bug(
        "holdfast/pipelines/doctor/permissions.py",
        'JOB_VERBS = ("create", "get", "list", "watch", "delete")',
        'JOB_VERBS = ("create", "get", "list", "delete")',
        _RIGHTS,
        "a missing right to watch jobs would not be seen",
    ),
    Bug(
        "holdfast/simulation/policies.py",
        "key=lambda name: (self.share(name, simulation), name))",
        "key=lambda name: self.share(name, simulation))",
        _THEORY,
        "the order of tenants with equal shares would follow the trace",
    ),
    Bug(
        "holdfast/simulation/policies.py",
        "        faded = used * 0.5 ** ((simulation.now - then) / HALF_LIFE)\n        self._used",
        "        faded = used\n        self._used",
        _THEORY,
        "what a tenant used would not fade",
    ),
    Bug(
        "holdfast/simulation/engine.py",
        "self._begin(task, placement, self._restart if task.starts else 0.0)",
        "self._begin(task, placement, self._restart)",
        _THEORY,
        "a first start would take the time of a restart",
    ),
    Bug(
        "holdfast/simulation/engine.py",
        "saved=notice >= self.model.save_seconds",
        "saved=notice > self.model.save_seconds",
        _THEORY,
        "a notice that is just enough to save would lose work",
    ),
    Bug(
        "holdfast/pipelines/backends/local/sweep.py",
        " and one.step != EXIT_HANDLER]",
        "]",
        _RUN,
        "a failed notify would fail a good sweep",
    ),
    Bug(
        "holdfast/pipelines/doctor/quota.py",
        "or needed <= amount",
        "or needed < amount",
        _QUOTA,
        "a quota of which exactly enough is left would be called too small",
    ),
    Bug(
        "holdfast/pipelines/doctor/slurm.py",
        "if cores > found.cores or memory > found.memory:",
        "if cores >= found.cores or memory >= found.memory:",
        _PARTITION,
        "a partition that fits exactly would be called too small",
    ),
    Bug(
        "holdfast/components/trigger/step.py",
        """            store.delete(layout.dataset(prepared.dataset_id))  # first: a dataset without it does not exist
            for info in list(store.list(layout.dataset(prepared.dataset_id, ""))):
""",
        """            for info in reversed(list(store.list(layout.dataset(prepared.dataset_id, "")))):
""",
        _TRIGGER,
        "another run would find half of a dataset while it is deleted",
    ),
]
