"""Registering: blessed only, with its whole lineage, once, whatever dies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from holdfast.components.checkpoint import list_pins
from holdfast.components.register import NotBlessedError, run
from holdfast.components.register.publish import publish
from holdfast.components.runtime.environment import tracking_uri
from holdfast.components.spec import ExitCode, HoldfastError, dump_spec
from holdfast.components.spec.errors import MissingError, OvertakenError
from holdfast.components.store import Store, layout, open_store
from holdfast.components.tracking import champion, connect, promote, registration_key, rollback, versions
from holdfast.components.tracking.lineage import whole_text
from tests import warm
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.breaking_store import Killed as Dead
from tests.register.conftest import STEP, Finish, FinishIn
from tests.tracking import made

OTHER = "1111222233334444"


def the_champion() -> dict[str, object]:
    """The champion of now, as a verdict against it says."""
    found = champion("story")
    assert found is not None
    return found.identity


def test_a_blessed_model_becomes_the_champion_with_its_lineage(home: Path, store: Store, finish: Finish) -> None:
    finish()
    registration = run(made.spec(), made.RUN_ID, store)
    assert (registration.model, registration.version, registration.alias) == ("story", 1, "champion")
    assert registration.uri == "models:/story/1"
    recorded = json.loads(store.get(layout.registration(made.RUN_ID, registration_key("story"))))
    assert recorded["version"] == 1
    found = champion("story")
    assert found is not None
    assert (found.version, found.run_id, found.dataset_id) == (1, made.RUN_ID, made.DATASET_ID)
    assert (found.store_url, found.export) == (store.url, layout.export(made.RUN_ID, STEP))
    assert found.metrics == {"loss": 1.25, "bits_per_byte": 0.5}
    assert found.tags["holdfast.checkpoint"] == layout.checkpoint(made.RUN_ID, STEP)
    assert found.tags["holdfast.verdict"] == "settings-none"
    assert found.tags["holdfast.dvc_revisions"] == f'{{"dvc:corpus": "{"c" * 40}"}}'
    assert found.tags["holdfast.sources"] == f'{{"dvc:corpus": "{"b" * 64}"}}'
    assert whole_text(connect(), found.tags["holdfast.spec"]) == dump_spec(made.spec())


def test_the_checkpoint_of_a_registered_version_is_pinned_whatever_its_alias(
    home: Path, store: Store, finish: Finish
) -> None:
    spec = made.spec("registration.promote=false")
    finish(spec=spec)
    run(spec, made.RUN_ID, store)
    (held,) = list_pins(store, made.RUN_ID)
    assert (held.step, held.name) == (STEP, "story-1")
    assert held.reason == f"registered as models:/story/1 in {tracking_uri()}"


def test_a_spec_too_long_for_a_tag_is_whole_in_the_mlflow_run(home: Path, store: Store, finish: Finish) -> None:
    spec = made.spec(f"data.sources={json.dumps([{'uri': f'{number:04d}.txt'} for number in range(300)])}")
    finish(spec=spec)
    registration = run(spec, made.RUN_ID, store)
    found = champion("story")
    assert found is not None
    place = json.loads(found.tags["holdfast.spec"])["artifact"]
    path = connect().download_artifacts(
        registration.mlflow_run_id, place.removeprefix(f"runs:/{registration.mlflow_run_id}/"), str(home)
    )
    assert Path(path).read_text(encoding="utf-8") == dump_spec(spec)


def test_registering_twice_changes_nothing(home: Path, store: Store, finish: Finish) -> None:
    finish()
    first = run(made.spec(), made.RUN_ID, store)
    finish(OTHER, verdict={"champion": the_champion()})
    assert run(made.spec(), OTHER, store).version == 2
    before = (home / "mlflow.db").read_bytes()
    assert run(made.spec(), made.RUN_ID, store) == first
    assert (home / "mlflow.db").read_bytes() == before
    current = champion("story")
    assert current is not None
    assert current.version == 2  # the first is not champion again


def test_a_version_that_was_deleted_in_mlflow_is_made_again(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    connect().delete_model_version("story", "1")
    assert champion("story") is None
    assert run(made.spec(), made.RUN_ID, store).version == 2


def test_without_promotion_it_is_the_challenger(home: Path, store: Store, finish: Finish) -> None:
    finish()
    registration = run(made.spec("registration.promote=false"), made.RUN_ID, store)
    assert registration.alias == "challenger"
    assert champion("story") is None
    assert connect().get_model_version_by_alias("story", "challenger").version == 1
    assert promote("story", 1).run_id == made.RUN_ID
    assert champion("story") is not None


def test_a_new_champion_remembers_the_former_and_can_be_rolled_back(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER, verdict={"champion": the_champion()})
    run(made.spec(), OTHER, store)
    assert [version.run_id for version in versions("story")] == [made.RUN_ID, OTHER]
    assert rollback("story").version == 1
    current = champion("story")
    assert current is not None
    assert current.version == 1
    with pytest.raises(MissingError, match="no earlier champion"):
        rollback("story")
    with pytest.raises(MissingError, match="has no version 7"):
        promote("story", 7)


def test_a_verdict_that_a_new_champion_has_overtaken_is_refused(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER)  # judged while there was no champion
    with pytest.raises(OvertakenError, match=r"without a champion, and .* in .*mlflow.db is version 1 now"):
        run(made.spec(), OTHER, store)
    assert OvertakenError.exit_code != NotBlessedError.exit_code  # judged again it may well be blessed
    assert len(versions("story")) == 1
    assert run(made.spec("registration.promote=false"), OTHER, store).alias == "challenger"


def test_a_challenger_goes_by_the_verdict_against_the_champion_of_now(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER)  # blessed while there was no champion
    finish(OTHER, verdict={"word": "not_blessed", "champion": the_champion()}, key="settings-v1")
    with pytest.raises(NotBlessedError, match="settings-v1"):
        run(made.spec("registration.promote=false"), OTHER, store)


def test_a_verdict_against_version_1_of_another_mlflow_crowns_nobody_here(
    home: Path, store: Store, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    here = the_champion()
    finish("3333444455556666")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    run(made.spec(), "3333444455556666", store)
    finish(OTHER, verdict={"champion": here}, key="here")
    with pytest.raises(
        OvertakenError, match=r"mlflow.db, and the champion of story in .*elsewhere.db is version 1 now"
    ):
        run(made.spec(), OTHER, store)
    finish(OTHER, verdict={"champion": the_champion()}, key="elsewhere")
    assert run(made.spec(), OTHER, store).verdict == "elsewhere"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert run(made.spec(), OTHER, store).verdict == "here"  # though it is not the newest


@pytest.mark.parametrize(
    ("result", "verdict", "code", "words"),
    [
        ({}, {"word": "not_blessed"}, ExitCode.NOT_BLESSED, "Perplexity 3.5"),
        ({}, {"state_digest": "another"}, ExitCode.NOT_BLESSED, "about other weights"),
        ({}, {"settings": {}}, ExitCode.NOT_BLESSED, "no verdict under"),
        ({"checkpoint": "runs/x/gone.json"}, {}, ExitCode.NOT_FOUND, "gone.json"),
        ({"export": "runs/x/export/gone/"}, {}, ExitCode.NOT_FOUND, "no exported model"),
        ({"dataset_id": "0000000000000000"}, {}, ExitCode.NOT_FOUND, "0000000000000000"),
        ({"state_digest": ""}, {}, ExitCode.NOT_FOUND, "state_digest missing"),
    ],
)
def test_what_is_not_blessed_or_not_whole_is_not_registered(
    result: dict, verdict: dict, code: ExitCode, words: str, home: Path, store: Store, finish: Finish
) -> None:
    finish(result=result, verdict=verdict)
    with pytest.raises(HoldfastError, match=words) as raised:
        run(made.spec(), made.RUN_ID, store)
    assert raised.value.exit_code == code
    assert versions("story") == []


def test_a_run_that_is_not_finished_or_not_evaluated_is_refused(home: Path, store: Store, finish: Finish) -> None:
    with pytest.raises(MissingError, match="train it first"):
        run(made.spec(), made.RUN_ID, store)
    finish()
    store.delete(layout.verdict(made.RUN_ID, "settings-none"))
    with pytest.raises(NotBlessedError, match="evaluate the run first"):
        run(made.spec(), made.RUN_ID, store)


def test_the_named_verdict_is_the_one_that_counts(home: Path, store: Store, finish: Finish) -> None:
    finish(key="first")
    finish(key="second", verdict={"word": "not_blessed"})
    with pytest.raises(NotBlessedError):
        run(made.spec(), made.RUN_ID, store)  # the newest says no
    assert run(made.spec(), made.RUN_ID, store, verdict="first").version == 1


class Killed(BaseException):
    """The process ends here, as far as the code under test can tell."""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "call",
    [
        "create_experiment",
        "create_run",
        "log_inputs",
        "create_registered_model",
        "create_model_version",
        "set_registered_model_alias",
    ],
)
def test_killed_at_any_call_and_repeated_there_is_one_version(
    call: str, moment: str, home: Path, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    original = getattr(MlflowClient, call)

    def dying(*arguments: object, **named: object) -> None:
        if moment == "after":
            original(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, call, dying)
        with pytest.raises(Killed):
            run(made.spec(), made.RUN_ID, store)
    registration = run(made.spec(), made.RUN_ID, store)
    assert registration == run(made.spec(), made.RUN_ID, store)
    assert [version.version for version in versions("story")] == [registration.version]
    current = champion("story")
    assert current is not None
    assert current.version == registration.version
    client = connect()
    experiment = client.get_experiment_by_name("story")
    assert len(client.search_runs([experiment.experiment_id])) == 1
    [version] = client.search_model_versions("name = 'story'")
    assert version.source == f"{store.url}/runs/{made.RUN_ID}/export"


def test_killed_while_the_model_is_described_and_repeated_it_is_whole(home: Path, store: Store, finish: Finish) -> None:
    finish()
    export, folder = layout.export(made.RUN_ID, STEP), layout.run(made.RUN_ID, "export/")
    weights = {info.key: info.version for info in store.list(export)}
    counted = BreakingStore(store, kill=False)
    publish(connect(), tracking_uri(), "unused", "unused", counted, export)
    whole = [info.key for info in store.list(folder)]
    assert f"{folder}MLmodel" in whole
    for at in range(0, counted.operations, 3):
        for key in set(whole) - weights.keys():
            store.delete(key)
        with pytest.raises(Dead):
            publish(connect(), tracking_uri(), "unused", "unused", BreakingStore(store, at, kill=True), export)
        assert store.stat(f"{folder}MLmodel") is None
        assert publish(connect(), tracking_uri(), "", "", store, export) == f"{store.url}/{folder}".rstrip("/")
        assert [info.key for info in store.list(folder)] == whole
    assert {info.key: info.version for info in store.list(export)} == weights, "the weights are not touched"


def test_two_steps_at_once_register_one_version(home: Path, store: Store, finish: Finish, tmp_path: Path) -> None:
    finish()
    spec = tmp_path / "spec.yaml"
    spec.write_text(dump_spec(made.spec()), encoding="utf-8")
    command = [sys.executable, "-m", "holdfast.components.register", "--spec", str(spec), "--run-id", made.RUN_ID]
    steps = [
        warm.popen([*command, "--store", store.url, "--output", str(tmp_path / f"{number}.json")], os.environ)
        for number in range(2)
    ]
    assert [step.wait(timeout=300) for step in steps] == [0, 0]
    [first, second] = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    [version] = versions("story")
    assert version.version == first["version"] == second["version"]


@pytest.mark.slow
def test_no_weights_go_through_an_mlflow_server_when_the_store_is_a_bucket(
    s3_url: str, finish_in: FinishIn, server: str, lasting_server: tuple[Path, str], tmp_path: Path
) -> None:
    store = open_store(s3_url)
    finish_in(store)()
    registration = run(made.spec(), made.RUN_ID, store)
    [version] = connect().search_model_versions("name = 'story'")
    assert version.source == f"{s3_url}/runs/{made.RUN_ID}/export"
    model = mlflow.pyfunc.load_model(registration.uri)
    assert len(model.predict({"prompt": ["def"]}, params={"max_tokens": 3})) == 1
    of_the_server = [*tmp_path.rglob("*.safetensors"), *lasting_server[0].rglob("*.safetensors")]
    assert not [path for path in of_the_server if "export-" not in str(path)]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["log_artifacts", "log_artifact"])
def test_killed_while_a_folder_is_sent_to_a_server_and_repeated_there_is_one_version(
    call: str, store: Store, finish: Finish, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    with monkeypatch.context() as patched:

        def dying(*_: object, **__: object) -> None:
            raise Killed

        patched.setattr(MlflowClient, call, dying)
        with pytest.raises(Killed):
            run(made.spec(), made.RUN_ID, store)
    registration = run(made.spec(), made.RUN_ID, store)
    assert registration.version == 1
    model = mlflow.pyfunc.load_model(registration.uri)
    assert len(model.predict({"prompt": ["def"]}, params={"max_tokens": 3})) == 1


@pytest.mark.slow
def test_through_a_server_it_is_the_same(
    store: Store, finish: Finish, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.replace("http://", "http://somebody:hunter2@"))
    assert champion("story") is None
    registration = run(made.spec(), made.RUN_ID, store)
    assert registration == run(made.spec(), made.RUN_ID, store)
    assert registration.tracking == server
    finish(OTHER, verdict={"champion": the_champion()})
    assert run(made.spec(), OTHER, store).version == 2
    assert rollback("story").version == 1
    model = mlflow.pyfunc.load_model(registration.uri)
    assert len(model.predict({"prompt": ["def"]}, params={"max_tokens": 3})) == 1
    shown = [str(one.tags) + str(one.source) for one in connect().search_model_versions("name = 'story'")]
    assert "hunter2" not in "".join(shown)
    recorded = store.get(layout.registration(made.RUN_ID, registration_key("story")))
    assert b"hunter2" not in recorded


def test_the_step_ends_with_the_code_of_the_table(home: Path, store: Store, finish: Finish, tmp_path: Path) -> None:
    finish(verdict={"word": "not_blessed"})
    spec = tmp_path / "spec.yaml"
    spec.write_text(dump_spec(made.spec()), encoding="utf-8")
    command = [sys.executable, "-m", "holdfast.components.register", "--spec", str(spec), "--run-id", made.RUN_ID]
    ended = warm.run([*command, "--store", store.url], os.environ)
    assert ended.returncode == ExitCode.NOT_BLESSED
    assert "Perplexity 3.5" in ended.stderr
    assert "Traceback" not in ended.stderr
