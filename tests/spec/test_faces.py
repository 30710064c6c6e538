"""The command line that every step shares: overrides in one argument, results as files, outcomes in the store."""

from __future__ import annotations

import json
import logging
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.runtime.argv import overrides_of, report_progress, step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import ExitCode, Spec, SpecError
from holdfast.components.spec.errors import MissingError
from holdfast.components.store import layout, open_store
from holdfast.components.store.jobs import outcomes_of, recorder

SPEC = "{name: a, data: {sources: [{uri: x}]}}"


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is() -> Iterator[None]:
    handlers, handler = logging.getLogger().handlers[:], signal.getsignal(signal.SIGTERM)
    yield
    logging.getLogger().handlers[:] = handlers
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    (tmp_path / "spec.yaml").write_text(SPEC)
    given = ["--spec", str(tmp_path / "spec.yaml"), "--store", f"file://{tmp_path}/store", "--job", "job-1"]
    more = ['--overrides=["training.steps=50", "name=b"]', "--set", "name=c", "--outputs", f"{tmp_path}/outputs"]
    return step_parser("A step.").parse_args([*given, *more])


def test_overrides_in_one_argument_come_before_those_of_set(arguments: Namespace) -> None:
    assert overrides_of(arguments) == ["training.steps=50", "name=b", "name=c"]
    assert overrides_of(Namespace(overrides="", set=[])) == []


@pytest.mark.parametrize("text", ["training.steps=50", "{}", "[1]", '["a', "null"])
def test_overrides_that_are_no_list_of_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not a JSON list"):
        overrides_of(Namespace(overrides=text, set=[]))


def test_a_result_becomes_files_and_its_word_an_outcome(arguments: Namespace, tmp_path: Path) -> None:
    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        assert (spec.name, spec.training.steps) == ("c", 50)
        return {"word": 'a "word"\n', "count": 3, "list": ["é"], "none": None}, "the word"

    assert run_main("train", arguments, body, recorder("job-1")) == ExitCode.OK
    read = {path.name: path.read_text() for path in (tmp_path / "outputs").iterdir()}
    assert read == {"word": 'a "word"\n', "count": "3", "list": '["é"]', "none": "null"}
    (outcome,) = outcomes_of("job-1", SPEC, (), f"file://{tmp_path}/store")
    assert (outcome.step, outcome.exit_code, outcome.result) == ("train", 0, "the word")


def test_a_failure_leaves_its_reason_and_no_result(arguments: Namespace, tmp_path: Path) -> None:
    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        started = json.loads(open_store(url).get(layout.job("job-1", "train")))
        assert started["ended"] is None  # what is killed from here on has left its beginning
        raise MissingError("no such run")

    assert run_main("train", arguments, body, recorder("job-1")) == ExitCode.NOT_FOUND
    assert not (tmp_path / "outputs").exists()
    (outcome,) = outcomes_of("job-1", SPEC, (), f"file://{tmp_path}/store")
    assert (outcome.exit_code, outcome.reason) == (15, "no such run")


def test_progress_goes_where_argo_looks_and_never_beyond_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_progress(1, 2)  # nobody asks
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "progress"))
    report_progress(5, 4)
    assert (tmp_path / "progress").read_text() == "4/4\n"
    report_progress(1, 0)
    assert (tmp_path / "progress").read_text() == "4/4\n"
