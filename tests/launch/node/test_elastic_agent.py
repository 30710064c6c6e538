"""Two nodes of which one is enough: what the exit of one means for the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.spec import ExitCode
from tests import warm
from tests.ports import LAUNCH_KEY, free_port


def node(folder: Path, port: int, deed: str, host: bool) -> subprocess.Popen[str]:
    """One node of the gang, whose rank does `deed` while there are two."""
    command = [
        sys.executable, "-m", "holdfast.launch.torchrun", "--nnodes=1:2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=members", "--local-addr=127.0.0.1",
        f"--rdzv-conf=join_timeout=120,last_call_timeout=2,read_timeout=120,is_host={int(host)}", "--max-restarts=20",
        "-m", "tests.launch.node.member",
    ]  # fmt: skip
    environment = {
        **os.environ,
        **LAUNCH_KEY,
        "DEED": deed,
        "MET": str(folder / "met"),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return warm.popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("deed", "itself", "the_other"), [
    ("kill", ExitCode.KILLED, ExitCode.OK),  # another machine may succeed: the other node forms a gang alone
    ("11", ExitCode.BAD_DATA, ExitCode.LOST_PEER),  # no machine would succeed: none continues
], ids=["what may pass", "what will not pass"])  # fmt: skip
def test_the_failing_node_ends_and_its_peer_continues_if_a_restart_may_help(
    deed: str, itself: int, the_other: int, tmp_path: Path
) -> None:
    port = free_port()
    nodes = [node(tmp_path, port, str(int(ExitCode.LOST_PEER)), host=True), node(tmp_path, port, deed, host=False)]
    outputs = [process.communicate(timeout=240)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [the_other, itself], "\n---\n".join(outputs)
