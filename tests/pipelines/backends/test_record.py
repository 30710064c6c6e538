"""A submission is found by every name that a person has seen of its run."""

from __future__ import annotations

from pathlib import Path

from holdfast.components.runtime.outcomes import Outcome
from holdfast.components.spec import parse_spec, run_id
from holdfast.components.store import layout, open_store
from holdfast.pipelines.backends.order import Order
from holdfast.pipelines.backends.record import find_record, record_of
from holdfast.pipelines.view.catalog import all_runs

SPEC = parse_spec("{name: small, store: 's3://bucket/prefix', data: {sources: [{uri: 'python:stdlib'}]}}")
THOUGHT, DATASET = "3f2a4b5c6d7e8f90", "d" * 16


def test_a_run_whose_pods_have_another_python_than_who_submitted_it_is_found_by_its_own_id(tmp_path: Path) -> None:
    store, ran = open_store(tmp_path.as_uri()), run_id(SPEC, DATASET)
    record_of(Order(SPEC, run_id=THOUGHT), "argo", "small-1", job="uid-1").write(store)
    found = find_record(store, "small-1")
    assert found is not None and found.identity == THOUGHT  # nothing else is known yet
    assert find_record(store, ran[:6]) is None
    assert [run.run_id for run in all_runs(store)] == [THOUGHT]
    store.put(layout.job("uid-1", "preprocess"), Outcome("preprocess", 1, 1.0, result=DATASET).as_json())
    for wanted in (ran, ran[:6], THOUGHT, "small-1", "uid-1", "small"):
        found = find_record(store, wanted)
        assert found is not None
        assert (found.id, found.identity) == ("small-1", ran)
        assert found.order == Order(SPEC, run_id=THOUGHT)  # asked for again, it is the same Workflow
    assert [run.run_id for run in all_runs(store)] == [THOUGHT]  # of the run itself nothing is there yet
    store.put(layout.run(ran, "run.json"), b'{"spec": {"name": "small"}}')
    assert [run.run_id for run in all_runs(store)] == [ran]


def test_a_submission_whose_steps_work_on_what_was_thought_stays_as_it_is(tmp_path: Path) -> None:
    store, ran = open_store(tmp_path.as_uri()), run_id(SPEC, DATASET)
    record_of(Order(SPEC, run_id=ran), "kubeflow", "uid-1", job="uid-1").write(store)
    store.put(layout.job("uid-1", "preprocess"), Outcome("preprocess", 1, 1.0, result=DATASET).as_json())
    found = find_record(store, ran)
    assert found is not None and found.identity == found.run_id == ran
    assert [run.run_id for run in all_runs(store)] == [ran]
