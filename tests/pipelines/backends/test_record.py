"""A submission is found by every name of its run that a user has seen."""

from dataclasses import replace
from pathlib import Path

from holdfast.pipelines.backends.record import find_record, keep, record_of
from holdfast.pipelines.backends.request import RunRequest, identify_request
from holdfast.pipelines.view.catalog import all_runs, find_run
from holdfast.spec import dump_spec, parse_spec, run_id
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store

SPEC = parse_spec("{name: small, store: 's3://bucket/prefix', data: {sources: [{uri: 'python:stdlib'}]}}")
THOUGHT, DATASET = "3f2a4b5c6d7e8f90", "d" * 16


def test_a_run_whose_pods_have_another_python_than_who_submitted_it_is_found_by_its_own_id(tmp_path: Path) -> None:
    store, identity = open_store(tmp_path.as_uri()), run_id(SPEC, DATASET)
    record_of(RunRequest(SPEC, run_id=THOUGHT), "argo", "small-1", job="uid-1").write(store)
    record = find_record(store, "small-1")
    assert record is not None and record.identity == THOUGHT  # nothing else is known yet
    assert find_record(store, identity[:6]) is None
    assert [run.run_id for run in all_runs(store)] == [THOUGHT]
    store.put(layout.job("uid-1", "preprocess"), Outcome("preprocess", 1, 1.0, result=DATASET).as_json())
    for wanted in (identity, identity[:6], THOUGHT, "small-1", "uid-1", "small"):
        record = find_record(store, wanted)
        assert record is not None
        assert (record.id, record.identity) == ("small-1", identity)
        assert record.request == RunRequest(SPEC, run_id=THOUGHT)  # submitted again, it is the same Workflow
    assert [run.run_id for run in all_runs(store)] == [THOUGHT]  # the run itself has written nothing yet
    store.put(layout.run(identity, "run.json"), b'{"spec": {"name": "small"}}')
    assert [run.run_id for run in all_runs(store)] == [identity]


def test_a_run_that_could_not_be_identified_is_found_by_what_was_printed_of_it(tmp_path: Path) -> None:
    """`submit` prints the backend's id and the name, and no run id that could belong to another run."""
    store, identity = open_store(tmp_path.as_uri()), run_id(SPEC, DATASET)
    request = identify_request(RunRequest(SPEC))
    assert (request.run_id, "python:stdlib is that of the image" in request.unread) == ("", True)
    assert identity not in request.name("digest")
    job = "0b7e1d2c-1111-4222-8333-444455556666"
    assert keep(record_of(request, "kubeflow", job, job=job), store.url) == ""
    for printed in (job, "small"):
        record = find_record(store, printed)
        assert record is not None and (record.id, record.identified, record.ran) == (job, False, "")
        assert record.request == replace(request, unread="")
        assert find_run(store, printed).run_id == request.key  # it has not begun; the known fields are shown
    store.put(layout.job(job, "preprocess"), Outcome("preprocess", 1, 1.0, result=DATASET).as_json())
    store.put(layout.run(identity, "run.json"), b'{"spec": {"name": "small"}}')
    for printed in (job, "small", identity):
        record = find_record(store, printed)
        assert record is not None and record.identity == identity
        assert find_run(store, printed).run_id == identity


def test_an_id_is_known_only_where_the_steps_read_what_can_be_read_here(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    volume = f"cluster.volumes=[{{claim: c, path: {tmp_path}}}]"
    spec = parse_spec("{name: small, store: 's3://b/p', data: {sources: [{uri: x}]}}", [f"data.sources.0.uri={text}"])
    assert identify_request(RunRequest(spec), shared_folders=True).run_id
    assert identify_request(RunRequest(spec.with_overrides([volume])), shared_volumes=True).run_id  # of Ray
    in_pods = identify_request(RunRequest(spec.with_overrides([volume])))
    assert (in_pods.run_id, "on a volume of the pods" in in_pods.unread) == ("", True)
    tracked = identify_request(
        RunRequest(parse_spec("{name: small, store: 's3://b/p', data: {sources: [{uri: 'dvc:text'}]}}"))
    )
    assert (tracked.run_id, "data.sources.0.repo" in tracked.unread) == ("", True)


def test_resuming_shows_the_spec_as_it_was_written(tmp_path: Path) -> None:
    store, request = open_store(tmp_path.as_uri()), RunRequest(SPEC, run_id=THOUGHT)
    record_of(request, "kubeflow", "uid-1", job="uid-1").write(store)
    record = find_record(store, "uid-1")
    assert record is not None
    assert record.request.parameters()["spec"] == request.parameters()["spec"] == {
        "name": "small", "store": "s3://bucket/prefix", "data": {"sources": [{"uri": "python:stdlib"}]},
    }  # fmt: skip
    every = RunRequest(parse_spec(dump_spec(SPEC)), run_id=THOUGHT)
    assert every.name("digest") == request.name("digest")  # another notation is not another run


def test_a_submission_whose_steps_work_on_what_was_thought_stays_as_it_is(tmp_path: Path) -> None:
    store, identity = open_store(tmp_path.as_uri()), run_id(SPEC, DATASET)
    record_of(RunRequest(SPEC, run_id=identity), "kubeflow", "uid-1", job="uid-1").write(store)
    store.put(layout.job("uid-1", "preprocess"), Outcome("preprocess", 1, 1.0, result=DATASET).as_json())
    record = find_record(store, identity)
    assert record is not None and record.identity == record.run_id == identity
    assert [run.run_id for run in all_runs(store)] == [identity]
