"""The wrapper of a step: its arguments, its log and its exit code, seen from a separate process."""

import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.runtime.environment import home, log_dir, store_url, tracking_uri
from holdfast.runtime.exits import exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.spec import ExitCode, SpecError, errors
from holdfast.steps.command_line import add_common, publish, spec_and_store
from holdfast.store import open_store
from tests import warm
from tests.spec.conftest import text_with


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DataError("x"), ExitCode.BAD_DATA),
        (errors.StoreUnreachableError("x"), ExitCode.STORE_UNREACHABLE),
        (SpecError([]), ExitCode.BAD_SPEC),
        (errors.HoldfastError("x"), ExitCode.UNEXPECTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.ENOSPC, "full", "/disk"), ExitCode.NO_SPACE),
        (OSError(errno.EDQUOT, "quota", "/disk"), ExitCode.NO_SPACE),
        (OSError(errno.EIO, "broken"), ExitCode.UNEXPECTED),
        (RuntimeError("bug"), ExitCode.UNEXPECTED),
        (MemoryError(), ExitCode.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "no memory to map"), ExitCode.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."), ExitCode.OUT_OF_MEMORY),
        (SystemExit(0), ExitCode.USER_CODE),  # of a user's function: the step has no result
    ],
    ids=repr,
)
def test_a_failure_ends_with_the_code_of_the_table(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(raising(error)) == code


def test_success_is_zero() -> None:
    assert exit_code_of(lambda: "result") == ExitCode.OK


def test_a_known_failure_is_logged_without_a_traceback_and_a_bug_with_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        exit_code_of(raising(errors.DataError("shard 3 is broken")))
        exit_code_of(raising(RuntimeError("bug")))
        exit_code_of(raising(OSError(errno.ENOSPC, "full", "/disk/file")))
    known_failure, bug, full = caplog.records
    assert known_failure.getMessage() == "shard 3 is broken"
    assert known_failure.exc_info is None
    assert bug.exc_info is not None
    assert "/disk/file" in full.getMessage()
    assert "free some" in full.getMessage()


STEP = """
    import sys
    from argparse import ArgumentParser
    from holdfast.spec.errors import LostPeerError
    from holdfast.steps.command_line import add_common, publish, spec_and_store
    from holdfast.runtime.exits import exit_code_of
    from holdfast.runtime.logs import configure_logging

    def body():
        spec, store = spec_and_store(arguments)
        publish({"steps": spec.training.steps, "store": store}, arguments.output)
        if spec.training.seed:
            raise LostPeerError("rank 3 went away")

    parser = ArgumentParser()
    add_common(parser)
    arguments = parser.parse_args()
    configure_logging()
    sys.exit(exit_code_of(body))
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a small step as a process."""
    monkeypatch.setenv("HOLDFAST_STORE", "file:///from/environment")
    (tmp_path / "spec.yaml").write_text(text_with(), encoding="utf-8")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(STEP), *arguments]
        return warm.run(command, os.environ)

    return run


def test_a_step_publishes_its_result_and_ends_with_its_code(
    step: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    spec, output = str(tmp_path / "spec.yaml"), tmp_path / "made" / "result.json"
    process = step("--spec", spec, "--set", "training.steps=7", "--output", str(output))
    assert process.returncode == 0
    assert (
        json.loads(process.stdout)
        == json.loads(output.read_text())
        == {"steps": 7, "store": "file:///from/environment"}
    )
    assert json.loads(step("--spec", spec, "--store", "s3://b").stdout)["store"] == "s3://b"
    failure = step("--spec", spec, "--set", "training.seed=1")
    assert failure.returncode == ExitCode.LOST_PEER
    assert "rank 3 went away" in failure.stderr
    assert "Traceback" not in failure.stderr
    assert step("--spec", spec, "--set", "training.steps=0").returncode == ExitCode.BAD_SPEC
    assert step("--spec", str(tmp_path / "none.yaml")).returncode == ExitCode.NOT_FOUND
    assert step().returncode == ExitCode.USAGE


def test_on_a_cluster_the_log_is_json(
    step: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LOG", "json")
    (line,) = step("--spec", str(tmp_path / "spec.yaml"), "--set", "training.seed=1").stderr.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("ERROR", "holdfast", "rank 3 went away")
    assert abs(entry["time"] - time.time()) < 600


def test_the_store_is_the_argument_then_the_spec_then_the_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert home() == tmp_path
    assert store_url() == f"file://{tmp_path}/store"
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    assert log_dir("abc") == tmp_path / "logs" / "abc"
    monkeypatch.setenv("HOLDFAST_STORE", "s3://environment")
    assert store_url() == "s3://environment"
    spec = tmp_path / "spec.yaml"
    spec.write_text(text_with(store="s3://spec"), encoding="utf-8")
    parser = ArgumentParser()
    add_common(parser)
    arguments = parser.parse_args(["--spec", str(spec)])
    assert spec_and_store(arguments)[1] == "s3://spec"
    arguments = parser.parse_args(["--spec", str(spec), "--store", "s3://argument"])
    assert spec_and_store(arguments)[1] == "s3://argument"


@pytest.mark.parametrize("name", ["with space", "a#b", "percent%20", "über"])
def test_the_default_store_is_below_the_home_for_any_folder_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / name))
    open_store(store_url()).put("key", b"here")
    assert (tmp_path / name / "store/key").read_bytes() == b"here"


def test_a_home_that_mlflow_cannot_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", "/home/100%")
    with pytest.raises(SpecError, match=r"HOLDFAST_HOME.*100%(.|\n)*MLFLOW_TRACKING_URI"):
        tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    assert tracking_uri() == "http://mlflow"


@pytest.mark.parametrize(("wanted", "level"), [("debug", "DEBUG"), ("loud", "INFO"), ("", "INFO")])
def test_the_log_level_is_case_insensitive_and_an_invalid_one_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], wanted: str, level: str
) -> None:
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", wanted)
    configure_logging()
    assert logging.getLevelName(logging.getLogger("holdfast").level) == level
    assert ("HOLDFAST_LOG_LEVEL=loud" in capfd.readouterr().err) is (wanted == "loud")


def test_a_result_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    publish({"text": "two\nlines é"}, None)
    assert capsys.readouterr().out == '{"text": "two\\nlines é"}\n'


def test_a_wrong_spec_is_refused_without_loading_anything_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "mlflow", "kfp", "boto3", "botocore", "numpy", "pyarrow", "tokenizers", "dvc", "transformers")
    (tmp_path / "wrong.yaml").write_text(text_with(**{"training.stepz": 1}), encoding="utf-8")
    code = f"""
        import sys, time
        started = time.perf_counter()
        import holdfast.store
        from holdfast.spec import SpecError, load_spec
        try:
            load_spec(sys.argv[1])
        except SpecError as error:
            print(error.problems[0].remedy, [name for name in {heavy!r} if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "wrong.yaml")]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == "did you mean 'steps'? []\n"
