"""Recorded steps of a script are computed again to the last bit, or the first difference is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast
from holdfast.api import Run
from holdfast.api.run_handle import replayable_spec
from holdfast.audit.replay_job import replay_steps
from holdfast.checkpoint import read_manifest
from holdfast.code.resolve import is_submitted, keep_submitted, publish_code
from holdfast.components.train.script import train_script
from holdfast.launch.exits import RankRecord
from holdfast.launch.launches import newest_launch, read_launch
from holdfast.pipelines.backends.record import find_record, keep, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.cli import app
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.view.catalog import find_run
from holdfast.rank.preemption import PreemptionSignal
from holdfast.script import session as sessions
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.replay import Replay, ReplayLaunch
from holdfast.script.tree import StateError
from holdfast.spec import run_id
from holdfast.spec.errors import DataError, MissingError, PlanChangedError, SpecError
from holdfast.store import Store, layout
from holdfast.telemetry import read_history
from holdfast.telemetry.history import is_pure
from holdfast.telemetry.run_metadata import write_run_metadata
from tests.checkpoint.saving import opened
from tests.script.launched import run_script

LOOP = Path(__file__).parents[2] / "examples" / "scripts" / "loop" / "spec.yaml"


def loop(steps: int = 6, mode: str = "") -> None:
    """A loop with an average of its loss, which is logged late; `mode` changes what it saves or computes."""
    session = holdfast.session(seed=3)
    model, average = nn.Linear(4, 4), {"loss": 0.0}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(session.restore(model=model, optimizer=optimizer, average=average), steps):
        loss = model(torch.randn(2, 4)).square().mean() * (1.001 if mode == "other" and step == 4 else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average["loss"] = 0.5 * average["loss"] + loss.item()
        session.step(step + 1, loss=loss)
        session.log(step + 1, average=average["loss"])
    session.export(model)


def replayed(store: Store, results: Path, replay: Replay, *arguments: Any) -> list[dict[str, Any]]:
    """The rows of a replay in this process, with the fields that no attempt changes."""
    launch = newest_launch(store, "run")
    recorded = ScriptAssignment.recorded(read_launch(store, "run", launch).assignment, "the launch")
    sessions._session = None
    sessions.launched = ReplayLaunch(
        store, launch, 0.0, False, recorded, "", PreemptionSignal(), RankRecord(), replay=replay
    )
    try:
        with pytest.raises(sessions.StopExit):
            loop(*arguments)
        session = sessions.current()
        assert isinstance(session, sessions.ManagedSession)
        session.finish()
        return [pure(json.loads(line)) for line in results.read_text().splitlines()]
    finally:
        session = sessions.current()
        if isinstance(session, sessions.ManagedSession):
            session.close(None)
        sessions.launched = sessions._session = None
        results.unlink(missing_ok=True)


def pure(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row that no attempt changes."""
    return {name: value for name, value in row.items() if is_pure(name)}


def test_the_session_of_a_replay_computes_recorded_rows_and_changes_nothing(tmp_path: Path) -> None:
    url, results = f"file://{tmp_path}/store", tmp_path / "rows.jsonl"
    run_script(url, "run", loop, every_steps=3, digest_every=1, keep_last=9)
    store = opened(url)
    before = {info.key: info.version for info in store.list("")}
    recorded = [pure(row) for row in read_history(store, "run")]
    state = read_manifest(store, "run", 3).state_digest
    plan = read_manifest(store, "run", 6).segments[-1].plan

    computed = replayed(store, results, Replay(3, 6, results, state, plan))
    assert [row["step"] for row in computed] == [4, 5, 6]
    assert computed == recorded[3:], "a metric that comes after a save is in no record, and after the last step unknown"
    assert ["average" in row for row in computed] == [True, True, False]
    assert replayed(store, results, Replay(0, 2, results))[0] == recorded[0]
    differing = replayed(store, results, Replay(3, 6, results), 6, "other")
    assert [one["loss"] == other["loss"] for one, other in zip(differing, recorded[3:], strict=True)][:2] == [
        True,
        False,
    ]
    assert {info.key: info.version for info in store.list("")} == before

    with pytest.raises(DataError, match="step 3 was replaced by one with other bits"):
        replayed(store, results, Replay(3, 6, results, "another"))
    another = plan.model_copy(update={"surroundings": plan.surroundings | {"device": "another CPU"}})
    with pytest.raises(PlanChangedError, match=r"device: another CPU in the run, .* here"):
        replayed(store, results, Replay(3, 6, results, state, another))


def test_a_script_that_ends_before_the_recorded_step_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    run_script(url, "run", loop)
    recorded = ScriptAssignment.recorded(read_launch(opened(url), "run", 1).assignment, "the launch")
    sessions._session = None
    sessions.launched = ReplayLaunch(
        opened(url),
        1,
        0.0,
        False,
        recorded,
        "",
        PreemptionSignal(),
        RankRecord(),
        replay=Replay(0, 6, tmp_path / "rows.jsonl"),
    )
    try:
        loop(2)
        session = sessions.current()
        assert isinstance(session, sessions.ManagedSession)
        with pytest.raises(StateError, match="ended at step 2, and run run has recorded step 6"):
            session.finish()
        session.close(None)
    finally:
        sessions.launched = sessions._session = None


def test_the_spec_of_a_trial_is_that_of_a_sweep_that_was_submitted_from_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store = opened(f"file://{tmp_path}/store")
    trials = (('train.arguments=["6"]',), ('train.arguments=["7"]',))
    sweep = RunRequest(load_spec(LOOP, ["checkpoint.every_steps=3"]), store.url, run_id="5" * 16, trials=trials)
    keep(record_of(sweep, "slurm", "x"), store.url)
    trial = sweep.spec.with_overrides(trials[1])
    identity = run_id(trial, "")
    write_run_metadata(store, identity, trial, "", "")
    run_script(store.url, identity, loop, every_steps=3)

    with pytest.raises(MissingError, match="none that was submitted from this machine"):
        replayable_spec(store, find_run(store, identity))
    keep_submitted(sweep.executed)
    assert replayable_spec(store, find_run(store, identity)) == trial

    forked = find_record(store, Run(identity, store.url).fork(3).run_id)
    assert forked is not None
    assert (forked.request.spec, forked.backend, forked.is_sweep) == (trial, "slurm", False)
    assert is_submitted(forked.request.executed)

    changed = trial.with_overrides(['train.arguments=["8"]'])
    write_run_metadata(store, "8" * 16, changed, "", "")
    with pytest.raises(MissingError, match="none that was submitted from this machine"):
        replayable_spec(store, find_run(store, "8" * 16))


@pytest.mark.slow
def test_a_run_is_replayed_by_its_ranks_and_a_changed_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store = opened(f"file://{tmp_path}/store")
    changes = ['train.arguments=["6"]', "parallel.processes=1", "train.verify_steps=0", "checkpoint.every_steps=3"]
    spec = load_spec(LOOP, [*changes, "checkpoint.keep_last=9"])
    publish_code(spec, store)
    identity = train_script(spec, "", store).run_id

    for info in store.list(layout.run(identity, "metrics/")):
        rows = [json.loads(line) for line in store.get(info.key).splitlines()]
        changed = [row | ({"loss": row["loss"] + 1e-7} if row["step"] == 6 else {}) for row in rows]
        store.put(info.key, "".join(json.dumps(row) + "\n" for row in changed).encode())
    found = replay_steps(store, identity, spec, 5, 6)
    assert (found.start, found.last, found.first, [one.name for one in found.differing]) == (3, 6, 6, ["loss"])
    assert found.digests == 1, "that of the checkpoint at step 6 is equal"
    with pytest.raises(DataError, match="steps 1 to 6"):
        replay_steps(store, identity, spec, 6, 7)

    off = spec.with_overrides(["train.determinism=off"])
    with pytest.raises(SpecError, match="promises nothing about the bits of a script"):
        replay_steps(store, identity, off, 5, 6)
    refused = CliRunner().invoke(app, ["audit", "replay", identity, "--steps", "5-6", "--store", store.url])
    assert "none that was submitted from this machine" in str(refused.exception)
