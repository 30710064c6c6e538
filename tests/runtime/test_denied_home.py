"""A home that this user may not write to is an error of the environment, with a remedy, and no bug."""

import os
import sys
from pathlib import Path

import pytest

from holdfast.runtime.environment import make_folder
from holdfast.runtime.exits import exit_code_of, explained
from holdfast.spec.errors import DataError, ExitCode, TerminatedError
from tests import warm
from tests.store.test_shared_folder import FIRST, GROUP, SECOND, as_user, shared

__all__ = ["shared"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")
def test_a_home_of_another_user_is_reported_with_the_variable_that_names_one(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shared / "home"
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    assert as_user(FIRST, GROUP, 0o027, lambda: make_folder(home / "logs")) == ""

    def begin() -> None:
        make_folder(home / "logs" / "run")

    def reported() -> None:
        try:
            begin()
        except OSError as error:
            raise explained(error) from None

    assert as_user(SECOND, GROUP, 0o027, reported).startswith(
        f"AccessDeniedError: {home}/logs/run: Permission denied; set HOLDFAST_HOME to a folder that"
    )

    def ended() -> None:
        assert exit_code_of(begin) == ExitCode.ACCESS_DENIED

    assert as_user(SECOND, GROUP, 0o027, ended) == ""


def test_a_file_outside_the_home_is_no_matter_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    for error in (
        PermissionError(13, "denied", "/elsewhere/x"),
        OSError(5, "damaged", str(tmp_path)),
        OSError(13, "x"),
    ):
        assert explained(error) is error


def test_an_error_that_names_its_remedy_stays_with_every_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    for error in (DataError("a.jsonl: fix it"), TerminatedError("stop requested (SIGTERM)"), KeyboardInterrupt()):
        error.__cause__ = PermissionError(13, "denied", str(tmp_path / "x"))
        assert explained(error) is error


def test_a_command_with_such_a_home_ends_as_denied_and_asks_for_no_report(tmp_path: Path) -> None:
    observed = "telemetry: {observers: ['mine.py:show']}"
    (tmp_path / "spec.yaml").write_text(f"{{name: a, data: {{sources: [{{uri: 'x/*.txt'}}]}}, {observed}}}")
    (tmp_path / "mine.py").write_text("def show(step, metrics): ...\n")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.txt").write_text("text")
    environment = {**os.environ, "HOLDFAST_HOME": "/sys/holdfast"}  # not even root may create it
    result = warm.run([sys.executable, "-m", "holdfast.pipelines.cli", "run", "spec.yaml"], environment, tmp_path)
    assert result.returncode == ExitCode.ACCESS_DENIED, result.stderr
    assert "set HOLDFAST_HOME to a folder that this user may write to" in result.stderr
    assert "report it" not in result.stderr
