"""Evaluation and registration of what a script exported: by a command, by functions, and against a champion."""

import importlib
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from holdfast.code import resolve
from holdfast.components.evaluate import run as evaluate
from holdfast.components.evaluate.checks import checks, decide
from holdfast.components.evaluate.step import _ExportScorer
from holdfast.components.register import NotBlessedError
from holdfast.components.register import run as register
from holdfast.components.trigger.step import run as decide_retraining
from holdfast.model.exported import read_record
from holdfast.model.verified import ExportRecord
from holdfast.pipelines.backends.kubeflow.steps import build
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.runner import plan
from holdfast.pipelines.table import SCHEDULED_START, edges_of, steps_from
from holdfast.pipelines.training import training
from holdfast.pipelines.view.catalog import find_run
from holdfast.pipelines.view.report import print_run
from holdfast.scoring import own, settings_key
from holdfast.scoring.own import run_command
from holdfast.scoring.verdict import Opponent, OwnFigures
from holdfast.spec.errors import DataError, MissingError, SpecError, UnscorableChampionError, UserCodeError
from holdfast.spec.operations import Evaluation
from holdfast.steps import STEPS
from holdfast.store import Store, layout, open_store
from holdfast.tracking import champion
from tests.model.tiny_model import END, tokenizer_json
from tests.script.dag import FILES, trained, write_spec
from tests.tracking.conftest import bare_home, home

__all__ = ["bare_home", "home"]

SIZE = "[{name: size, at_least: 1}]"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


def scored(metrics: str = SIZE, scale: str = "1", more: str = "") -> str:
    return f"evaluation: {{command: [python, score.py, '{scale}'], metrics: {metrics}{more}}}\n"


def test_a_command_scores_the_export_and_the_model_is_registered_with_its_lineage(
    home: Path,
    store: Store,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    spec, result = trained(write_spec(tmp_path / "code", scored()), store)
    verdict = evaluate(spec, result.run_id, store)
    assert (verdict.word, verdict.metrics) == ("blessed", {"metric.size": 4.0, "metric.parts": 1.0})
    assert "scoring ['model.safetensors']" in caplog.text  # nothing but the verified files
    assert evaluate(spec, result.run_id, store) == verdict
    page = store.get(layout.verdict(result.run_id, verdict.key, "html")).decode()
    assert "Metric size: 4.0000 is at least 1." in page
    assert str(spec.code) in page
    assert "Tokenizer" not in page
    registration = register(spec, result.run_id, store)
    assert (registration.dataset_id, registration.alias) == ("", "champion")
    assert registration.tags["holdfast.code"] == spec.code
    assert register(spec, result.run_id, store) == registration
    record = find_run(store, result.run_id)
    print_run(record, store)
    assert "size 4" in capfd.readouterr().out
    assert (record.state, record.is_evaluated) == ("registered", True)


def test_a_bound_that_is_not_met_does_not_bless(home: Path, store: Store, tmp_path: Path) -> None:
    spec, result = trained(write_spec(tmp_path / "code", scored("[{name: size, at_least: 5}]")), store)
    verdict = evaluate(spec, result.run_id, store)
    assert (verdict.word, verdict.reasons[0]) == ("not_blessed", "Metric size: 4.0000 is not at least 5.")
    with pytest.raises(NotBlessedError):
        register(spec, result.run_id, store)


@pytest.mark.slow
def test_the_champion_is_scored_by_the_same_command(home: Path, store: Store, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "code", scored(SIZE))
    registered(store, path)
    path.write_text(path.read_text().replace(SIZE, "[{name: size, versus_champion: better}]").replace("'1'", "'2'"))
    spec, result = trained(path, store, "second", weight=3.0)
    verdict = evaluate(spec, result.run_id, store)
    assert verdict.champion is not None
    assert verdict.champion.measured == OwnFigures(own={"size": 8.0, "parts": 1.0})
    assert verdict.reasons == ("Metric size: 18.0000 against 8.0000 of the champion scored version 1: better.",)
    assert evaluate(spec, result.run_id, store) == verdict  # the champion is read back as it was written
    assert "8.0000" in store.get(layout.verdict(result.run_id, verdict.key, "html")).decode()
    assert register(spec, result.run_id, store).version == 2


CHAMPION = {"registry": "r", "model": "m", "version": 1, "run_id": "r", "state_digest": "s", "note": "n"}


@pytest.mark.parametrize(
    ("metric", "values", "passed"),
    [
        ({"at_least": 4}, {"size": 4.0}, True),
        ({"at_most": 3}, {"size": 4.0}, False),
        ({"versus_champion": "better"}, {"size": 8.0}, False),
        ({"versus_champion": "not_worse", "tolerance": 4}, {"size": 4.0}, True),
        ({"versus_champion": "not_worse", "tolerance": 3.9}, {"size": 4.0}, False),
        ({}, {"size": math.nan}, False),
        ({}, {"size": 4.0, "other": math.inf}, False),
        ({}, {"size": 4.0, "other": 1.0}, True),
    ],
)
def test_the_conditions_of_a_metric(metric: dict[str, object], values: dict[str, float], passed: bool) -> None:
    settings = Evaluation.model_validate({"metrics": [{"name": "size", **metric}]})
    opponent = Opponent.model_validate({**CHAMPION, "measured": {"own": {"size": 8.0}}})
    assert decide(checks(settings, OwnFigures(own=values), opponent))[0] == ("blessed" if passed else "not_blessed")


def test_a_champion_is_not_scored_without_a_comparison(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path / "code", scored()))
    opponent, _ = _ExportScorer(spec).score_champion(None)  # type: ignore[arg-type]
    assert opponent is None
    assert (
        decide(checks(spec.evaluation, OwnFigures(own={"size": 1.0}), Opponent(**CHAMPION, measured=None)))[0]
        == "blessed"
    )


def test_a_champion_that_the_command_cannot_score_is_refused_or_ignored(
    home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(folder: Path) -> None:
        (folder / "notes.txt").write_text("no weights")

    path = write_spec(tmp_path / "code", "evaluation: {command: [python, always.py]}\n", **{"always.py": ALWAYS})
    registered(store, path, export=other)
    text = path.read_text()
    versus = "[{name: size, versus_champion: better}]"
    path.write_text(text.replace("evaluation: {command: [python, always.py]}\n", scored(versus)))
    spec, result = trained(path, store, "second")
    monkeypatch.setenv("SOME_TOKEN", "model.safetensors")  # a secret that is in the error
    with pytest.raises(UnscorableChampionError, match=r"(?s)score\.py 1: ended with code 1"):
        evaluate(spec, result.run_id, store)
    path.write_text(path.read_text().replace(versus, f"{versus}, unscorable_champion: ignore"))
    verdict = evaluate(load_spec(path), result.run_id, store)
    assert verdict.word == "blessed"
    assert "could not be scored" in " ".join(verdict.reasons)
    for kind in ("json", "html"):
        assert b"No such file or directory: " in store.get(layout.verdict(result.run_id, verdict.key, kind))
        assert b"model.safetensors" not in store.get(layout.verdict(result.run_id, verdict.key, kind))


ALWAYS = """
import os
from pathlib import Path
Path(os.environ["HOLDFAST_METRICS"]).write_text('{"one": 1}')
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", r"wrote no file HOLDFAST_METRICS"),
        ("write('[1]')", r"it is not a JSON object.*write a JSON object of names and numbers"),
        ("write('{}')", r"wrote 0 metrics"),
        ('write(\'{"size": "big"}\')', r"wrote size = 'big'; write a number"),
        ("write('{\"size\": true}')", r"wrote size = True; write a number"),
        ("write('{\"a\\\\nb\": 1}')", r"wrote the metric .*name it with letters"),
        ("print('so far'); raise SystemExit(3)", r"ended with code 3; the end of its output:\s+so far"),
    ],
)
def test_what_a_command_does_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    score = f"import os\nfrom pathlib import Path\nwrite = Path(os.environ['HOLDFAST_METRICS']).write_text\n{body}\n"
    (tmp_path / "score.py").write_text(score)
    monkeypatch.setattr(resolve, "_entered", [tmp_path])
    with pytest.raises(UserCodeError, match=f"(?s){message}"):
        run_command(["python", "score.py"], tmp_path, 10)


def test_a_command_that_takes_too_long_is_killed_with_what_it_started_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    monkeypatch.setattr(own, "DRAIN_SECONDS", 2.0)
    monkeypatch.setattr(resolve, "_entered", [tmp_path])
    began = time.monotonic()
    with pytest.raises(UserCodeError, match=r"was killed after evaluation.timeout_minutes = 0.02.*output:\s+begun"):
        run_command(["sh", "-c", "echo begun; sleep 600 & echo $$ > pid; wait"], tmp_path, 0.02)
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert "still has its output open" not in caplog.text  # the process that it started is dead, too


def test_the_time_limit_is_for_commands_and_in_no_key(home: Path, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "code", scored("[{name: size}]"))
    spec, other = load_spec(path), load_spec(path, ["evaluation.timeout_minutes=5"])
    assert settings_key(spec) == settings_key(other)
    with pytest.raises(SpecError, match=r"evaluation.timeout_minutes: is not used without evaluation.command"):
        load_spec(path, ["evaluation.command=[]", "evaluation.metrics=[]", "evaluation.timeout_minutes=5"])


def test_a_command_without_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_entered", [])
    with pytest.raises(DataError, match="no code was loaded"):
        run_command(["touch", str(tmp_path / "ran")], tmp_path, 10)
    assert not (tmp_path / "ran").exists()


def test_output_of_a_command_has_no_private_key_and_processes_that_it_leaves_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    body = "\n".join(["A" * 64] * 3)
    (tmp_path / "key").write_text(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\nshown\n")
    monkeypatch.setattr(resolve, "_entered", [tmp_path])
    monkeypatch.setattr(own, "DRAIN_SECONDS", 0.2)
    command = "cat key; sleep 600 & echo $! > left; echo '{\"size\": 1}' > $HOLDFAST_METRICS"
    assert run_command(["sh", "-c", command], tmp_path, 10) == {"size": 1.0}
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)  # fails if the command was waited for
    assert "shown" in caplog.text
    assert "AAAA" not in caplog.text
    assert "still has its output open" in caplog.text


def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_entered", [tmp_path])
    with pytest.raises(
        UserCodeError, match=r"no-such-program x: cannot be started: No such file.*program of the image"
    ):
        run_command(["no-such-program", "x"], tmp_path, 10)


def test_a_metric_that_the_command_did_not_write_is_named(home: Path, store: Store, tmp_path: Path) -> None:
    spec, result = trained(write_spec(tmp_path / "code", scored("[{name: sise}]")), store)
    with pytest.raises(UserCodeError, match=r"wrote no metric 'sise'; it wrote parts, size"):
        evaluate(spec, result.run_id, store)
    assert not list(store.list(layout.run(result.run_id, "evaluations/")))


def test_functions_score_the_model_that_load_returns(home: Path, store: Store, tmp_path: Path) -> None:
    text = (
        "evaluation:\n  load: mine.py:load\n"
        "  metrics: ['mine.py:size', {use: 'mine.py:size', name: large, scale: 10, at_least: 30}]\n"
    )
    spec, result = trained(write_spec(tmp_path / "code", text), store)
    verdict = evaluate(spec, result.run_id, store)
    assert (verdict.word, verdict.metrics) == ("blessed", {"metric.size": 4.0, "metric.large": 40.0})


def test_a_verdict_belongs_to_its_code_arguments_and_bounds(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    keys = [
        settings_key(load_spec(write_spec(folder, scored()))),
        settings_key(load_spec(write_spec(folder, scored()))),
    ]
    assert keys[0] == keys[1]
    changed = {"score.py": "# another comment\n"}
    for text, files in ((scored(scale="2"), {}), (scored("[{name: size, at_least: 2}]"), {}), (scored(), changed)):
        keys.append(settings_key(load_spec(write_spec(folder, text, **files))))
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "evaluation: {command: [python, gone.py]}\n",
            r"evaluation\.command: names a file that does not exist: .*gone\.py",
        ),
        ("evaluation: {command: [python, ../score.py]}\n", r"is not in the folder of train\.script"),
        ("evaluation: {metrics: [{name: size}]}\n", r"evaluation\.metrics\.0\.name: .*is written by no command"),
        ("evaluation: {metrics: [{at_least: 1}]}\n", r"has neither use nor name"),
        ("evaluation: {metrics: ['mine.py:size']}\n", r"needs a model.*evaluation\.load"),
        ("evaluation: {command: [x], load: 'mine.py:load'}\n", r"evaluation\.load: .*is used by no metric"),
        ("evaluation: {load: 'mine.py:nothing', metrics: ['mine.py:size']}\n", r"names nothing, which is not defined"),
        ("evaluation: {load: 'mine.py:load', metrics: ['mine.py:Model']}\n", r"names Model, which is a class"),
        ("evaluation: {max_loss: 2, command: [x]}\n", r"evaluation\.max_loss: .*is not used by train\.script"),
        ("registration: {model: m}\n", r"registration\.model: .*is not used without an evaluation"),
        (
            "evaluation: {command: [x]}\nregistration: {serve: 'mine.py:size'}\n",
            r"size, which is not defined with `class`",
        ),
        ("evaluation: {command: [x]}\nschedule: {max_decay: 0.1}\n", r"schedule\.max_decay: .*has no held-out text"),
        ("evaluation: {command: [x], metrics: [{name: a}, {name: a}]}\n", r"is the name of two metrics"),
        (
            "evaluation: {command: [x], versus_champion: ignore, metrics: [{name: a, versus_champion: better}]}\n",
            r"evaluation\.metrics\.0\.versus_champion: is not used by evaluation\.versus_champion: ignore",
        ),
    ],
)
def test_a_spec_that_cannot_be_evaluated_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "score.py").write_text("")
    with pytest.raises(SpecError, match=f"(?s){message}"):
        load_spec(write_spec(tmp_path / "code", text))


def test_a_command_with_an_absolute_path_runs_in_the_folder_of_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    spec = load_spec(write_spec(folder, f"evaluation: {{command: [python, {folder}/score.py, '1']}}\n"))
    assert spec.evaluation.command == ("python", "score.py", "1")


def test_names_of_an_export_stay_below_its_folder() -> None:
    for name in ("../x", "/x", "a/../../x", ""):
        record = {"state_digest": "s", "whole": True, "files": {name: {"size": 0, "blocks": []}}}
        with pytest.raises(DataError, match="is no record of an export"):
            ExportRecord.parse(json.dumps(record).encode(), "record")


def test_a_script_that_exported_nothing_cannot_be_evaluated(home: Path, store: Store, tmp_path: Path) -> None:
    spec, result = trained(write_spec(tmp_path / "code", scored()), store)
    store.put(layout.result(result.run_id), result.model_copy(update={"export": ""}).model_dump_json().encode())
    with pytest.raises(MissingError, match=r"exported nothing.*session\.export\(model\)"):
        evaluate(spec, result.run_id, store)


def test_a_damaged_export_is_neither_scored_nor_registered(home: Path, store: Store, tmp_path: Path) -> None:
    spec, result = trained(write_spec(tmp_path / "code", scored()), store)
    evaluate(spec, result.run_id, store)
    key = f"{result.export}model.safetensors"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        register(spec, result.run_id, store)
    for info in list(store.list(layout.run(result.run_id, "evaluations/"))):
        store.delete(info.key)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        evaluate(spec, result.run_id, store)


def registered(store: Store, path: Path, **more: object) -> tuple[str, str]:
    """Train, evaluate and register. Returns the MLflow URI of the version, and the prefix of its export."""
    spec, result = trained(path, store, **more)  # type: ignore[arg-type]
    evaluate(spec, result.run_id, store)
    return register(spec, result.run_id, store).uri, result.export


def test_a_class_serves_the_export_in_mlflow_with_its_own_code(
    home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    text = scored() + "registration: {serve: {use: 'mine.py:Model', scale: 3}}\n"
    uri, export = registered(store, write_spec(tmp_path / "code", text))
    with monkeypatch.context() as patch:  # the code of another model in this process
        (tmp_path / "mine.py").write_text(FILES["mine.py"])
        patch.syspath_prepend(str(tmp_path))
        patch.delitem(sys.modules, "mine", raising=False)
        importlib.import_module("mine")
        with pytest.raises(Exception, match=r"mine is loaded from .*not the code of this model"):
            mlflow.pyfunc.load_model(uri)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    model = mlflow.pyfunc.load_model(uri)
    assert model.predict(pd.DataFrame({"x": [1.0, 2.0]})) == [6.0, 12.0]
    key = f"{export}model.safetensors"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(Exception, match="is not the file that was registered"):
        mlflow.pyfunc.load_model(uri)


def test_any_other_folder_is_registered_with_its_files(home: Path, store: Store, tmp_path: Path) -> None:
    def both(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "model.gguf").write_bytes(b"GGUF")

    path = write_spec(tmp_path / "code", "evaluation: {command: [python, always.py]}\n", **{"always.py": ALWAYS})
    _, export = registered(store, path, export=both)
    described = yaml.safe_load(store.get(f"{export}MLmodel"))
    assert described["flavors"]["holdfast"]["files"] == {"deep/model.gguf": 4}
    assert list(described["flavors"]) == ["holdfast"]
    now = champion("scored", [store])
    assert now is not None
    assert now.export_digest == read_record(store, export).digest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights.pt", r"weights\.pt has a name of pickled files"),
        ("pytorch_model.bin", r"pytorch_model\.bin has a name of pickled files"),
        ("MLmodel", r"has a file MLmodel, which registration"),
    ],
)
def test_an_export_with_names_that_mislead_is_not_registered(
    home: Path, store: Store, tmp_path: Path, name: str, message: str
) -> None:
    path = write_spec(tmp_path / "code", "evaluation: {command: [python, always.py]}\n", **{"always.py": ALWAYS})
    with pytest.raises(DataError, match=message):
        registered(store, path, export=lambda folder: (folder / name).write_text("plain"))


def test_a_model_of_transformers_is_described_without_loading_it_and_loads_in_mlflow(
    home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    def save(folder: Path) -> None:
        settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(**settings, num_key_value_heads=2, vocab_size=300, eos_token_id=0, bos_token_id=0)
        LlamaForCausalLM(config).save_pretrained(folder)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(300))
        PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=END).save_pretrained(folder)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    path = write_spec(tmp_path / "code", "evaluation: {command: [python, always.py]}\n", **{"always.py": ALWAYS})
    uri, export = registered(store, path, export=save)
    flavor = yaml.safe_load(store.get(f"{export}MLmodel"))["flavors"]["transformers"]
    assert (flavor["task"], flavor["pipeline_model_type"]) == ("text-generation", "LlamaForCausalLM")
    pipeline = mlflow.transformers.load_model(uri)
    file = store.local_path(f"{export}model.safetensors")
    assert file is not None
    weights = load_file(file)
    assert torch.equal(pipeline.model.model.norm.weight.cpu(), weights["model.norm.weight"])
    assert pipeline("the quick", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("the quick")


def test_a_retraining_is_due_when_the_code_changed(home: Path, store: Store, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "code", scored())
    decision = decide_retraining(load_spec(path), store)
    assert (decision.word, decision.conditions[0].name) == ("due", "no_champion")
    registered(store, path)
    decision = decide_retraining(load_spec(path), store)
    assert (decision.word, decision.conditions[0].name) == ("not_due", "same_model")
    (path.parent / "train.py").write_text("import holdfast  # changed\n")
    decision = decide_retraining(load_spec(path), store)
    assert (decision.word, [one.name for one in decision.conditions if one.due]) == ("due", ["changed_spec"])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", ["train"]),
        (scored(), ["train", "evaluate", "register"]),
    ],
)
def test_the_dag_of_a_script_ends_where_its_evaluation_is_not_known(
    tmp_path: Path, text: str, steps: list[str]
) -> None:
    spec = load_spec(write_spec(tmp_path / "code", text))
    assert [node.step for node in plan(spec)] == steps
    assert plan(spec)[0].before == ()
    assert list(steps_from(SCHEDULED_START, edges_of(spec))) == [SCHEDULED_START, *steps]
    compiled = {name.removeprefix("comp-") for name in build(training, spec).pipeline_spec.components}
    assert compiled & STEPS.keys() == {*steps, "notify"}
