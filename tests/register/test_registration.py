"""Registration: blessed models only, with their whole lineage, exactly once, after any crash."""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from holdfast.checkpoint import list_pins
from holdfast.components.register import NotBlessedError, run
from holdfast.components.register.publish import describe_model, publish
from holdfast.model.exported import read_record
from holdfast.pipelines.cli.entry import app
from holdfast.runtime.environment import tracking_uri
from holdfast.spec import ExitCode, HoldfastError, dump_spec
from holdfast.spec.errors import ChampionChangedError, DataError, ForeignVersionError, MissingError
from holdfast.store import Store, layout, open_store
from holdfast.tracking import champion, connect, promote, registration_key, rollback, versions
from holdfast.tracking.artifacts import whole_text
from tests import empty_mlflow, warm
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.breaking_store import Killed as Dead
from tests.register.conftest import EXPORT, STEP, Finish, FinishIn
from tests.tracking import made

Fields = dict[str, str]
OTHER = "1111222233334444"


def the_champion(store: Store) -> dict[str, object]:
    """The current champion, as a verdict against it names it."""
    current = champion("story", store)
    assert current is not None
    return current.identity


@pytest.mark.slow
def test_a_blessed_model_becomes_the_champion_with_its_lineage(home: Path, store: Store, finish: Finish) -> None:
    finish()
    registration = run(made.spec(), made.RUN_ID, store)
    assert (registration.model, registration.version, registration.alias) == ("story", 1, "champion")
    assert registration.uri == "models:/story/1"
    record = json.loads(store.get(layout.registration(made.RUN_ID, registration_key("story"))))
    assert record["version"] == 1
    current = champion("story", store)
    assert current is not None
    assert (current.version, current.run_id, current.dataset_id) == (1, made.RUN_ID, made.DATASET_ID)
    assert (current.store_url, current.export) == (store.url, EXPORT)
    assert current.metrics == {"loss": 1.25, "bits_per_byte": 0.5}
    assert current.tags["holdfast.checkpoint"] == layout.checkpoint(made.RUN_ID, STEP)
    assert current.tags["holdfast.verdict"] == "settings-none"
    assert current.tags["holdfast.dvc_revisions"] == f'{{"dvc:corpus": "{"c" * 40}"}}'
    assert current.tags["holdfast.sources"] == f'{{"dvc:corpus": "{"b" * 64}"}}'
    assert whole_text(connect(), connect().get_model_version("story", "1").tags["holdfast.spec"]) == dump_spec(
        made.spec()
    )
    assert current.tags["holdfast.spec"] == dump_spec(made.spec())


def test_the_checkpoint_of_a_registered_version_is_pinned_without_an_alias(
    home: Path, store: Store, finish: Finish
) -> None:
    spec = made.spec("registration.promote=false")
    finish(spec=spec)
    run(spec, made.RUN_ID, store)
    (pin,) = list_pins(store, made.RUN_ID)
    assert (pin.step, pin.name) == (STEP, "story-1")
    assert pin.reason == f"registered as models:/story/1 in {tracking_uri()}"


@pytest.mark.slow
def test_a_spec_too_long_for_a_tag_is_whole_in_the_mlflow_run(home: Path, store: Store, finish: Finish) -> None:
    spec = made.spec(f"data.sources={json.dumps([{'uri': f'{number:04d}.txt'} for number in range(300)])}")
    finish(spec=spec)
    registration = run(spec, made.RUN_ID, store)
    current = champion("story", store)
    assert current is not None
    assert current.tags["holdfast.spec"] == dump_spec(spec)
    place = json.loads(connect().get_model_version("story", "1").tags["holdfast.spec"])["artifact"]
    path = connect().download_artifacts(
        registration.mlflow_run_id, place.removeprefix(f"runs:/{registration.mlflow_run_id}/"), str(home)
    )
    assert Path(path).read_text(encoding="utf-8") == dump_spec(spec)


@pytest.mark.slow
def test_registering_twice_changes_nothing(home: Path, store: Store, finish: Finish) -> None:
    finish()
    first = run(made.spec(), made.RUN_ID, store)
    finish(OTHER, verdict={"champion": the_champion(store)})
    assert run(made.spec(), OTHER, store).version == 2
    before = (home / "mlflow.db").read_bytes()
    assert run(made.spec(), made.RUN_ID, store) == first
    assert (home / "mlflow.db").read_bytes() == before
    current = champion("story", store)
    assert current is not None
    assert current.version == 2  # the first version is not champion again


def test_a_version_that_was_deleted_in_mlflow_is_made_again(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    connect().delete_model_version("story", "1")
    assert champion("story", store) is None
    assert run(made.spec(), made.RUN_ID, store).version == 2


def test_a_damaged_export_is_not_registered_and_named_once_it_is(home: Path, store: Store, finish: Finish) -> None:
    finish()
    key = EXPORT + "model.safetensors"
    whole = store.get(key)
    damaged = bytes(byte ^ (at % 5 == 0) for at, byte in enumerate(whole))
    store.put(key, damaged)
    with pytest.raises(DataError, match=r"model.safetensors: bytes 0 to \d+ are not those that were exported"):
        run(made.spec(), made.RUN_ID, store)
    assert versions("story", store) == []
    store.put(key, whole)
    registration = run(made.spec(), made.RUN_ID, store)
    tags = connect().get_model_version("story", "1").tags
    assert (tags["holdfast.export_digest"], tags["holdfast.verdict_digest"]) == (
        registration.export_digest, registration.verdict_digest,
    )  # fmt: skip
    store.put(key, damaged)
    with pytest.raises(DataError, match=r"model.safetensors: bytes 0"):
        run(made.spec(), made.RUN_ID, store)


def forge(**tags: str) -> int:
    """Make a version champion that was never evaluated, with the honest version's tags except some. A user of an MLflow
    without a password can do this.
    """
    client = connect()
    honest = client.get_model_version("story", "1")
    tags_of_holdfast = {f"holdfast.{name}": value for name, value in tags.items()}
    made_up = client.create_model_version("story", honest.source, honest.run_id, {**honest.tags, **tags_of_holdfast})
    client.set_registered_model_alias("story", "champion", made_up.version)
    return int(made_up.version)


@pytest.mark.parametrize("tags", [{"store": "file:///tmp/evil-store"}, {"run_id": "../../etc"}])
def test_a_version_that_this_store_has_not_registered_is_foreign_and_never_used(
    tags: dict[str, str], home: Path, store: Store, finish: Finish, tmp_path: Path
) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    number = forge(**tags)
    with pytest.raises(ForeignVersionError, match=r"is foreign: .* has no registration of it"):
        champion("story", store)
    with pytest.raises(ForeignVersionError):
        promote("story", number, store)
    result = CliRunner().invoke(app, ["models", "list", "--store", store.url])
    assert result.exit_code == 0
    assert "foreign, not used: version 2 of 'story'" in " ".join(result.output.split())
    for name in ("story@champion", f"story/{number}", "story"):
        rollback_result = CliRunner().invoke(
            app, ["models", "generate", name, "x", "--store", store.url], catch_exceptions=True
        )
        assert isinstance(rollback_result.exception, ForeignVersionError)
    finish(OTHER)
    with pytest.raises(ForeignVersionError):
        run(made.spec(), OTHER, store)
    assert promote("story", 1, store).version == 1
    assert champion("story", store).run_id == made.RUN_ID  # type: ignore[union-attr]
    with pytest.raises(MissingError, match="no earlier champion"):
        rollback("story", store)  # a foreign version is not recorded


def test_a_rollback_to_a_version_that_this_store_has_not_registered_is_refused(
    home: Path, store: Store, finish: Finish
) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    number = forge()
    promote("story", 1, store)
    connect().set_model_version_tag("story", "1", "holdfast.replaced_champion", str(number))
    with pytest.raises(ForeignVersionError):
        rollback("story", store)


def test_a_version_with_our_key_and_a_foreign_source_is_not_accepted(
    home: Path, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    create = MlflowClient.create_model_version

    def first_the_stranger(self: MlflowClient, name: str, source: str, *more: object, **named: object) -> object:
        monkeypatch.setattr(MlflowClient, "create_model_version", create)
        create(self, name, "file:///tmp/evil", *more, **named)
        return create(self, name, source, *more, **named)

    monkeypatch.setattr(MlflowClient, "create_model_version", first_the_stranger)
    registration = run(made.spec(), made.RUN_ID, store)
    assert (registration.version, champion("story", store).version) == (2, 2)  # type: ignore[union-attr]
    assert [bool(version.foreign) for version in versions("story", store)] == [True, False]


def test_a_source_that_was_changed_in_mlflow_makes_a_version_foreign(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        database.execute("UPDATE model_versions SET source = 'file:///tmp/evil'")
    with pytest.raises(ForeignVersionError, match=r"its source is file:///tmp/evil"):
        champion("story", store)


def test_a_home_that_was_moved_keeps_its_champion_and_its_registration(
    home: Path, store: Store, finish_in: FinishIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = open_store(f"file://{home / 'store'}")
    finish_in(inside)()
    first = run(made.spec(), made.RUN_ID, inside)
    moved = home.with_name("moved")
    home.rename(moved)
    monkeypatch.setenv("HOLDFAST_HOME", str(moved))
    moved_store = open_store(f"file://{moved / 'store'}")
    assert run(made.spec(), made.RUN_ID, moved_store) == first
    current = champion("story", moved_store)
    assert current is not None
    assert (current.version, current.store_url) == (1, moved_store.url)
    finish_in(moved_store)(OTHER, verdict={"champion": current.identity})
    assert run(made.spec(), OTHER, moved_store).version == 2
    assert rollback("story", moved_store).version == 1


def test_without_promotion_it_is_the_challenger(home: Path, store: Store, finish: Finish) -> None:
    finish()
    registration = run(made.spec("registration.promote=false"), made.RUN_ID, store)
    assert registration.alias == "challenger"
    assert champion("story", store) is None
    assert connect().get_model_version_by_alias("story", "challenger").version == 1
    assert promote("story", 1, store).run_id == made.RUN_ID
    assert champion("story", store) is not None


def test_a_new_champion_remembers_the_former_and_can_be_rolled_back(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER, verdict={"champion": the_champion(store)})
    run(made.spec(), OTHER, store)
    assert [version.run_id for version in versions("story", store)] == [made.RUN_ID, OTHER]
    assert rollback("story", store).version == 1
    current = champion("story", store)
    assert current is not None
    assert current.version == 1
    with pytest.raises(MissingError, match="no earlier champion"):
        rollback("story", store)
    with pytest.raises(MissingError, match="has no version 7"):
        promote("story", 7, store)


def test_a_verdict_that_a_new_champion_has_overtaken_is_refused(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER)  # evaluated while there was no champion
    with pytest.raises(ChampionChangedError, match=r"without a champion, and .* in .*mlflow.db is version 1 now"):
        run(made.spec(), OTHER, store)
    assert ChampionChangedError.exit_code != NotBlessedError.exit_code  # a second evaluation may bless it
    assert len(versions("story", store)) == 1
    assert run(made.spec("registration.promote=false"), OTHER, store).alias == "challenger"


def test_a_challenger_needs_a_verdict_against_the_current_champion(home: Path, store: Store, finish: Finish) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    finish(OTHER)  # blessed while there was no champion
    finish(OTHER, verdict={"word": "not_blessed", "champion": the_champion(store)}, key="settings-v1")
    with pytest.raises(NotBlessedError, match="settings-v1"):
        run(made.spec("registration.promote=false"), OTHER, store)


@pytest.mark.slow
def test_a_verdict_against_version_1_of_another_mlflow_does_not_promote(
    home: Path, store: Store, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    current = the_champion(store)
    finish("3333444455556666")
    empty_mlflow.place(tmp_path, "elsewhere.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    run(made.spec(), "3333444455556666", store)
    finish(OTHER, verdict={"champion": current}, key="here")
    with pytest.raises(
        ChampionChangedError, match=r"mlflow.db, and the champion of story in .*elsewhere.db is version 1 now"
    ):
        run(made.spec(), OTHER, store)
    finish(OTHER, verdict={"champion": the_champion(store)}, key="elsewhere")
    assert run(made.spec(), OTHER, store).verdict == "elsewhere"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert run(made.spec(), OTHER, store).verdict == "here"  # although it is not the newest


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
def test_an_unblessed_or_incomplete_model_is_not_registered(
    result: Fields, verdict: Fields, code: ExitCode, words: str, home: Path, store: Store, finish: Finish
) -> None:
    finish(result=result, verdict=verdict)
    with pytest.raises(HoldfastError, match=words) as error:
        run(made.spec(), made.RUN_ID, store)
    assert error.value.exit_code == code
    assert versions("story", store) == []


def test_a_run_that_is_not_finished_or_not_evaluated_is_refused(home: Path, store: Store, finish: Finish) -> None:
    with pytest.raises(MissingError, match="train it first"):
        run(made.spec(), made.RUN_ID, store)
    finish()
    store.delete(layout.verdict(made.RUN_ID, "settings-none"))
    with pytest.raises(NotBlessedError, match="evaluate the run first"):
        run(made.spec(), made.RUN_ID, store)


def test_the_named_verdict_is_the_one_that_counts(home: Path, store: Store, finish: Finish) -> None:
    finish(key="second", verdict={"word": "not_blessed", "number": 2})
    finish(key="first", verdict={"number": 1})  # later by the time of its object, as in a copied store
    with pytest.raises(NotBlessedError):
        run(made.spec(), made.RUN_ID, store)  # the newest verdict is not blessed
    assert run(made.spec(), made.RUN_ID, store, verdict="first").version == 1


class Killed(BaseException):
    """The process dies here, from the view of the code under test."""


def dying_after(call: Callable[..., object]) -> Callable[..., None]:
    """A call after which the process dies. Death before it is the same as after the previous one."""

    def dying(*arguments: object, **named: object) -> None:
        call(*arguments, **named)
        raise Killed

    return dying


def test_killed_after_each_call_and_repeated_there_is_one_version(
    home: Path, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    for call in (  # each registration gets one call further than the one before
        "create_experiment", "create_run", "log_inputs", "create_registered_model", "create_model_version",
        "set_registered_model_alias",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, call, dying_after(getattr(MlflowClient, call)))
            with pytest.raises(Killed):
                run(made.spec(), made.RUN_ID, store)
    registration = run(made.spec(), made.RUN_ID, store)
    assert registration == run(made.spec(), made.RUN_ID, store)
    assert [version.version for version in versions("story", store)] == [registration.version]
    current = champion("story", store)
    assert current is not None
    assert current.version == registration.version
    client = connect()
    experiment = client.get_experiment_by_name("story")
    assert len(client.search_runs([experiment.experiment_id])) == 1
    [version] = client.search_model_versions("name = 'story'")
    assert version.source == f"{store.url}/{EXPORT}".rstrip("/")


@pytest.mark.slow
def test_killed_while_the_model_is_described_and_repeated_it_is_whole(
    home: Path, store: Store, finish: Finish, tmp_path: Path
) -> None:
    finish()
    described = tmp_path / "described"  # once, by MLflow, which takes longer than all writes to the store
    files = describe_model(described, read_record(store, EXPORT), f"{store.url}/{EXPORT}")

    def describe(folder: Path, *_: object) -> list[Path]:
        shutil.copytree(described, folder)
        return [folder / path.relative_to(described) for path in files]

    def publish_to(where: Store) -> str:
        return publish(connect(), tracking_uri(), "unused", "unused", where, EXPORT, describe=describe)

    export, folder = EXPORT, EXPORT
    weights = {info.key: info.version for info in store.list(layout.exports(made.RUN_ID))}
    counted = BreakingStore(store, kill=False)
    publish_to(counted)
    whole = [info.key for info in store.list(layout.exports(made.RUN_ID))]
    assert {f"{folder}MLmodel", layout.package_record(export)} < set(whole)
    read = len(weights) * 2 + 2  # reads of the weights before the first write
    writes = range(read, counted.operations)
    for at in {*writes[:: max(1, len(writes) // 6)], *writes[-2:]}:
        for key in set(whole) - weights.keys():
            store.delete(key)
        with pytest.raises(Dead):
            publish_to(BreakingStore(store, at, kill=True))
        assert store.stat(layout.package_record(export)) is None
        assert publish_to(store) == f"{store.url}/{folder}".rstrip("/")
        assert [info.key for info in store.list(layout.exports(made.RUN_ID))] == whole
    assert weights.items() <= {info.key: info.version for info in store.list(layout.exports(made.RUN_ID))}.items()
    store.put(f"{folder}serving.py", b"print('changed')")
    publish_to(store)
    assert store.get(f"{folder}serving.py") != b"print('changed')", "code that MLflow runs is written anew"


@pytest.mark.slow
def test_two_concurrent_steps_register_one_version(home: Path, store: Store, finish: Finish, tmp_path: Path) -> None:
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
    [version] = versions("story", store)
    assert version.version == first["version"] == second["version"]


@pytest.mark.slow
def test_weights_in_a_bucket_are_not_sent_through_the_mlflow_server(
    s3_url: str, finish_in: FinishIn, server: str, lasting_server: tuple[Path, str], tmp_path: Path
) -> None:
    store = open_store(s3_url)
    finish_in(store)()
    registration = run(made.spec(), made.RUN_ID, store)
    [version] = connect().search_model_versions("name = 'story'")
    assert version.source == f"{s3_url}/{EXPORT}".rstrip("/")
    model = mlflow.pyfunc.load_model(registration.uri)
    assert len(model.predict({"prompt": ["def"]}, params={"max_tokens": 3})) == 1
    of_the_server = [*tmp_path.rglob("*.safetensors"), *lasting_server[0].rglob("*.safetensors")]
    assert not [path for path in of_the_server if "export-" not in str(path)]


@pytest.mark.slow
def test_killed_while_a_folder_is_sent_to_a_server_and_repeated_there_is_one_version(
    store: Store, finish: Finish, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    with monkeypatch.context() as patch:

        def dying(*_: object, **__: object) -> None:
            raise Killed

        patch.setattr(MlflowClient, "log_artifacts", dying)
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
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.replace("http://", "http://person:hunter2@"))
    assert champion("story", store) is None
    registration = run(made.spec(), made.RUN_ID, store)
    assert registration == run(made.spec(), made.RUN_ID, store)
    assert registration.tracking == server
    finish(OTHER, verdict={"champion": the_champion(store)})
    assert run(made.spec(), OTHER, store).version == 2
    assert rollback("story", store).version == 1
    model = mlflow.pyfunc.load_model(registration.uri)
    assert len(model.predict({"prompt": ["def"]}, params={"max_tokens": 3})) == 1
    texts = [str(version.tags) + str(version.source) for version in connect().search_model_versions("name = 'story'")]
    assert "hunter2" not in "".join(texts)
    record = store.get(layout.registration(made.RUN_ID, registration_key("story")))
    assert b"hunter2" not in record
