"""The exit report of a launch: one exit code out of those of all ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch import GangExit
from holdfast.launch.exits import (
    FOLDER_VARIABLE,
    RankRecord,
    as_exit_code,
    node_exit_of,
    read_ranks,
    root_cause,
)


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
    assert [GangExit(code, ()).reason for code in (12, 204, 139, 99)] == [
        "diverged",
        "preempted",
        "signal 11",
        "exit code 99",
    ]
    assert [GangExit(code, ()).retryable for code in (1, 127, 128, 204)] == [False, False, True, True]


def in_process(code: str, rank: int) -> None:
    """Run Python code as a process of a rank."""
    text = f"from holdfast.launch.exits import RankRecord; record = RankRecord(); {code}"
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    subprocess.run([sys.executable, "-c", text], env=environment, check=False)


def test_each_process_of_a_rank_leaves_a_record_and_the_last_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    in_process("record.formed(1); record.ended(202)", 0)
    in_process("record.formed(1); import os; os.kill(os.getpid(), 9)", 1)
    (tmp_path / "3.unfinished").write_text("")  # killed while it wrote
    assert [(entry.rank, entry.attempt, entry.code) for entry in read_ranks(tmp_path)] == [(0, 1, 202), (1, 1, None)]
    for rank in (0, 1):  # torchrun restarts the same ranks when the members of the gang change
        in_process("record.formed(2); record.ended(0)", rank)
    assert [(entry.attempt, entry.code) for entry in read_ranks(tmp_path)] == [(2, 0), (2, 0)]
    assert node_exit_of(read_ranks(tmp_path), []).code == 0
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    RankRecord().ended(12)  # a full or missing disk must not hide the exit code
    monkeypatch.delenv(FOLDER_VARIABLE)
    RankRecord().ended(12)


def test_the_rank_that_explains_the_ending_may_blame_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    in_process("record.formed(1); record.ended(203, blames_node=True)", 0)
    in_process("record.formed(1); record.ended(202)", 1)
    ending = node_exit_of(read_ranks(tmp_path), [])
    assert (ending.code, ending.blames_node) == (203, True)
    assert not node_exit_of(read_ranks(tmp_path), [12]).blames_node
