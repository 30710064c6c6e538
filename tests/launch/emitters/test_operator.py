"""The containers of a PyTorchJob complete their rendezvous: started here as processes, with the operator's
variables."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.emitters import objects_for, training_job
from holdfast.launch.exits import parse_exit_report
from holdfast.spec import ExitCode, parse_spec
from tests import warm
from tests.ports import LAUNCH_KEY, free_port

SPEC = """
name: small
store: s3://bucket/prefix
data: {sources: [{uri: x}]}
training: {determinism: "off"}
cluster: {nodes: {min: %d, max: 2, rendezvous_seconds: 60}}
"""


def injected(thing: dict[str, Any], node: int) -> dict[str, str]:
    """What the training operator (1.9) adds to a worker's environment in a job without a master. The flags repeat
    it, and add more."""
    spec = thing["spec"]
    common = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": spec["nprocPerNode"], "HOLDFAST_NODE_RANK": str(node)}
    if elastic := spec.get("elasticPolicy"):
        return common | {
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"),
            "PET_RDZV_ENDPOINT": f"{thing['metadata']['name']}-worker-0:23456",
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        }
    return common | {"PET_NNODES": str(spec["pytorchReplicaSpecs"]["Worker"]["replicas"])}


def command(container: dict[str, Any], name: str, node: int, port: int) -> list[str]:
    """The command as the kubelet starts it, on one machine: worker 0 is here, at a free port."""
    places = {f"{name}-worker-0:23456": f"127.0.0.1:{port}", f"{name}-worker-0": "127.0.0.1"}
    places |= {"--master-port=23456": f"--master-port={port}", "$(HOLDFAST_NODE_RANK)": str(node)}
    arguments = container["command"][1:]
    for placeholder, place in places.items():
        arguments = [argument.replace(placeholder, place) for argument in arguments]
    return [sys.executable, *arguments]


def start(thing: dict[str, Any], node: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """One pod of a job, as a process."""
    (replica,) = thing["spec"]["pytorchReplicaSpecs"].values()
    (container,) = replica["template"]["spec"]["containers"]
    variables = {
        variable["name"]: variable["value"]
        for variable in container["env"]
        if "value" in variable and "HOME" not in variable["name"]
    }
    (report := folder / f"ending-{node}").touch()
    variables |= {"HOLDFAST_HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo", "HOLDFAST_EXIT_REPORT": str(report)}
    return warm.popen(
        command(container, thing["metadata"]["name"], node, port),
        {**os.environ, **LAUNCH_KEY, **variables, **injected(thing, node)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fewest", "deeds", "codes"), [
    (2, ["0:0", "1:0"], {0}), (1, ["0:0", "1:0"], {0}), (2, ["0:12", "1:peer"], {12, 143, 202}),
], ids=["static", "elastic", "permanent failure"])  # fmt: skip
def test_the_containers_meet_and_end_with_a_code_of_the_table(
    tmp_path: Path, fewest: int, deeds: list[str], codes: set[int]
) -> None:
    job = training_job(parse_spec(SPEC % fewest), "0123456789abcdef", 1, "s3://bucket/prefix")
    job = replace(job, command=["-m", "tests.launch.worker", *deeds])
    (manifest,) = objects_for(job)
    port = free_port()
    pods = [start(manifest, node, port, tmp_path) for node in range(2)]
    first = pods[0]
    if 12 in codes:  # the operator ends the other pods of a failed job
        first.wait(200)
        pods[1].terminate()
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert {pod.returncode for pod in pods} <= codes, outputs
    assert (12 in codes) == (12 in [pod.returncode for pod in pods])
    everything = "".join(outputs)
    assert all(f"rank {rank} " in everything for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("most", "node"), [(2, 0), (2, 1), (3, 1)], ids=["the first", "another", "elastic"])
def test_a_node_whose_peer_never_joins_ends_with_a_rendezvous_timeout(tmp_path: Path, most: int, node: int) -> None:
    spec = parse_spec(
        SPEC % 2, [f"cluster.nodes.max={most}", "cluster.nodes.rendezvous_seconds=3", "training.global_batch=48"]
    )
    job = training_job(spec, "0123456789abcdef", 1, "s3://bucket/prefix")
    (manifest,) = objects_for(replace(job, command=["-m", "tests.launch.worker", "0:0", "1:0"]))
    pod = start(manifest, node, free_port(), tmp_path)
    output, _ = pod.communicate(timeout=200)
    assert pod.returncode == ExitCode.RENDEZVOUS_TIMEOUT, output
    ending = parse_exit_report((tmp_path / f"ending-{node}").read_text())
    assert ending is not None and ending.code == ExitCode.RENDEZVOUS_TIMEOUT
    assert ending.detail.startswith("the nodes did not meet within cluster.nodes.rendezvous_seconds: "), ending
