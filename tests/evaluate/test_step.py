"""The evaluate step on real runs, a real dataset and a real registry: it judges once, and again only after a change."""

import json
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.components.evaluate import run
from holdfast.dataset import Dataset
from holdfast.scoring import Measured, settings_key
from holdfast.scoring.device import scoring_devices
from holdfast.scoring.score import score
from holdfast.spec import Spec, parse_spec
from holdfast.spec.errors import (
    DataError,
    ExitCode,
    ForeignVersionError,
    MissingError,
    UnscorableChampionError,
)
from holdfast.store import Store, layout, open_store
from holdfast.store.sequence import record_key
from holdfast.tracking import RunTracker, connect, registration_key
from tests import empty_mlflow
from tests.evaluate import world
from tests.evaluate.conftest import Champion


@pytest.fixture
def model() -> str:
    """A registered model for this test alone."""
    return f"m-{uuid.uuid4().hex[:8]}"


MLFLOW = "telemetry.trackers=[mlflow]"  # for tests that look at the copy of a verdict, which takes as long as a verdict


def spec(model: str, *overrides: str) -> Spec:
    return world.spec(f"registration.model={model}", "telemetry.trackers=[]", *overrides)


def records(store: Store, run_id: str = world.RUN) -> list[str]:
    return [info.key.rsplit("/", 1)[1] for info in store.list(layout.run(run_id, "evaluations/"))]


def test_the_first_model_is_judged_by_itself_and_the_same_question_is_answered_once(store: Store, model: str) -> None:
    world.finish(store, world.trained(20))
    settings = spec(model, 'evaluation.prompts=["the quick", ""]', "evaluation.max_loss=9")
    verdict = run(settings, world.RUN, store)
    assert (verdict.word, verdict.champion) == ("blessed", None)
    assert verdict.metrics["tokens"] == 18 * 32
    assert [sample.prompt for sample in verdict.samples] == ["the quick", ""]
    assert verdict.key == f"{settings_key(settings)}-none"
    assert records(store) == [f"{verdict.key}.html", f"{verdict.key}.json"]
    assert verdict.checkpoint == layout.checkpoint(world.RUN, 40)
    assert run(settings, world.RUN, store) == verdict  # not measured again


def test_a_verdict_shows_in_mlflow_whether_it_blesses_or_not(store: Store, model: str) -> None:
    world.finish(store, world.trained(5))
    settings = spec(model, "evaluation.max_loss=0.0001", MLFLOW)
    verdict = run(settings, world.RUN, store)
    tracker = RunTracker.open(settings, world.RUN, verdict.dataset_id, store)
    mlflow_data = connect(tracker.uri).get_run(tracker.mlflow_run_id).data
    assert (verdict.word, mlflow_data.tags["holdfast.verdict"]) == ("not_blessed", "not_blessed")
    assert mlflow_data.metrics["evaluation/loss"] == verdict.metrics["loss"]


def test_a_verdict_whose_writer_died_before_mlflow_knew_shows_there_after_the_next_call(
    store: Store, model: str
) -> None:
    world.finish(store, world.trained(5))
    settings = spec(model, f"registration.experiment={model}", MLFLOW)
    verdict = run(settings, world.RUN, store)
    tracker = RunTracker.open(settings, world.RUN, verdict.dataset_id, store)
    connect(tracker.uri).delete_run(tracker.mlflow_run_id)
    assert run(settings, world.RUN, store) == verdict
    reopened = RunTracker.open(settings, world.RUN, verdict.dataset_id, store)
    assert connect(reopened.uri).get_run(reopened.mlflow_run_id).data.tags["holdfast.verdict"] == verdict.word


def test_the_same_evaluation_in_another_store_writes_identical_bytes(tmp_path: Path, model: str) -> None:
    objects = []
    for _ in range(2):
        root = tmp_path / "store"
        store = open_store(f"file://{root}")
        world.write_dataset(store)
        world.finish(store, world.trained(10))
        world.write_history(store, 30, attempts=2)
        verdict = run(spec(model, 'evaluation.prompts=["the"]'), world.RUN, store)
        objects.append([store.get(layout.verdict(world.RUN, verdict.key, kind)) for kind in ("json", "html")])
        root.rename(tmp_path / uuid.uuid4().hex)
    assert objects[0] == objects[1]


def test_other_settings_are_another_question(store: Store, model: str) -> None:
    world.finish(store, world.trained(20))
    lenient, strict = run(spec(model), world.RUN, store), run(spec(model, "evaluation.max_loss=0.01"), world.RUN, store)
    assert (lenient.word, strict.word) == ("blessed", "not_blessed")
    assert "not below the bound 0.01" in strict.reasons[0]
    assert len(records(store)) == 4
    assert (lenient.number, strict.number) == (1, 2)
    store.put(layout.verdict(world.RUN, strict.key), b"{")  # damaged: it has no number
    assert run(spec(model, "evaluation.max_loss=0.02"), world.RUN, store).number == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "word"),
    [
        ("same", 60, 20, "blessed"),
        ("shorter context", 20, 60, "not_blessed"),
        ("other tokenizer", 60, 20, "blessed"),
        ("other tokenizer", 20, 60, "not_blessed"),
    ],
)
def test_the_champion_is_scored_on_the_same_text(
    store: Store, make_champion: Champion, model: str, ours: int, theirs: int, word: str, kind: str
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "shorter context": {"model": world.shape(context=16)},
        "other tokenizer": {"vocabulary": 280},
    }
    champion = world.trained(theirs, **changes.get(kind, {}))
    make_champion(model, world.CHAMPION, world.finish(store, champion, world.CHAMPION))
    world.finish(store, world.trained(ours))
    verdict = run(spec(model), world.RUN, store)
    assert verdict.word == word
    assert verdict.champion is not None and isinstance(verdict.champion.measured, Measured)
    assert verdict.champion.measured.text_bytes == verdict.metrics["text_bytes"]
    if kind != "other tokenizer":
        assert verdict.champion.measured.tokens == verdict.metrics["tokens"]
    assert "-v1-" in verdict.key
    assert run(spec(model, "evaluation.versus_champion=ignore"), world.RUN, store).word == "blessed"


def test_an_equal_champion_is_not_worse_and_not_better(store: Store, make_champion: Champion, model: str) -> None:
    decoder = world.trained(20)
    make_champion(model, world.CHAMPION, world.finish(store, decoder, world.CHAMPION))
    world.finish(store, decoder)
    assert run(spec(model), world.RUN, store).word == "blessed"
    better = run(spec(model, "evaluation.versus_champion=better"), world.RUN, store)
    assert better.word == "not_blessed"
    assert better.champion is not None and better.champion.measured is not None
    assert better.champion.measured.figures == better.metrics


@pytest.mark.parametrize("fault", ["gone", "damaged"])
def test_an_unscorable_champion_blocks_evaluation_unless_the_spec_ignores_it(
    store: Store, make_champion: Champion, model: str, fault: str
) -> None:
    world.finish(store, world.trained(20))
    export = world.finish(store, world.trained(60), world.CHAMPION)
    make_champion(model, world.CHAMPION, export)
    weights = f"{export}model.safetensors"
    if fault == "gone":
        store.delete(weights)
    else:
        flip(store, weights)
    with pytest.raises(UnscorableChampionError, match=r"model.safetensors.*unscorable_champion: ignore") as error:
        run(spec(model), world.RUN, store)
    assert error.value.exit_code == ExitCode.UNSCORABLE_CHAMPION
    assert not error.value.exit_code.retryable
    assert records(store) == []
    verdict = run(spec(model, "evaluation.unscorable_champion=ignore"), world.RUN, store)
    assert verdict.blessed
    assert any("could not be scored" in reason for reason in verdict.reasons)


def flip(store: Store, key: str) -> None:
    """Change some bytes in the middle of a file."""
    data = bytearray(store.get(key))
    for at in range(len(data) // 2, len(data), 16):
        data[at] ^= 0x40
    store.put(key, bytes(data))


def test_a_damaged_export_is_named_before_and_after_it_was_judged(store: Store, model: str) -> None:
    export = world.finish(store, world.trained(20))
    whole = store.get(f"{export}model.safetensors")
    flip(store, f"{export}model.safetensors")
    for _ in range(2):
        with pytest.raises(DataError, match=r"model.safetensors: bytes 0 to \d+ are not those that were exported"):
            run(spec(model), world.RUN, store)
        assert records(store) == []
    store.put(f"{export}model.safetensors", whole)
    assert run(spec(model), world.RUN, store).blessed
    flip(store, f"{export}tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer.json: bytes"):
        run(spec(model), world.RUN, store)


def test_another_export_under_the_same_name_is_judged_anew(store: Store, model: str) -> None:
    world.finish(store, world.trained(20))
    first = run(spec(model), world.RUN, store)
    world.finish(store, world.trained(40))
    second = run(spec(model), world.RUN, store)
    assert first.state_digest == second.state_digest
    assert first.export_digest != second.export_digest
    assert second.metrics["loss"] < first.metrics["loss"]


def test_a_champion_that_this_store_has_not_registered_is_no_opponent(
    store: Store, make_champion: Champion, model: str, tmp_path: Path
) -> None:
    world.finish(store, world.trained(20))
    other = open_store(f"file://{tmp_path / 'other'}")
    world.write_dataset(other)
    export = world.finish(other, world.trained(5), world.CHAMPION)
    make_champion(model, world.CHAMPION, export, where=other)
    with pytest.raises(
        ForeignVersionError, match=r"no registration of it; .* registered from the store file://.*other"
    ):
        run(spec(model), world.RUN, store)
    trusted = run(spec(model, f"registration.trusted_stores=[{other.url}]"), world.RUN, store)
    assert trusted.champion is not None and trusted.champion.measured is not None


@pytest.mark.parametrize("tag", ["run_id", "state_digest", "export_digest"])
def test_a_champion_whose_tags_were_changed_in_mlflow_is_no_opponent(
    store: Store, make_champion: Champion, model: str, tag: str
) -> None:
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(60), world.CHAMPION))
    connect().set_model_version_tag(model, "1", f"holdfast.{tag}", world.RUN)
    with pytest.raises(ForeignVersionError, match="is foreign"):
        run(spec(model), world.RUN, store)


def test_a_verdict_that_was_changed_blesses_no_champion(store: Store, make_champion: Champion, model: str) -> None:
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(60), world.CHAMPION))
    key = layout.verdict(world.CHAMPION, f"blessed-{model}")
    store.put(key, store.get(key) + b" ")
    with pytest.raises(ForeignVersionError, match="is not the verdict that blessed it"):
        run(spec(model), world.RUN, store)


def test_without_its_alias_the_last_champion_of_this_store_is_the_opponent_all_the_same(
    store: Store, make_champion: Champion, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(60), world.CHAMPION))
    claim = {"version": 1, "replaces": None}
    store.put(record_key(layout.champions(registration_key(model)), 1), json.dumps(claim).encode())
    connect().delete_registered_model_alias(model, "champion")
    verdict = run(spec(model), world.RUN, store)
    assert verdict.word == "not_blessed"
    assert "counts until another one is promoted" in caplog.text


def test_a_store_that_was_moved_has_its_champion_still(
    store: Store, make_champion: Champion, model: str, tmp_path: Path
) -> None:
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(60), world.CHAMPION))
    first = run(spec(model), world.RUN, store)
    (tmp_path / "store").rename(tmp_path / "moved")
    moved_store = open_store(f"file://{tmp_path / 'moved'}")
    assert run(spec(model), world.RUN, moved_store) == first
    strict = run(spec(model, "evaluation.max_loss=100"), world.RUN, moved_store)
    assert strict.champion is not None and strict.champion.measured is not None


def test_a_model_that_became_champion_keeps_the_verdict_that_made_it(
    store: Store, make_champion: Champion, model: str
) -> None:
    export = world.finish(store, world.trained(20))
    first = run(spec(model), world.RUN, store)
    make_champion(model, world.RUN, export)
    assert run(spec(model), world.RUN, store) == first
    fresh = run(spec(model, "evaluation.max_loss=50"), world.RUN, store)
    assert any("is this very run" in reason for reason in fresh.reasons)
    assert fresh.blessed


def test_version_1_of_another_mlflow_is_another_champion(
    store: Store, make_champion: Champion, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_uri, other_uri = os.environ["MLFLOW_TRACKING_URI"], f"sqlite:///{tmp_path / 'elsewhere.db'}"
    empty_mlflow.place(tmp_path, "elsewhere.db")
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(5), world.CHAMPION))
    better = "00000000000000cc"
    make_champion(model, better, world.finish(store, world.trained(60), better), uri=other_uri)
    first = run(spec(model), world.RUN, store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other_uri)
    second = run(spec(model), world.RUN, store)
    assert (first.word, second.word) == ("blessed", "not_blessed")
    assert first.champion is not None and second.champion is not None
    assert (first.champion.version, second.champion.version) == (1, 1)
    assert (first.champion.registry, second.champion.registry) == ("sqlite:///mlflow.db", "sqlite:///elsewhere.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_uri)
    assert run(spec(model), world.RUN, store) == first


def test_a_verdict_that_names_another_champion_than_its_key_is_no_answer(
    store: Store, make_champion: Champion, model: str
) -> None:
    world.finish(store, world.trained(20))
    make_champion(model, world.CHAMPION, world.finish(store, world.trained(60), world.CHAMPION))
    verdict = run(spec(model), world.RUN, store)
    assert verdict.champion is not None and not verdict.blessed
    forged = verdict.champion.model_copy(update={"state_digest": "another"})
    blessed = verdict.model_copy(update={"word": "blessed", "champion": forged})
    store.put(layout.verdict(world.RUN, verdict.key), blessed.dump())
    assert run(spec(model), world.RUN, store).word == "not_blessed"


@pytest.mark.parametrize("masked", [True, False])
def test_a_champion_attends_as_it_was_trained_to(
    store: Store, make_champion: Champion, model: str, tmp_path: Path, masked: bool
) -> None:
    decoder = world.trained(30)
    described = {"spec": {"data": {"document_masks": masked}}}
    store.put(layout.run(world.CHAMPION, "run.json"), json.dumps(described).encode())
    make_champion(model, world.CHAMPION, world.finish(store, decoder, world.CHAMPION))
    world.finish(store, world.trained(20))
    verdict = run(spec(model, f"data.document_masks={str(not masked).lower()}"), world.RUN, store)
    dataset = Dataset.open(store, world.DATASET, tmp_path / "cache")

    def figures(document_masks: bool) -> object:
        rows = dataset.validation(decoder.shape.context, 600)
        return score(decoder, rows, dataset.token_bytes(), document_masks=document_masks)

    assert verdict.champion is not None
    assert verdict.champion.measured == figures(masked) != figures(not masked)


def test_an_accelerator_that_the_spec_does_not_request_is_not_used(
    store: Store, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.finish(store, world.trained(5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # it would be used, but does not exist
    caplog.set_level(logging.INFO, "holdfast")
    assert run(spec(model), world.RUN, store).device == "cpu"
    assert "on the CPU: the spec asks for no accelerator" in caplog.text


def test_without_the_accelerator_the_cpu_scores_and_a_promised_slice_is_missed(
    store: Store, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.finish(store, world.trained(5))
    caplog.set_level(logging.INFO, "holdfast")
    assert run(spec(model, "cluster.accelerator=nvidia"), world.RUN, store).device == "cpu"
    assert "on the CPU: this process sees no cuda device" in caplog.text
    promised = spec(model, "cluster.accelerator=nvidia", "cluster.slice=1g.10gb", "evaluation.max_loss=9")
    with pytest.raises(MissingError, match=r"cluster.slice: 1g.10gb of nvidia is for this step"):
        run(promised, world.RUN, store)


def test_a_pod_takes_what_it_was_given_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("is_available", True), ("device_count", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda there=value: there)
    monkeypatch.setattr(torch.version, "hip", None)
    caplog.set_level(logging.INFO, "holdfast")

    def devices(*overrides: str) -> list[str]:
        spec = parse_spec("name: x\ndata: {sources: [{uri: x}]}", ("cluster.accelerator=nvidia", *overrides))
        return [str(device) for device in scoring_devices(spec.cluster)]

    assert devices() == ["cuda"]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert devices() == ["cpu"]  # the container runtime may expose devices of other pods
    assert "gives this step no accelerator" in caplog.text
    assert devices("cluster.slice=1g.10gb") == ["cuda"]
    assert devices("cluster.steps.evaluate.accelerators=1") == ["cuda"]
    assert devices("cluster.steps.evaluate.accelerators=2") == ["cuda:0", "cuda:1"]
    with pytest.raises(MissingError, match=r"accelerators: 3 of nvidia is for this step, and .* sees 2 cuda devices"):
        devices("cluster.steps.evaluate.accelerators=3")


def test_a_model_of_nan_is_judged_without_samples_and_never_blessed(store: Store, model: str) -> None:
    decoder = world.trained(0)
    with torch.no_grad():
        decoder.model.norm.weight[0] = math.nan
    world.finish(store, decoder)
    verdict = run(spec(model, 'evaluation.prompts=["the"]'), world.RUN, store)
    assert (verdict.word, verdict.samples) == ("not_blessed", ())
    assert "not finite" in verdict.reasons[0]
    repeated = run(spec(model, 'evaluation.prompts=["the"]'), world.RUN, store)
    assert repeated.dump() == verdict.dump()


def test_no_held_out_text_is_an_error_with_a_remedy(store: Store, model: str) -> None:
    world.write_dataset(store, held_out=0)
    world.finish(store, world.trained(0))
    with pytest.raises(DataError, match=r"raise data\.validation_fraction"):
        run(spec(model), world.RUN, store)
    assert records(store) == []


def test_an_unfinished_run_is_reported(store: Store, model: str) -> None:
    with pytest.raises(MissingError, match=f"train run {world.RUN} to its end"):
        run(spec(model), world.RUN, store)
    world.finish(store, world.trained(0))
    store.delete(layout.export(world.RUN, 40, world.STATE, "config.json"))
    with pytest.raises(MissingError, match=r"config.json: is missing; run the spec again"):
        run(spec(model), world.RUN, store)
    store.delete(layout.export_record(layout.export(world.RUN, 40, world.STATE)))
    with pytest.raises(MissingError, match="no exported model there"):
        run(spec(model), world.RUN, store)


def test_a_model_in_s3_is_fetched_and_judged_like_one_in_a_folder(store: Store, s3_url: str, model: str) -> None:
    bucket = open_store(s3_url, deadline=120)
    for target in (store, bucket):
        world.write_dataset(target)
        world.finish(target, world.trained(10))
    local, remote = (run(spec(model), world.RUN, target) for target in (store, bucket))
    assert remote.dump() == local.dump()


def write_task(folder: Path, answer: int = 1) -> str:
    """Write a task file with six questions. Returns its address."""
    rows = [{"question": "the quick", "choices": [" brown", " 你好"], "answer": answer}] * 6
    (folder / "next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "next.yaml").write_text(
        "task: next\ndataset_path: json\ndataset_kwargs: {data_files: {test: next.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return f"{folder}/next.yaml"


def test_a_model_that_does_not_reach_the_bound_of_a_task_is_not_blessed(
    store: Store, model: str, tmp_path: Path
) -> None:
    world.finish(store, world.trained(60))
    task = f"evaluation.tasks=[{{uri: {write_task(tmp_path)}, bound: 0.9, examples: 4}}]"
    settings = spec(model, task, MLFLOW)
    verdict = run(settings, world.RUN, store)
    assert (verdict.word, verdict.metrics["task.next.acc"], verdict.tasks[0].examples) == ("blessed", 1.0, 4)
    assert "Task next: acc 1.0000 reaches 0.9." in verdict.reasons
    assert "Task next" in store.get(layout.verdict(world.RUN, verdict.key, "html")).decode()
    assert run(settings, world.RUN, store) == verdict
    tracker = RunTracker.open(settings, world.RUN, verdict.dataset_id, store)
    assert connect(tracker.uri).get_run(tracker.mlflow_run_id).data.metrics["evaluation/task.next.acc"] == 1.0
    write_task(tmp_path, answer=0)  # the same spec, but the task changed
    reevaluated = run(settings, world.RUN, store)
    assert (reevaluated.word, reevaluated.metrics["task.next.acc"]) == ("not_blessed", 0.0)
    assert reevaluated.reasons[0] == "Task next: acc 0.0000 does not reach 0.9."


@pytest.mark.parametrize("worse", [False, True])
def test_a_task_is_compared_with_the_champion(
    store: Store, make_champion: Champion, model: str, tmp_path: Path, worse: bool
) -> None:
    decoder = world.trained(60)
    make_champion(model, world.CHAMPION, world.finish(store, decoder, world.CHAMPION))
    if worse:
        decoder.model.norm.weight.data.neg_()  # it prefers the least likely token
    world.finish(store, decoder)
    settings = spec(model, f"evaluation.tasks=[{{uri: {write_task(tmp_path)}, champion_tolerance: 0.1}}]")
    verdict = run(settings, world.RUN, store)
    (check,) = (result for result in verdict.checks if result.name == "task.next.acc.versus_champion")
    assert (check.value, check.bound, check.passed) == (0.0, 0.9, False) if worse else (1.0, 0.9, True)
    assert "of the champion" in check.sentence
    assert "Task next, acc" in store.get(layout.verdict(world.RUN, verdict.key, "html")).decode()
