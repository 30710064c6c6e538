"""The batch script really runs: `srun` and `scontrol` are small programs here that start local processes as nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import read_manifest
from holdfast.launch.emitters import slurm, training_job
from holdfast.launch.ending import NodeEnding
from holdfast.launch.slurm import _ending
from holdfast.spec import Spec, run_id
from holdfast.store import Store
from tests import empty_mlflow
from tests.faults.nodes import HELD, PLAIN, Held
from tests.train.ranks import launch
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

# What Slurm's srun promises: one task on each node, its number in SLURM_NODEID, signals passed on, the highest code.
SRUN = """#!{python}
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--wait=")]
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(node)}}, start_new_session=True)
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
]
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks if task.poll() is None])
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """#!/bin/bash
if [[ "$1" == show ]]; then for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do echo 127.0.0.1; done
else echo "$*" >> "$CALLS"; fi
"""
SQUEUE = """#!/bin/bash
echo "${JOB_STATE:-RUNNING}"
"""


class Cluster:
    """A machine on which the script finds Slurm's commands."""

    def __init__(self, folder: Path, nodes: int = 2, **environment: str) -> None:
        self.folder, self.calls = folder, folder / "calls"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        empty_mlflow.place(folder / "home")
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "HOLDFAST_HOME": str(folder / "home"),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "all",
            "GLOO_SOCKET_IFNAME": "lo",
            "CALLS": str(self.calls),
            **environment,
        }

    def start(self, script: str) -> subprocess.Popen[str]:
        path = self.folder / "job.sh"
        path.write_text(script)
        return subprocess.Popen(
            ["bash", str(path)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str) -> tuple[int, str]:
        process = self.start(script)
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    @property
    def requeued(self) -> bool:
        return self.calls.exists() and self.calls.read_text() == f"requeue {self.environment['SLURM_JOB_ID']}\n"


def two_nodes(*overrides: str) -> Spec:
    return tiny_spec("cluster.nodes={min: 2, max: 2}", "training.log_every=100", *overrides)


def script_for(spec: Spec, store: Store) -> str:
    return slurm.emit(training_job(spec, run_id(spec, DATASET_ID), launch(store, spec), store.url))


def script_of(code: str, spec: Spec | None = None) -> str:
    """A script whose ranks run some Python instead of the trainer."""
    job = training_job(spec or two_nodes(), "0123456789abcdef", 1, "s3://bucket/x")
    text = slurm.emit(job)
    before, _, after = text.partition("  python -m holdfast.launch.torchrun")
    return f"{before}  python -c '{code}' {after[after.index('&') :]}"


@pytest.mark.drill
def test_two_nodes_train_and_a_preempted_job_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    spec = two_nodes("training.steps=300")
    store = new_store(tmp_path / "store")
    code, output = Cluster(tmp_path).run(script_for(spec, store))
    assert code == 0, output
    digest = read_manifest(store, run_id(spec, DATASET_ID), 300).state_digest

    (tmp_path / "other").mkdir()
    other = new_store(tmp_path / "other" / "store")
    held = Held(other, run_id(spec, DATASET_ID), tmp_path / "holds", lambda: True)
    held.hold(150)  # its first lines are there by then
    cluster = Cluster(tmp_path / "other", **held.variables)
    script = script_for(spec, other).replace(PLAIN, HELD)
    process = cluster.start(script)
    assert process.stdout is not None
    for line in process.stdout:
        if " holdfast.train: step " in line:
            os.kill(process.pid, signal.SIGTERM)  # as --signal=B:TERM does: the batch shell only
            break
    rest = process.stdout.read()
    assert process.wait() == 204, rest
    assert cluster.requeued
    held.hold(300)
    cluster.environment["SLURM_RESTART_COUNT"] = "1"
    code, output = cluster.run(script)
    assert code == 0, output
    assert read_manifest(other, run_id(spec, DATASET_ID), 300).state_digest == digest


@pytest.mark.parametrize(
    ("codes", "cause", "requeued"),
    [((12, 202), 12, False), ((137, 204), 137, True)],
    ids=["permanent", "killed"],
)
def test_the_script_and_the_launcher_name_one_cause_of_an_end(
    codes: tuple[int, ...], cause: int, requeued: bool, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path)
    worker = (
        f'import os, sys; node = os.environ["SLURM_NODEID"]; code = {list(codes)}[int(node)]; '
        "from holdfast.launch.ending import NodeEnding, leave_ending; "
        "leave_ending(NodeEnding(code=code, node=node)); sys.exit(code)"
    )
    code, output = cluster.run(script_of(worker))
    assert code == cause, output
    assert cluster.requeued is requeued
    assert not list(tmp_path.glob("*.endings"))

    told = {f"n{number}": NodeEnding(code=each, node=f"n{number}") for number, each in enumerate(codes)}
    assert _ending(max(codes), dict(told), (), Path("log")).code == cause


@pytest.mark.parametrize(
    ("environment", "requeued"),
    [({}, True), ({"SLURM_RESTART_COUNT": "9"}, True), ({"SLURM_RESTART_COUNT": "10"}, False),
     ({"JOB_STATE": "CANCELLED"}, False), ({"JOB_STATE": "COMPLETING"}, False)],
    ids=str,
)  # fmt: skip
def test_a_failure_that_may_pass_is_requeued_within_the_budget_unless_the_job_was_cancelled(
    tmp_path: Path, environment: dict[str, str], requeued: bool
) -> None:
    cluster = Cluster(tmp_path, **environment)
    code, output = cluster.run(script_of("import sys; sys.exit(203)"))
    assert code == 203, output
    assert cluster.requeued is requeued


def test_values_with_quotes_and_spaces_reach_the_ranks_unchanged(tmp_path: Path) -> None:
    value = """it's "$HOME" `id` \\ & ; end"""
    spec = two_nodes()
    cluster_section = spec.cluster.model_copy(update={"environment": {"ODD": value}})
    spec = spec.model_copy(update={"cluster": cluster_section})
    code, output = Cluster(tmp_path, nodes=1).run(script_of('import os; print(repr(os.environ["ODD"]))', spec))
    assert code == 0
    assert repr(value) in output
