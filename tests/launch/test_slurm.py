"""The ending of a launch on Slurm, from the reports of its nodes."""

import os
from pathlib import Path

import pytest

from holdfast.launch.exits import NodeExit, RankExit
from holdfast.launch.interface import GangExit, Job
from holdfast.launch.slurm import _environment, _gang_exit, own_job, without_job, without_step
from holdfast.spec import ExitCode
from holdfast.spec.cluster import Cluster


def node_exit(node: str, code: int, rank: int, **fields: bool) -> NodeExit:
    process = RankExit(rank=rank, local_rank=rank % 2, pid=1, node=node, attempt=7, began=1.0, ended=2.0, code=code)
    return NodeExit(code=code, node=node, ranks=(process,), **fields)


def ended(code: int, **reports: NodeExit | None) -> GangExit:
    return _gang_exit(code, reports, ("last",), Path("log"))


def test_the_root_cause_rank_is_reported_with_its_node_and_attempt() -> None:
    reports = {
        "n9": node_exit("n9", ExitCode.LOST_PEER, 1),
        "n1": node_exit("n1", ExitCode.WRONG_ARITHMETIC, 2, blames_node=True),
    }
    ending = ended(1, **reports)
    assert (ending.code, ending.rank, ending.node, ending.attempt) == (ExitCode.WRONG_ARITHMETIC, 2, 1, 7)
    assert ending.blamed_nodes == {"n1"}


def test_a_node_without_an_exit_report_explains_the_lost_peers() -> None:
    ending = ended(1, n1=node_exit("n1", ExitCode.LOST_PEER, 0), n2=None)
    assert (ending.code, ending.rank, ending.node) == (ExitCode.KILLED, None, 1)
    assert ending.detail == "n2 did not say how it ended. The log is log"


@pytest.mark.parametrize("reports", [{"n1": None, "n2": None}, {"n1": node_exit("n1", 0, 0), "n2": None}])
def test_a_successful_launch_blames_no_node(reports: dict[str, NodeExit | None]) -> None:
    ending = ended(0, **reports)
    assert (ending.code, ending.rank, ending.node, ending.blamed_nodes) == (0, None, None, frozenset())


def test_an_error_of_srun_is_the_reason_if_no_node_has_an_exit_report() -> None:
    output = (
        "holdfast",
        "srun: fatal: Failed to parse --cpu-bind= values",
        "srun: fatal: Failed to parse --cpu-bind= values",
    )
    ending = _gang_exit(1, {"n1": None}, output, Path("log"))
    assert ending.detail == (
        "n1 did not say how it ended. Slurm says: srun: fatal: Failed to parse --cpu-bind= values. The log is log"
    )


def test_the_network_of_the_spec_is_in_the_environment_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho NodeName=n1 NodeAddr=127.0.0.1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cluster = Cluster(accelerator="nvidia", network="infiniband", environment={"NCCL_DEBUG": "INFO"})
    variables = _environment(Job("job", "run", 1, ["-m", "x"], 1, 1, 20.0, cluster), ["n1"], tmp_path)
    assert (variables["NCCL_NET"], variables["NCCL_DEBUG"], variables["PET_MASTER_ADDR"]) == ("IB", "INFO", "127.0.0.1")


@pytest.mark.parametrize(
    ("array", "called"),
    [
        ({}, "7"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),  # the last task has the number of the array
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "7"),  # another task, or one of another job
    ],
)
def test_the_id_of_the_current_job_is_unique_in_an_array(array: dict[str, str], called: str) -> None:
    assert own_job({"SLURM_JOB_ID": "7", **array}) == called


def test_nothing_of_an_enclosing_job_is_handed_on_to_a_submission_or_to_a_step() -> None:
    site = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_PARTITION": "all",
        "SBATCH_ACCOUNT": "a",
        "PATH": "/bin",
        "PMIX": "x",
    }
    bound = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_MEM_BIND": "none",
        "SBATCH_CPU_BIND": "cores", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "PMI_RANK": "0", "PMIX_RANK": "0",
        "SRUN_DEBUG": "3", "SLURM_EXPORT_ENV": "NONE",
    }  # fmt: skip
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "2"}
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SBATCH_ARRAY_INX": "3-3"}
    assert without_job({**site, **bound, **job, **array}) == site
    assert without_step({**site, **bound, **job}) == {**site, **job}
