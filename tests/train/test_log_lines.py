"""What the ranks log reaches whoever follows the step, plain or as JSON, and how far they are reaches Argo."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from holdfast.components.train.step import log_line

PLAIN = "2026-11-20T12:04:45Z WARNING holdfast.train: progress step=3/10 loss=2.1"
ENTRY = {"time": 1.5, "level": "WARNING", "logger": "holdfast.train", "message": "progress step=3/10 loss=2.1"}


@pytest.mark.parametrize("line", [PLAIN, json.dumps(ENTRY), f"worker-0 | {json.dumps(ENTRY)}"])
def test_a_line_of_a_rank_is_passed_on_with_its_level_and_its_progress(
    line: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "progress"))
    with caplog.at_level(logging.INFO, "holdfast"):
        log_line(line)
    assert caplog.record_tuples == [("holdfast.train", logging.WARNING, "progress step=3/10 loss=2.1")]
    assert (tmp_path / "progress").read_text() == "3/10\n"


@pytest.mark.parametrize("line", ["", "NCCL INFO ring", '{"time": 1', '{"time": 1, "level": "INFO"}'])
def test_other_lines_stay_in_the_log_of_the_attempt(line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        log_line(line)
    assert caplog.records == []


def test_a_progress_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "nowhere" / "progress"))
    log_line(PLAIN)
    assert not (tmp_path / "nowhere").exists()
