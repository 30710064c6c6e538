"""One exit code out of those of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.components.launch import Ending
from holdfast.components.launch.ending import FOLDER_VARIABLE, as_exit_code, record_ending, recorded_endings, root_cause


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 137], 137),
        ([202, 12], 12),
        ([137, 202, 143], 137),
        ([143, 202], 143),
        ([202, 202], 202),
        ([203, 202, 143], 203),
        ([205, 137], 137),
        ([204, 11, 137], 11),
    ],
)
def test_the_cause_is_permanent_first_and_never_a_consequence_while_there_is_another(
    codes: list[int], cause: int
) -> None:
    assert root_cause(codes) == cause
    assert root_cause(reversed(codes)) in {cause, 202 if cause == 143 else cause}


def test_signals_are_codes_as_a_shell_reports_them() -> None:
    assert [as_exit_code(status) for status in (0, 12, 204, -9, -15, -11)] == [0, 12, 204, 137, 143, 139]
    assert [Ending(code, ()).reason for code in (12, 204, 139, 99)] == [
        "diverged",
        "preempted",
        "signal 11",
        "exit code 99",
    ]
    assert [Ending(code, ()).retryable for code in (1, 127, 128, 204)] == [False, False, True, True]


def test_a_recorded_ending_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for rank, code in enumerate((0, 204, 12)):
        monkeypatch.setenv("RANK", str(rank))
        record_ending(code)
    (tmp_path / "3.unfinished").write_text("")  # killed while it wrote
    assert sorted(recorded_endings(tmp_path)) == [0, 12, 204]
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    record_ending(12)  # a disk that is full or gone must not hide the code it leaves with
    monkeypatch.delenv(FOLDER_VARIABLE)
    record_ending(12)
