"""What the launchers of several nodes share: torchrun's arguments, its environment, and how the gang ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.launch.accelerators import ACCELERATORS, network_variables
from holdfast.launch.exits import NodeExit, codes_of_nodes, root_cause
from holdfast.launch.interface import GangExit, Job
from holdfast.runtime import sealing
from holdfast.spec.errors import ExitCode

WRAPPER = "holdfast.launch.torchrun"


def torchrun_arguments(job: Job) -> list[str]:
    """The arguments of Python that start one node of a gang."""
    return [
        "-m",
        WRAPPER,
        f"--nproc-per-node={job.processes}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={max(1, int(job.grace_seconds))}",
        f"--rdzv-conf=timeout={job.cluster.nodes.rendezvous_seconds}",
        *job.command,
    ]


def gang_environment(job: Job, nodes: int, address: str, port: int) -> dict[str, str]:
    """The variables of all nodes of a gang that meets at an address, in addition to those of each machine. A new key of
    the launch is the only secret."""
    return {
        **ACCELERATORS[job.cluster.accelerator].environment,
        **network_variables(job.cluster.accelerator, job.cluster.network),
        **job.cluster.environment,
        **job.environment,
        "OMP_NUM_THREADS": str(job.threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PET_NNODES": str(nodes),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "PET_RDZV_ID": f"{job.run_id}-{job.launch}",
        sealing.VARIABLE: sealing.new_key(),
    }


def gang_exit_of(
    code: int,
    reports: Mapping[str, NodeExit | None],
    tail: Sequence[str],
    path: Path,
    *,
    silence: str = "",
    elsewhere: bool = False,
) -> GangExit:
    """The exit of a gang.

    - `code`: with which what started the nodes ended
    - `reports`: each node's exit report, in the order of the nodes; None for a node without one
    - `tail`: the last lines that the ranks printed; `path`: their log
    - `silence`: why nodes may have no report, a sentence with its period; it is shown if one has none
    - `elsewhere`: whether the next launch can get other nodes
    """
    codes = dict(zip(reports, codes_of_nodes(code, list(reports.values())), strict=True))
    cause = root_cause(codes.values())
    blamed = frozenset(
        node for node, report in reports.items() if report and report.blames_node and report.code == cause
    )
    silent = sorted(node for node, report in reports.items() if report is None) if code != ExitCode.OK else []
    detail = f"{', '.join(silent)} did not say how it ended. " if silent else ""
    if silent and silence:
        detail += f"{silence} "
    node, first = next((place, reports[name]) for place, name in enumerate(codes) if codes[name] == cause)
    rank = first.cause if first and cause != ExitCode.OK else None
    detail += f"{first.detail}. " if first and first.detail and cause != ExitCode.OK else ""
    return GangExit(
        cause,
        tuple(tail),
        f"{detail}The log is {path}",
        blamed,
        rank=rank.rank if rank else None,
        node=None if cause == ExitCode.OK else node,
        attempt=rank.attempt if rank else None,
        elsewhere=elsewhere,
    )
