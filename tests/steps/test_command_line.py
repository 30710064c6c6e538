"""The command line of every step: overrides in one argument, results as files, outcomes in the store."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from holdfast.spec import ExitCode, Spec, SpecError, dump_spec, parse_spec
from holdfast.spec.engine_text import VARIABLE, escape
from holdfast.spec.errors import MissingError
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main, parser_of
from holdfast.steps.command_line import overrides_of, report_progress
from holdfast.steps.jobs import outcomes_of
from holdfast.store import layout, open_store

SPEC = "{name: a, data: {sources: [{uri: x}]}}"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "spec.yaml").write_text(SPEC)
    arguments = ["--spec", str(tmp_path / "spec.yaml"), "--store", f"file://{tmp_path}/store", "--job", "job-1"]
    more = ['--overrides=["training.steps=50", "name=b"]', "--set", "name=c", "--outputs", f"{tmp_path}/outputs"]
    return [*arguments, *more, "--run-id", "r", "--artifacts", f"{tmp_path}/artifacts"]


def test_overrides_in_one_argument_apply_before_those_of_set(argv: list[str]) -> None:
    assert overrides_of(parser_of("evaluate").parse_args(argv)) == ["training.steps=50", "name=b", "name=c"]
    assert overrides_of(Namespace(overrides="", set=[])) == []


@pytest.mark.parametrize("text", ["training.steps=50", "{}", "[1]", '["a', "null"])
def test_overrides_that_are_no_list_of_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not a JSON list"):
        overrides_of(Namespace(overrides=text, set=[]))


def test_a_result_becomes_files_and_its_word_an_outcome(argv: list[str], tmp_path: Path) -> None:
    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        assert (spec.name, spec.training.steps, run_id) == ("c", 50, "r")
        result = {"word": 'a "word"\n', "count": 3, "list": ["é"], "none": None}
        return StepResult(
            result, {"report": Artifact("<html>é"), "metrics": Artifact(metadata={"loss": 1.0})}, "the word"
        )

    assert main("evaluate", body, argv) == ExitCode.OK
    assert {path.name: path.read_text() for path in (tmp_path / "artifacts").iterdir()} == {"report": "<html>é"}
    read = {path.name: path.read_text() for path in (tmp_path / "outputs").iterdir()}
    assert read == {"word": 'a "word"\n', "count": "3", "list": '["é"]', "none": "null"}
    (outcome,) = outcomes_of("job-1", SPEC, (), f"file://{tmp_path}/store")
    assert (outcome.step, outcome.exit_code, outcome.result) == ("evaluate", 0, "the word")


def test_escaped_inputs_are_restored_for_a_step_and_its_outputs_are_escaped(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "image: {{$.Values.image}} [[RunUUID]] $(HOME) \\u007b"
    plain = dump_spec(parse_spec(SPEC, [f"evaluation.prompts={json.dumps([text])}"]))
    (tmp_path / "spec.yaml").write_text(escape(plain))
    monkeypatch.setenv("PROMPT", escape(text))
    monkeypatch.setenv(VARIABLE, "PROMPT")

    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        assert (spec.evaluation.prompts, run_id, os.environ["PROMPT"]) == ((text,), text, text)
        return StepResult({"word": text})

    escaped_argv = [*argv, "--escaped", f"--run-id={escape(text)}", f"--output={tmp_path}/result.json"]
    assert main("evaluate", body, escaped_argv) == ExitCode.OK
    assert (tmp_path / "outputs" / "word").read_text() == escape(text)
    assert json.loads((tmp_path / "result.json").read_text()) == {"word": text}


def test_without_an_engine_a_text_that_looks_escaped_stays(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(dump_spec(parse_spec(SPEC, ['evaluation.prompts=["\\\\u007b"]'])))

    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        assert (spec.evaluation.prompts, run_id) == (("\\u007b",), "\\u007b")
        return StepResult({"word": "\\u007b{"})

    assert main("evaluate", body, [*argv, "--run-id=\\u007b"]) == ExitCode.OK
    assert (tmp_path / "outputs" / "word").read_text() == "\\u007b{"


def test_a_failure_leaves_its_reason_and_no_result(argv: list[str], tmp_path: Path) -> None:
    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        outcome = json.loads(open_store(url).get(layout.job("job-1", "evaluate")))
        assert outcome["ended"] is None  # a process that is killed from here on has recorded its start
        raise MissingError("no such run")

    assert main("evaluate", body, argv) == ExitCode.NOT_FOUND
    assert not (tmp_path / "outputs").exists()
    (outcome,) = outcomes_of("job-1", SPEC, (), f"file://{tmp_path}/store")
    assert (outcome.exit_code, outcome.reason) == (15, "no such run")


def test_progress_is_written_for_argo_and_never_exceeds_the_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_progress(1, 2)  # nothing listens
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "progress"))
    report_progress(5, 4)
    assert (tmp_path / "progress").read_text() == "4/4\n"
    report_progress(1, 0)
    assert (tmp_path / "progress").read_text() == "4/4\n"
