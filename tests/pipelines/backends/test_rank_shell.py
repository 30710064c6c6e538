"""`holdfast shell`: the command line for each backend from the records of a launch, and what is refused."""

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.api.rank_shell import rank_command
from holdfast.api.submission import Location
from holdfast.launch import exits, processes
from holdfast.launch.launches import claim_launch
from holdfast.launch.node.output import Place, RankOutput
from holdfast.pipelines.backends import open_backend
from holdfast.pipelines.backends.rank_shell import RankShell
from holdfast.pipelines.backends.record import process_start, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.cli import monitoring as command
from holdfast.runtime import environment, rank_shell, sealing
from holdfast.spec import parse_spec
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MissingError
from holdfast.store import Store, open_store
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.rank_logs import RankStream, rank_streams
from holdfast.telemetry.run_metadata import write_run_metadata

RUN = "3f2a4b5c6d7e8f90"
ON_NODE = ["-m", "holdfast.runtime.rank_shell", RUN, "3", "4000000", "nvidia-smi", "-L"]
OF_NODES = ("HOLDFAST_NODE_NAME", "HOLDFAST_POD_NAME", "HOLDFAST_POD_NAMESPACE", "SLURM_JOB_ID", "SLURMD_NODENAME")
PACKAGE = Path(rank_shell.__file__).parents[1]
Started = Callable[..., RankStream]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A folder: nothing here depends on the kind of the store."""
    return open_store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def started(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Record a process of a rank, on a node with some variables, as the process that supervises the ranks does."""
    for name in OF_NODES:
        monkeypatch.delenv(name, raising=False)
    running: list[tuple[RankOutput, int]] = []

    def end(output: RankOutput, writer: int) -> None:
        os.close(writer)
        output.take_rest(60.0)
        output.close({4_000_000: 1}, 60.0)

    def start(rank: int = 3, launch: int = 1, *, ends: bool = False, **variables: str) -> RankStream:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        output = RankOutput(Place(store.url, RUN, launch), tmp_path, flush_seconds=0.05)
        reader, writer = output.pipe()
        output.follow(reader, rank, 4_000_000)  # no process has this number: it is above the kernel's limit
        if ends:
            end(output, writer)
        else:
            running.append((output, writer))
        while not (streams := rank_streams(store, RUN, rank)) or not streams[-1].pid:
            time.sleep(0.02)
        return streams[-1]

    yield start
    for each in running:
        end(*each)


def shell_of(process: RankStream, *, terminal: bool = False, job: str = "pytorchjob") -> RankShell:
    return RankShell(RUN, process, Cluster.model_validate({"job": job}), ("nvidia-smi", "-L"), terminal)


def test_a_rank_that_prints_nothing_is_found_on_slurm(started: Started) -> None:
    process = started(SLURM_JOB_ID="412", SLURMD_NODENAME="gpu-7")
    argv = open_backend("slurm").rank_shell(shell_of(process))
    place = ["--jobid=412", "--nodelist=gpu-7", "--overlap", "--nodes=1", "--ntasks=1"]
    assert argv == ["srun", *place, sys.executable, *ON_NODE]
    assert open_backend("slurm").rank_shell(shell_of(process, terminal=True))[:7] == ["srun", *place, "--pty"]


@pytest.mark.parametrize(
    ("backend", "job", "container"),
    [("kubeflow", "pytorchjob", "pytorch"), ("argo", "trainjob", "node"), ("argo", "volcano", "train")],
)
def test_the_pod_of_a_rank_is_entered_on_kubernetes(started: Started, backend: str, job: str, container: str) -> None:
    place = {"HOLDFAST_POD_NAME": "small-1-worker-0", "HOLDFAST_POD_NAMESPACE": "team", "HOLDFAST_NODE_NAME": "gpu-7"}
    process = started(**place)
    assert process.node == "gpu-7"
    pod = ["small-1-worker-0", "-n", "team", "-c", container, "--", "python", *ON_NODE]
    opened = open_backend(backend, endpoint="http://kfp" if backend == "kubeflow" else "")
    assert opened.rank_shell(shell_of(process, job=job)) == ["kubectl", "exec", "-i", *pod]
    assert opened.rank_shell(shell_of(process, job=job, terminal=True)) == ["kubectl", "exec", "-i", "-t", *pod]
    if backend == "argo":
        elsewhere = open_backend(backend, endpoint="lab").rank_shell(shell_of(process, job=job))
        assert elsewhere == ["kubectl", "--context", "lab", "exec", "-i", *pod]


def test_a_machine_of_the_file_is_entered_over_ssh(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SSH", "ssh -F 'my config'")
    process = started(HOLDFAST_NODE_NAME="me@gpu-2")
    shell = replace(shell_of(process), command=("echo", "a b"))
    remote = shlex.join([sys.executable, *ON_NODE[:-2], "echo", "a b"])
    assert open_backend("ssh").rank_shell(shell) == ["ssh", "-F", "my config", "-T", "me@gpu-2", remote]
    assert open_backend("ssh").rank_shell(replace(shell, terminal=True))[3] == "-t"


def test_where_no_node_can_be_entered_the_place_of_the_rank_is_named(started: Started) -> None:
    process = started(HOLDFAST_NODE_NAME="ray-node-1")
    with pytest.raises(MissingError, match=r"Ray cannot enter a node; .* process 4000000 on the node ray-node-1"):
        open_backend("ray", endpoint="http://ray").rank_shell(shell_of(process))
    for backend, kind in (("argo", "pod"), ("slurm", "job")):
        with pytest.raises(MissingError, match=f"names no {kind} of it, only the node ray-node-1"):
            open_backend(backend).rank_shell(shell_of(process))


@pytest.fixture
def running(store: Store, tmp_path: Path) -> Location:
    """A run of this machine whose process, this one, runs."""
    request = RunRequest(parse_spec("{name: small, data: {sources: [{uri: x}]}}"), run_id=RUN)
    record = replace(
        record_of(request, "local", RUN), host=socket.gethostname(), pid=os.getpid(),
        began=process_start(os.getpid()) or 0.0, outcomes=str(tmp_path),
    )  # fmt: skip
    record.write(store)
    write_run_metadata(store, RUN, request.spec, "d", "")
    return Location(store=store.url)


def test_a_rank_is_named_by_its_launch(started: Started, running: Location, store: Store) -> None:
    with pytest.raises(MissingError, match=rf"run {RUN}: no rank runs yet; .* holdfast show {RUN} --steps"):
        rank_command("3f2a", at=running)
    claim_launch(store, RUN, {})
    started(0, ends=True)
    started(1)
    with pytest.raises(MissingError, match=r"rank 0 of launch 1 has ended; .* when the next launch has begun"):
        rank_command("3f2a", at=running)
    with pytest.raises(MissingError, match="there is no rank 7; launch 1 has 2 ranks, 0 to 1"):
        rank_command("3f2a", 7, at=running)
    found = rank_command("3f2a", 1, ("true",), at=running)
    assert (found.run_id, found.launch, found.pid) == (RUN, 1, 4_000_000)
    assert found.argv == (sys.executable, "-m", "holdfast.runtime.rank_shell", RUN, "1", "4000000", "true")
    claim_launch(store, RUN, {})
    with pytest.raises(MissingError, match="no rank runs yet"):
        rank_command("3f2a", 1, at=running)


def test_a_run_that_does_not_run_is_refused_with_its_state(running: Location, store: Store, tmp_path: Path) -> None:
    request = RunRequest(parse_spec("{name: small, data: {sources: [{uri: x}]}}"), run_id=RUN)
    replace(record_of(request, "local", RUN), log=str(tmp_path / "run-1.log")).write(store)
    with pytest.raises(MissingError, match=rf"is UNFINISHED on local, so no rank runs; .* holdfast resume {RUN}"):
        rank_command("3f2a", at=running)


def test_a_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError, match="kubectl: is not installed on this machine"):
        command._become(("kubectl", "exec"))


def test_the_program_on_the_node_knows_the_variables_of_a_launch() -> None:
    agent = re.search(r'^VARIABLE = "(\w+)"', (PACKAGE / "checkpoint/agent/protocol.py").read_text(), re.MULTILINE)
    assert agent is not None  # importing the module would import torch
    names = {
        sealing.VARIABLE, sealing.NEAR_VARIABLE, exits.FILE_VARIABLE, exits.FOLDER_VARIABLE, PIPE, agent[1],
        environment.OUTCOMES, processes.PARENT_VARIABLE,
    }  # fmt: skip
    assert names == rank_shell.LEFT_OUT
    assert exits.FILE_VARIABLE == rank_shell.LAUNCH_MARK
