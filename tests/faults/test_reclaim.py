"""A cloud reclaims a machine during a run: all ranks save and leave, and the bits equal those of an undisturbed run."""

from pathlib import Path

import pytest

from holdfast.launch.launches import leaving_nodes, read_exits, was_reclaimed
from holdfast.runtime.node import node_name
from holdfast.spec import ExitCode
from holdfast.telemetry import read_events
from holdfast.telemetry.events import NodeReclaimed
from tests.faults.killing import outcome
from tests.faults.nodes import Held
from tests.launch.metadata import Metadata
from tests.train.ranks import identity_of
from tests.train.tiny_run import new_store, start_training, tiny_spec, train_once


@pytest.mark.drill
def test_a_reclaimed_gang_saves_and_resumes_to_the_undisturbed_bits_without_using_its_budget(tmp_path: Path) -> None:
    settings = ("parallel.processes=2", "checkpoint.every_steps=100", "cluster.restarts.budget=0")
    calm, store, spec = new_store(tmp_path / "calm"), new_store(tmp_path / "store"), tiny_spec(*settings)
    train_once(spec, calm.url, tmp_path / "calm-home")
    identity, home = identity_of(spec), tmp_path / "home"
    home.mkdir()

    def notices() -> list[NodeReclaimed]:
        return [event for event in read_events(store, identity) if isinstance(event, NodeReclaimed)]

    with Metadata() as cloud:
        gate = Held(store, identity, home / "holds", lambda: process.poll() is None)
        process = start_training(
            tiny_spec(*settings, "cluster.spot=gcp"),
            store.url,
            home,
            environment={**gate.variables, "HOLDFAST_METADATA_URL": cloud.url},
            module="tests.faults.held_training",
        )
        gate.let(5)
        gate.wait(cloud.waited.is_set, "a question to the cloud")
        cloud.preempt()
        gate.wait(lambda: bool(notices()), "the notice")
        (log,) = (home / "logs" / identity).glob("*.log")
        message = "closing signal SIGTERM"  # torch reports this for each rank; steps without a hold take only moments
        gate.wait(lambda: log.read_text().count(message) == 2, "what asks the ranks to leave")
        gate.hold(100)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == ExitCode.OK, output
    assert [attempt.step >= 5 for attempt in gate.began()] == [False, True], "what it had computed was lost"
    assert {number: ending.code for number, ending in read_exits(store, identity).items()} == {
        1: ExitCode.PREEMPTED,
        2: ExitCode.OK,
    }
    message = f"node {node_name()} reclaimed by the cloud, 30 s notice: GCP preempts it"
    assert [(event.launch, event.text) for event in notices()] == [(1, message)]
    assert message in read_exits(store, identity)[1].detail
    assert [was_reclaimed(store, identity, launch) for launch in (1, 2)] == [True, False]
    assert leaving_nodes(store, identity, tiny_spec("cluster.spot=gcp").cluster) == {node_name()}
    assert leaving_nodes(store, identity, spec.cluster) == frozenset()
    assert outcome(store, spec)[1] == outcome(calm, spec)[1]
