"""The ranks of a run pass a health check before they train, if the spec or a previous failure requires it."""

from pathlib import Path

import pytest

from holdfast.health import Report
from holdfast.rank.health_gate import health_check_request
from holdfast.spec import ExitCode, run_id
from holdfast.store import Store, layout
from holdfast.store.sequence import read_record, records
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AttemptBegan, HealthChecked, LaunchEnded
from tests.train.ranks import trained
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec

GANG = ("parallel.processes=2", "training.steps=3", "cluster.health.seconds=0.01")


def test_auto_checks_multi_node_accelerator_runs_and_launches_after_a_blamed_node() -> None:
    def seconds(*overrides: str, blamed: tuple[str, ...] = ()) -> object:
        spec = tiny_spec("cluster.health.seconds=7", "training.global_batch=64", *overrides)
        return health_check_request(spec, blamed).get("health_seconds")

    several = ("cluster.nodes.max=2", "cluster.nodes.min=2", "store=s3://bucket/prefix")
    gpus = (*several, "cluster.accelerator=nvidia")
    assert [seconds(), seconds(*several), seconds(*gpus)] == [None, None, 7]
    assert seconds(blamed=("a",)) == 7
    assert seconds("cluster.health.before=always") == 7
    assert seconds(*gpus, "cluster.health.before=never", blamed=("a",)) is None
    assert health_check_request(tiny_spec(), ("a", "b"))["health_reason"] == "the launch before blames a, b for its end"


def finished(store: Store, folder: Path, sick: str, *overrides: str, salt: str = "") -> tuple[int, str]:
    spec = tiny_spec(*GANG, *overrides)
    process = start_training(
        spec, store.url, folder, salt, {"HOLDFAST_TEST_SICK": sick}, module="tests.health.sick_train"
    )
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


def reports(store: Store, identity: str) -> list[Report]:
    folder = layout.health(identity)
    documents = [read_record(store, folder, number) for number, _ in records(store, folder)]
    assert [document["launch"] for document in documents] == list(range(1, len(documents) + 1))
    assert sum(1 for _ in store.list(folder)) == len(documents)  # the probes leave nothing in the store
    return [Report.model_validate(document["report"]) for document in documents]


@pytest.mark.drill
def test_a_run_does_not_start_on_an_unhealthy_node_and_gives_the_same_bits_once_it_recovers(
    tmp_path: Path,
) -> None:
    store, home = new_store(tmp_path / "store"), tmp_path / "home"
    spec = tiny_spec(*GANG)
    identity = run_id(spec, DATASET_ID)
    code, output = finished(store, home, "1:slow", "cluster.health.before=always")
    assert code == ExitCode.UNHEALTHY_NODE, output
    assert "The run does not start here" in output
    events = read_events(store, identity)
    assert not any(isinstance(event, AttemptBegan) for event in events)  # no attempt was claimed
    assert not list(store.list(layout.attempts(identity)))
    (event,) = [event for event in events if isinstance(event, HealthChecked)]
    assert "rank 1 on" in event.failed and event.is_news
    assert [event.restart_in for event in events if isinstance(event, LaunchEnded)] == [None]
    # The same command with `auto`: the node was blamed, so it is tested again, and passes.
    code, output = finished(store, home, "-")
    assert code == ExitCode.OK, output
    first, second = reports(store, identity)
    assert (first.failures != (), second.findings) == (True, ())
    assert "blames" in second.why
    code, output = finished(store, home, "-", salt="calm")  # no health check is requested
    assert code == ExitCode.OK, output
    assert reports(store, run_id(spec, DATASET_ID, "calm")) == []
    assert trained(store, spec) == trained(store, spec, "calm")
