"""Replayed steps equal the run's record to the last bit, or the report names the first difference."""

import json
from pathlib import Path

import pytest

from holdfast.audit.replay_job import replay_steps
from holdfast.checkpoint import read_manifest
from holdfast.spec.errors import DataError, PlanChangedError
from holdfast.store import layout
from tests.train.ranks import identity_of
from tests.train.tiny_run import new_store, tiny_spec, train_once

LAYOUT = ("parallel.processes=2", "parallel.strategy=fsdp", "checkpoint.keep_last=9", "checkpoint.every_steps=4")


@pytest.mark.slow
def test_a_replay_is_equal_names_what_was_recorded_otherwise_and_refuses_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store, spec = new_store(tmp_path / "store"), tiny_spec(*LAYOUT)
    identity = identity_of(spec)
    train_once(spec, store.url, tmp_path / "home")
    before = {info.key: info.version for info in store.list("")}

    report = replay_steps(store, identity, spec, 6, 9)
    assert (report.start, report.last, report.first, report.digests) == (4, 9, None, 1)
    assert report.figures == 5 * 6 + 1  # of the steps 5 to 9, and the digest of the checkpoint at step 8
    assert {info.key: info.version for info in store.list("")} == before, "a replay changes nothing"

    for first, last in ((0, 3), (5, 4), (11, 13)):
        with pytest.raises(DataError, match="steps 1 to 12"):
            replay_steps(store, identity, spec, first, last)

    for info in store.list(layout.run(identity, "metrics/")):
        rows = [json.loads(line) for line in store.get(info.key).splitlines()]
        changed = [row | ({"loss": row["loss"] + 1e-7} if row["step"] == 3 else {}) for row in rows]
        store.put(info.key, "".join(json.dumps(row) + "\n" for row in changed).encode())
    root = read_manifest(store, identity, 12)
    (segment,) = root.segments
    surroundings = segment.plan.surroundings | {"device": "another CPU"}
    plan = segment.plan.model_copy(update={"surroundings": surroundings})
    segments = (segment.model_copy(update={"plan": plan, "fingerprint": plan.fingerprint}),)
    store.put(layout.checkpoint(identity, 12), root.model_copy(update={"segments": segments}).to_bytes())
    with pytest.raises(PlanChangedError, match=r"device: another CPU in the run, .* here"):
        replay_steps(store, identity, spec, 1, 4)
    report = replay_steps(store, identity, spec, 2, 4, anyway=True)  # from the initial state
    assert (report.start, report.first, [figure.name for figure in report.differing]) == (0, 3, ["loss"])
