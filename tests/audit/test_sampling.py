"""Sampled replays of stretches of runs: each stretch runs once, differences are reported."""

import json
from pathlib import Path

import pytest

from holdfast.audit.records import Stretch, read_audits
from holdfast.audit.sampling import stretches
from holdfast.checkpoint import read_manifest
from holdfast.engines.assignment import Assignment
from holdfast.spec.errors import DataError, ExitCode
from holdfast.store import Store, layout
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AuditDiffers
from tests.kept_server import launches_of_one_server
from tests.pipelines.cli.test_runs import holdfast
from tests.train.ranks import identity_of
from tests.train.tiny_run import new_store, tiny_spec, train_once

__all__ = ["launches_of_one_server"]


@pytest.mark.slow
@pytest.mark.usefixtures("launches_of_one_server")
def test_an_audit_replays_each_stretch_once_reports_differences_and_refuses_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("checkpoint.keep_last=9", "checkpoint.every_steps=4")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_STORE", store.url)
    identity = identity_of(spec)
    train_once(spec, store.url, tmp_path / "home")
    every = [Stretch(0, 4, 1), Stretch(4, 8, 1), Stretch(8, 12, 1)]
    assert stretches(store, identity, 100) == every
    assert [stretch.last for stretch in stretches(store, identity, 3)] == [3, 7, 11]

    first = holdfast("audit", "replay", "--sample", "2", "--seed", "7", "--json")  # of all runs
    assert first.exit_code == ExitCode.OK, first.output
    report = json.loads(first.stdout)
    assert (report["equal"], report["audit"]["seed"], report["audit"]["left"]) == (True, 7, 1)
    assert {record.stretch for record in read_audits(store, identity)} == set(every) - set(
        stretches(store, identity, 100)
    )
    second = holdfast("audit", "replay", identity, "--sample", "2", "--seed", "7")
    assert second.exit_code == ExitCode.OK
    assert "seed 7: 1 computed again, 0 refused, 0 left" in second.stdout
    assert [record.stretch for record in read_audits(store, identity)] == every
    assert "12 steps in 3 stretches: all the same bit for bit" in holdfast("show", identity).stdout
    assert not differences(store, identity)

    change_step(store, identity, 3)
    store.delete(layout.audit(identity, 0, 4, 1))
    third = holdfast("audit", "replay", "--sample", "1")
    assert third.exit_code == ExitCode.MISMATCH, third.output
    assert "step 3 is not what the run recorded" in third.stdout
    (event,) = differences(store, identity)
    assert (event.source, event.step, event.start, event.is_news) == ("audit", 3, 0, True)
    assert event.differing.startswith("loss ")
    page = holdfast("show", identity).stdout
    assert "1 of them differ" in page
    assert event.text in page
    assert json.loads(holdfast("show", identity, "--json").stdout)["audits"][0]["first"] == 3
    assert holdfast("audit", "replay", "--sample", "1").exit_code == ExitCode.OK, "a stretch is reported once"

    be_of_another_machine(store, identity)
    for info in store.list(layout.audits(identity)):
        store.delete(info.key)
    fourth = holdfast("audit", "replay", "--sample", "3")
    assert fourth.exit_code == ExitCode.PLAN_CHANGED, fourth.output
    assert "cannot be computed again here (code 18)" in fourth.stdout
    assert "device: another CPU" in fourth.stdout
    assert "0 computed again, 1 refused" in fourth.stdout, "one stretch says it for all of the run"
    assert (read_audits(store, identity), len(differences(store, identity))) == ([], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [(), ("--sample", "1", "--steps", "3"), ("--steps", "3"), ("--sample", "1", "--anyway")]
)
def test_a_replay_is_of_steps_of_a_run_or_of_a_sample(arguments: tuple[str, ...]) -> None:
    assert holdfast("audit", "replay", *arguments).exit_code == ExitCode.USAGE


def differences(store: Store, identity: str) -> list[AuditDiffers]:
    return [event for event in read_events(store, identity) if isinstance(event, AuditDiffers)]


def change_step(store: Store, identity: str, step: int) -> None:
    for info in store.list(layout.run(identity, "metrics/")):
        rows = [json.loads(line) for line in store.get(info.key).splitlines()]
        changed = [row | ({"loss": row["loss"] + 1e-7} if row["step"] == step else {}) for row in rows]
        store.put(info.key, "".join(json.dumps(row) + "\n" for row in changed).encode())


def be_of_another_machine(store: Store, identity: str) -> None:
    root = read_manifest(store, identity, 12)
    (segment,) = root.segments
    plan = segment.plan.model_copy(update={"surroundings": segment.plan.surroundings | {"device": "another CPU"}})
    segments = (segment.model_copy(update={"plan": plan, "fingerprint": plan.fingerprint}),)
    store.put(layout.checkpoint(identity, 12), root.model_copy(update={"segments": segments}).to_bytes())


def test_a_launch_of_another_version_is_refused_by_name_and_ends_no_audit_of_other_runs() -> None:
    with pytest.raises(DataError, match=r"launch 1 of run abc: .*preferences.*another version") as failure:
        Assignment.recorded({"run_id": "abc", "preferences": False}, "launch 1 of run abc")
    assert not failure.value.exit_code.retryable, "sampling leaves the run out and continues"
