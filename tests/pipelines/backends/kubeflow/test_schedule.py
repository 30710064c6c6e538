"""One schedule for each pipeline: never two at the same time, and no run killed, wherever its change is interrupted."""

import re
from contextlib import suppress

import pytest

from holdfast.pipelines.backends.kubeflow import schedule as schedules
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.kubeflow.schedule import Scheduled, delete, entries, pause, schedule, trigger_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import HoldfastError, MissingError, SpecError
from tests.kubeflow_server import Fault, KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import compiled_text, connect, spec

WEEKLY = RunRequest(spec("schedule.cron=0 3 * * 1"))
DAILY = RunRequest(spec("schedule.cron=0 3 * * *"))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content does not matter here."""
    text = compiled_text(spec())
    for module in ("schedule", "submit"):
        monkeypatch.setattr(f"holdfast.pipelines.backends.kubeflow.{module}.pipeline_text", lambda *_, **__: text)
    monkeypatch.setattr(schedules, "pipeline_digest", lambda _: "digest")


def test_a_schedule_has_its_trigger_and_pipeline(kubeflow: KubeflowServer, server: Server) -> None:
    recurring_run = schedule(server, WEEKLY)
    (schedule_entry,) = kubeflow.recurring.values()
    assert schedule_entry["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}
    assert (schedule_entry["status"], schedule_entry["max_concurrency"], schedule_entry["no_catchup"]) == (
        "ENABLED",
        "1",
        True,
    )
    assert recurring_run.link.endswith(f"/#/recurringrun/details/{recurring_run.recurring_run_id}")
    assert kubeflow.fire(recurring_run.recurring_run_id) in kubeflow.runs


def test_the_runs_of_a_schedule_have_readable_names(server: Server) -> None:
    """KFP builds their names from the first 25 letters, digits and dashes of the schedule's name, and drops the
    rest."""
    name = schedule(server, WEEKLY).name
    assert re.fullmatch(r"small-scheduled-[0-9a-f]{8}", name)
    assert re.sub("[^a-z0-9-]+", "", name.lower())[:25] == name[:25]
    assert [entry.pipeline for entry in entries(server)] == ["small"]


def test_the_same_schedule_again_changes_nothing(kubeflow: KubeflowServer, server: Server) -> None:
    first = schedule(server, WEEKLY)
    changes = len(kubeflow.changes)
    second = schedule(server, WEEKLY)
    assert (first.created, second.created) == (True, False)
    assert len(kubeflow.changes) == changes


def test_a_changed_schedule_replaces_the_former_one(kubeflow: KubeflowServer, server: Server) -> None:
    first = schedule(server, WEEKLY)
    second = schedule(server, DAILY)
    assert second.removed == (first.recurring_run_id,)
    assert list(kubeflow.recurring) == [second.recurring_run_id]
    assert kubeflow.most_enabled == 1


def test_a_run_of_the_former_schedule_continues_and_the_next_call_deletes_the_schedule(
    kubeflow: KubeflowServer, server: Server
) -> None:
    first = schedule(server, WEEKLY)
    run = kubeflow.fire(first.recurring_run_id)
    second = schedule(server, DAILY)
    assert (second.removed, second.kept) == ((), (first.recurring_run_id,))
    assert [recurring_run["recurring_run_id"] for recurring_run in kubeflow.enabled()] == [second.recurring_run_id]
    kubeflow.runs[run]["state"] = "SUCCEEDED"
    assert schedule(server, DAILY).removed == (first.recurring_run_id,)
    assert kubeflow.killed == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", 403])  # a schedule whose answer is lost exists before the deletion
def test_killed_at_any_request_a_change_is_finished_by_the_next_call(kubeflow: KubeflowServer, fault: Fault) -> None:
    def changed(name: str) -> tuple[Scheduled, Scheduled]:
        before = schedule(connect(kubeflow), RunRequest(spec(f"name={name}", "schedule.cron=0 3 * * 1")))
        kubeflow.fire(before.recurring_run_id)
        return before, schedule(connect(kubeflow), RunRequest(spec(f"name={name}", "schedule.cron=0 4 * * 1")))

    schedule(connect(kubeflow), RunRequest(spec("name=whole", "schedule.cron=0 3 * * 1")))
    count = len(kubeflow.requests)
    changed("whole")
    count = len(kubeflow.requests) - count
    kubeflow.recurring.clear()
    for broken in range(count):
        name = f"small-{broken}"
        before = schedule(connect(kubeflow), RunRequest(spec(f"name={name}", "schedule.cron=0 3 * * 1")))
        run = kubeflow.fire(before.recurring_run_id)
        kubeflow.most_enabled = 0
        request_count = len(kubeflow.requests)

        def from_then_on(index: int, _method: str, _path: str, at: int = request_count + broken) -> Fault:
            if index < at:
                return None
            return fault if index == at else "drop"  # the process is gone

        after = RunRequest(spec(f"name={name}", "schedule.cron=0 4 * * 1"))
        kubeflow.fault = from_then_on
        with suppress(HoldfastError):
            schedule(connect(kubeflow), after)
        kubeflow.fault = lambda *_: None
        assert len(kubeflow.enabled()) <= 1
        now = schedule(connect(kubeflow), after)
        assert [recurring_run["recurring_run_id"] for recurring_run in kubeflow.enabled()] == [now.recurring_run_id]
        assert kubeflow.most_enabled == 1
        assert kubeflow.killed == []
        kubeflow.runs[run]["state"] = "SUCCEEDED"
        last = schedule(connect(kubeflow), after)
        assert list(kubeflow.recurring) == [last.recurring_run_id] == [now.recurring_run_id]
        kubeflow.recurring.clear()


def test_going_back_to_a_former_schedule_enables_it_again(kubeflow: KubeflowServer, server: Server) -> None:
    first = schedule(server, WEEKLY)
    kubeflow.fire(first.recurring_run_id)
    schedule(server, DAILY)
    assert schedule(server, WEEKLY).recurring_run_id == first.recurring_run_id
    assert [recurring_run["recurring_run_id"] for recurring_run in kubeflow.enabled()] == [first.recurring_run_id]


def test_a_duplicate_schedule_is_removed(kubeflow: KubeflowServer, server: Server) -> None:
    first = schedule(server, WEEKLY)
    twin = {
        **kubeflow.recurring[first.recurring_run_id],
        "recurring_run_id": "twin",
        "created_at": "2030-01-01T00:00:00Z",
    }
    kubeflow.recurring["twin"] = twin  # created by another user at the same moment
    schedule(server, WEEKLY)
    assert list(kubeflow.recurring) == [first.recurring_run_id]


def test_other_pipelines_and_what_people_scheduled_by_hand_are_left_alone(
    kubeflow: KubeflowServer, server: Server
) -> None:
    other = schedule(server, RunRequest(spec("name=small-too", "schedule.cron=0 5 * * *")))
    recurring_run = schedule(server, WEEKLY)
    by_hand = {
        **kubeflow.recurring[recurring_run.recurring_run_id],
        "recurring_run_id": "hand",
        "display_name": "small every day",
    }
    kubeflow.recurring["hand"] = by_hand
    schedule(server, DAILY)
    delete(server, "small")
    assert set(kubeflow.recurring) == {other.recurring_run_id, "hand"}
    assert [entry.pipeline for entry in entries(server)] == ["small-too"]


def test_a_paused_schedule_starts_nothing_until_it_is_given_again(kubeflow: KubeflowServer, server: Server) -> None:
    recurring_run = schedule(server, WEEKLY)
    assert pause(server, "small") == [recurring_run.recurring_run_id]
    assert pause(server, "small") == []
    assert [entry.enabled for entry in entries(server)] == [False]
    assert schedule(server, WEEKLY).recurring_run_id == recurring_run.recurring_run_id
    assert len(kubeflow.enabled()) == 1


def test_deleting_waits_for_what_is_running(kubeflow: KubeflowServer, server: Server) -> None:
    recurring_run = schedule(server, WEEKLY)
    run = kubeflow.fire(recurring_run.recurring_run_id)
    assert delete(server, "small") == ((), (recurring_run.recurring_run_id,))
    assert (kubeflow.enabled(), kubeflow.killed) == ([], [])
    kubeflow.runs[run]["state"] = "FAILED"
    assert delete(server, "small") == ((recurring_run.recurring_run_id,), ())
    with pytest.raises(MissingError, match="has no schedule"):
        pause(server, "small")


def test_a_dry_run_shows_the_schedule_and_makes_none() -> None:
    dry = Server(Access(), dry=True)
    schedule(dry, WEEKLY)
    assert dry.requests[-1].path == "/apis/v2beta1/recurringruns"
    assert dry.requests[-1].body["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}


@pytest.mark.parametrize(
    ("cron", "six"),
    [
        ("*/15 * * * *", "0 0,15,30,45 * * * *"),
        ("30 2 1 jan,jul *", "0 30 2 1 1,7 *"),
        ("0 3 * * 5-7", "0 0 3 * * 0,5,6"),
        ("0 3 * * sun", "0 0 3 * * 0"),
    ],
)
def test_five_fields_become_the_six_that_kfp_reads(cron: str, six: str) -> None:
    assert trigger_of(spec(f"schedule.cron='{cron}'")).cron_schedule.cron == six


def test_an_interval_is_in_seconds() -> None:
    assert trigger_of(spec("schedule.every_minutes=90")).periodic_schedule.interval_second == 5400


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ((), "schedule: says neither"),
        (("schedule.cron=0 3 L * *",), "schedule.cron"),
        (("schedule.cron=0 3 * * 1#2",), "schedule.cron"),
        (("schedule.cron=0 3 * * 1", "schedule.timezone=Europe/Berlin"), "schedule.timezone"),
    ],
)
def test_a_schedule_that_kfp_cannot_express_is_refused(changes: tuple[str, ...], field: str) -> None:
    with pytest.raises(SpecError, match=field):
        trigger_of(spec(*changes))


def test_the_time_zone_of_the_kfp_scheduler_is_configurable() -> None:
    zoned_spec = spec("schedule.cron=0 3 * * 1", "schedule.timezone=Europe/Berlin")
    assert trigger_of(zoned_spec, "Europe/Berlin").cron_schedule.cron == "0 0 3 * * 1"
    assert schedules.trigger_of(spec("schedule.cron=0 3 * * 1", "schedule.timezone=Etc/UTC"))
