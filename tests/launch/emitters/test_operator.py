"""The containers of a PyTorchJob really meet: started here as processes, with the variables that the operator adds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.components.launch.emitters import objects_for, training_job
from holdfast.components.spec import parse_spec

SPEC = """
name: small
store: s3://bucket/prefix
data: {sources: [{uri: x}]}
training: {determinism: "off"}
cluster: {nodes: {min: %d, max: 2, rendezvous_seconds: 60}}
"""


def injected(spec: dict, node: int, port: int) -> dict[str, str]:
    """What the training operator adds to the environment of a pod."""
    common = {"PET_NPROC_PER_NODE": spec["nprocPerNode"]}
    if elastic := spec.get("elasticPolicy"):
        return common | {
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_RDZV_ID": elastic["rdzvId"],
            "PET_RDZV_CONF": ",".join(f"{each['key']}={each['value']}" for each in elastic["rdzvConf"]),
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        }
    return common | {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(node),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize(("fewest", "deeds", "codes"), [
    (2, ["0:0", "1:0"], {0}), (1, ["0:0", "1:0"], {0}), (2, ["0:12", "1:peer"], {12, 143, 202}),
], ids=["static", "elastic", "permanent failure"])  # fmt: skip
def test_the_containers_meet_and_end_with_a_code_of_the_table(
    tmp_path: Path, fewest: int, deeds: list[str], codes: set[int]
) -> None:
    job = training_job(parse_spec(SPEC % fewest), "0123456789abcdef", 1, "s3://bucket/prefix")
    job = replace(job, command=["-m", "tests.launch.worker", *deeds])
    (thing,) = objects_for(job)
    replicas = thing["spec"]["pytorchReplicaSpecs"].values()
    templates = [replica["template"] for replica in replicas for _ in range(replica["replicas"])]
    assert len(templates) == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = []
    for node, template in enumerate(templates):
        (container,) = template["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"] if "HOME" not in each["name"]}
        variables |= {"HOLDFAST_HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
        pods.append(
            subprocess.Popen(
                [sys.executable, *container["command"][1:]],
                env={**os.environ, **variables, **injected(thing["spec"], node, port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    first = pods[0]
    if 12 in codes:  # the operator ends the others of a failed job
        first.wait(100)
        pods[1].terminate()
    outputs = [pod.communicate(timeout=100)[0] for pod in pods]
    assert {pod.returncode for pod in pods} <= codes, outputs
    assert (12 in codes) == (12 in [pod.returncode for pod in pods])
    everything = "".join(outputs)
    assert all(f"rank {rank} " in everything for rank in (0, 1))
