"""How a launch on Slurm ended, from what its nodes said."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.components.launch.ending import NodeEnding, RankEnding
from holdfast.components.launch.interface import Ending
from holdfast.components.launch.slurm import _ending, own_job
from holdfast.components.spec import ExitCode


def said(node: str, code: int, rank: int, **fields: bool) -> NodeEnding:
    process = RankEnding(rank=rank, local_rank=rank % 2, pid=1, node=node, attempt=7, began=1.0, ended=2.0, code=code)
    return NodeEnding(code=code, node=node, ranks=(process,), **fields)


def ended(code: int, **told: NodeEnding | None) -> Ending:
    return _ending(code, told, ("last",), Path("log"))


def test_the_rank_that_explains_the_others_is_named_with_its_node_and_attempt() -> None:
    told = {"n9": said("n9", ExitCode.LOST_PEER, 1), "n1": said("n1", ExitCode.WRONG_ARITHMETIC, 2, blames_node=True)}
    ending = ended(1, **told)
    assert (ending.code, ending.rank, ending.node, ending.attempt) == (ExitCode.WRONG_ARITHMETIC, 2, 1, 7)
    assert ending.blamed_nodes == {"n1"}


def test_a_node_that_said_nothing_explains_those_that_lost_it() -> None:
    ending = ended(1, n1=said("n1", ExitCode.LOST_PEER, 0), n2=None)
    assert (ending.code, ending.rank, ending.node) == (ExitCode.KILLED, None, 1)
    assert ending.detail == "n2 did not say how it ended. The log is log"


@pytest.mark.parametrize("told", [{"n1": None, "n2": None}, {"n1": said("n1", 0, 0), "n2": None}])
def test_a_launch_that_ended_well_blames_nobody(told: dict[str, NodeEnding | None]) -> None:
    ending = ended(0, **told)
    assert (ending.code, ending.rank, ending.node, ending.blamed_nodes) == (0, None, None, frozenset())


def test_a_task_of_an_array_is_never_called_by_the_number_of_the_whole_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert own_job() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")  # Slurm gives the last task of an array its number
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert own_job() == "7_3"
