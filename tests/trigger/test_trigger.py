"""A retraining is due when one of its inputs changed, and never when it would produce the same model."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.components.evaluate import run as evaluate
from holdfast.components.trigger import step
from holdfast.spec import Spec, load_spec, run_id
from holdfast.spec.errors import ForeignVersionError, MissingError
from holdfast.spec.identity import current_versions
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.tracking import Champion, connect
from holdfast.tracking import champion as current_champion
from tests import warm
from tests.trigger.conftest import Ask
from tests.whole.small import environment, holdfast, write_spec

QUIET = ("schedule.on_new_data=false", "schedule.on_changed_spec=false")


def add_foreign_text(world: Path, documents: int = 40) -> None:
    """Text of a kind that the champion has never seen."""
    letters = random.Random(0)
    for number in range(documents):
        text = "".join(letters.choice("qzxjkvwQZXJKVW0123456789#%&") for _ in range(600))
        (world / f"corpus/foreign-{number:03d}.txt").write_text(text)


def names(decision: object) -> list[str]:
    return [condition.name for condition in decision.conditions if condition.due]  # type: ignore[attr-defined]


def test_nothing_is_due_without_a_change_under_any_conditions(ask: Ask) -> None:
    month = time.time() + 30 * 24 * 3600
    for decision in (ask(), ask("schedule.max_age_hours=1", "schedule.max_decay=0", now=month)):
        assert (decision.word, decision.conditions[0].name) == ("not_due", "same_model")
        assert "Nothing changed" in decision.reason
        assert decision.run_id == decision.champion_run_id


def test_a_file_that_was_added_makes_one_due_and_its_removal_takes_that_back(ask: Ask, world: Path) -> None:
    (world / "corpus/new.txt").write_text("a story that is new, about the sea and a ship")
    decision = ask()
    assert (decision.word, names(decision)) == ("due", ["new_data"])
    assert decision.dataset_id in decision.reason
    assert decision.dataset_id != decision.champion_dataset_id
    (world / "corpus/new.txt").unlink()
    assert ask().word == "not_due"


def test_new_data_alone_is_not_enough_where_it_is_switched_off(ask: Ask, world: Path) -> None:
    (world / "corpus/new.txt").write_text("a story that is new")
    decision = ask(*QUIET)
    assert decision.word == "not_due"
    assert "no condition" in decision.reason


def test_a_spec_that_would_give_another_model_makes_one_due(ask: Ask) -> None:
    changed = ask("training.steps=11")
    assert names(changed) == ["changed_spec"]
    assert changed.reason.startswith("Of the champion's data the spec would make run ")
    assert ask("training.steps=11", "schedule.on_changed_spec=false").word == "not_due"
    assert ask("training.log_every=2", "evaluation.sample_tokens=9").word == "not_due"  # the same model


def test_another_version_of_holdfast_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(kind: str, **training: int) -> Spec:
        return Spec.model_validate(
            {"name": "a", "data": {"kind": kind, "sources": [{"uri": "x"}]}, "training": training}
        )

    then = current_versions()
    arithmetic = f"Holdfast's arithmetic (version 99, then {then.data_plane})"
    generator = f"Holdfast's generator of answers (version 98, then {then.generator})"
    former = {kind: step._Former(_champion(run_id(of(kind), "d")), "", then) for kind in ("text", "prompts")}
    assert step._cause(of("text", steps=7), former["text"], "") == "the spec"
    monkeypatch.setattr("holdfast.spec.identity.GENERATOR_VERSION", 98)
    assert step._cause(of("text", steps=7), former["text"], "") == "the spec"  # it generates no answers
    assert step._cause(of("prompts"), former["prompts"], "") == generator
    monkeypatch.setattr("holdfast.spec.identity.DATA_PLANE_VERSION", 99)
    assert step._cause(of("text"), former["text"], "") == arithmetic
    assert step._cause(of("prompts"), former["prompts"], "") == f"{arithmetic} and {generator}"
    assert step._cause(of("prompts", steps=7), former["prompts"], "") == f"the spec and {arithmetic} and {generator}"


def _champion(run: str) -> Champion:
    return Champion("", "a", 1, run, "", "", "", "", "d", {}, {}, 0.0)


def test_a_champion_whose_tags_were_changed_in_mlflow_decides_nothing(ask: Ask, store: Store) -> None:
    """A person who may write to MLflow names no champion that this store did not register."""
    version = str(current_champion("small", store).version)  # type: ignore[union-attr]
    tag = "holdfast.export_digest"
    before = connect().get_model_version("small", version).tags[tag]
    connect().set_model_version_tag("small", version, tag, "0" * len(before))
    try:
        with pytest.raises(ForeignVersionError, match="is foreign"):
            ask("training.steps=11")
    finally:
        connect().set_model_version_tag("small", version, tag, before)
    assert ask("training.steps=11").word == "due"


def test_age_counts_only_once_something_changed(ask: Ask, world: Path, store: Store) -> None:
    (world / "corpus/new.txt").write_text("a story that is new")
    day = 24 * 3600.0
    born = current_champion("small", store).created  # type: ignore[union-attr]
    young = ask(*QUIET, "schedule.max_age_hours=48", now=born + day)
    assert (young.word, young.champion_age_hours) == ("not_due", 24.0)
    old = ask(*QUIET, "schedule.max_age_hours=48", now=born + 2 * day)
    assert (old.word, names(old)) == ("due", ["age"])
    assert "48.0 hours old" in old.reason


def test_a_champion_that_became_bad_on_fresh_text_makes_one_due(ask: Ask, world: Path, store: Store) -> None:
    add_foreign_text(world)
    before = [info.key for info in store.list("datasets/") if info.key.endswith("dataset.json")]
    decision = ask(*QUIET, "schedule.max_decay=0.05")
    assert (decision.word, names(decision)) == ("due", ["decay"])
    assert decision.decay is not None
    assert decision.decay.share > 0.05
    assert decision.decay.blessed_with == current_champion("small", store).metrics["bits_per_byte"]  # type: ignore[union-attr]
    after = [info.key for info in store.list("datasets/") if info.key.endswith("dataset.json")]
    assert after == before  # data that was tokenized only for the measurement is deleted
    generous = ask(*QUIET, "schedule.max_decay=1000")
    assert (generous.word, generous.decay) == ("not_due", decision.decay)


def test_decay_is_measured_once_and_not_at_all_when_something_cheaper_decides(
    ask: Ask, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_foreign_text(world, 20)
    first = ask(*QUIET, "schedule.max_decay=0.05")
    assert first.decay is not None

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(step, "prepare", never)
    assert ask(*QUIET, "schedule.max_decay=0.05").decay == first.decay
    assert ask("schedule.max_decay=0.06").decay is None


def test_a_champion_without_files_cannot_decay_and_the_reason_names_them(
    ask: Ask, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_foreign_text(world, 10)

    def gone(*_: object) -> None:
        raise MissingError("s3://bucket/export/config.json: does not exist")

    monkeypatch.setattr("holdfast.scoring.models.score_champion", gone)
    decision = ask(*QUIET, "schedule.max_decay=0.05")
    assert decision.word == "not_due"
    assert "does not exist" in decision.reason


def test_without_a_champion_the_first_training_is_due(ask: Ask) -> None:
    decision = ask("name=missing")
    assert (decision.word, names(decision), decision.champion_version) == ("due", ["no_champion"], None)


def test_a_run_that_was_not_blessed_is_not_tried_again(ask: Ask, world: Path, store: Store) -> None:
    strict = ("training.steps=12", "evaluation.max_perplexity=1.0001")
    due = ask(*strict)
    assert due.word == "due"
    trained = read_json_object(store, layout.result(due.champion_run_id))  # a training would end with such a result
    store.put(layout.result(due.run_id), json.dumps({**trained, "run_id": due.run_id}).encode())
    assert evaluate(load_spec(world / "spec.yaml", strict), due.run_id, store).word == "not_blessed"
    decision = ask(*strict)
    assert (decision.word, decision.conditions[0].name) == ("not_due", "already_answered")
    assert "not blessed" in decision.reason
    assert ask("training.steps=12").word == "due"  # it was not evaluated with other limits


def test_a_run_that_is_registered_and_not_champion_was_put_there_by_people(ask: Ask, store: Store) -> None:
    from holdfast.tracking import promote

    first = current_champion("small", store)
    assert first is not None
    record = layout.registration(ask("training.steps=14").run_id, step.registration_key("small"))
    store.put(record, json.dumps({"model": "small", "version": 9}).encode())
    decision = ask("training.steps=14")
    assert (decision.word, decision.conditions[0].name) == ("not_due", "already_answered")
    assert "version 9" in decision.reason
    assert promote("small", first.version, store) == first


def test_every_answer_is_recorded_once_for_each_question(ask: Ask, store: Store) -> None:
    decision, repeated = ask("training.steps=13"), ask("training.steps=13", now=1e9)
    assert decision.key == repeated.key
    record = json.loads(store.get(layout.trigger("small", decision.key)))
    assert (record["word"], record["decided"]) == ("due", 1e9)


def test_another_source_is_another_dataset_and_the_same_bytes_elsewhere_are_not(ask: Ask, world: Path) -> None:
    (world / "corpus").rename(world / "moved")
    assert ask("data.sources=[{uri: moved/*.txt}]").word == "not_due"
    write_spec(world, data={"sources": [{"uri": "moved/00*.txt"}]})
    assert names(ask()) == ["new_data"]


def test_the_step_and_the_command_make_the_same_decision(world: Path, champion: Path) -> None:
    home = {"HOLDFAST_HOME": str(champion / "home")}
    result = holdfast(world, "spec.yaml", command="trigger", **home)
    assert (result.returncode, result.stdout.partition(":")[0]) == (0, "not due"), result.stderr
    assert holdfast(world, "spec.yaml", "--exit-code", command="trigger", **home).returncode == 4
    due = holdfast(world, "spec.yaml", "--json", "--exit-code", "--set", "training.steps=15", command="trigger", **home)
    assert (due.returncode, json.loads(due.stdout)["word"]) == (0, "due")
    step_result = warm.run(
        [sys.executable, "-m", "holdfast.components.trigger", "--spec=spec.yaml", '--overrides=["training.steps=15"]',
         "--outputs=outputs"],
        environment(champion / "home"), world,
    )  # fmt: skip
    assert step_result.returncode == 0, step_result.stderr
    step_decision = json.loads(step_result.stdout)
    command_decision = json.loads(due.stdout)
    assert {**step_decision, "decided": 0, "champion_age_hours": 0} == {
        **command_decision,
        "decided": 0,
        "champion_age_hours": 0,
    }
    assert (world / "outputs/word").read_text() == "due"
    assert (world / "outputs/reason").read_text() == step_decision["reason"]


@pytest.mark.slow
def test_asking_when_nothing_changed_is_quick(world: Path, champion: Path) -> None:
    home = environment(champion / "home")
    command = [sys.executable, "-X", "importtime", "-m", "holdfast.components.trigger", "--spec=spec.yaml"]
    process = subprocess.run(command, cwd=world, env=home, capture_output=True, text=True, check=True)
    imported = {
        line.rsplit("|", 1)[1].strip() for line in process.stderr.splitlines() if line.startswith("import time:")
    }
    assert "mlflow" in imported  # its import takes most of the time and includes pandas
    assert not imported & {"torch", "tokenizers", "dvc", "kfp", "transformers"}
