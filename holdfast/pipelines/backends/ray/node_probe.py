"""Probe of a Ray cluster's nodes for `holdfast doctor`: a job that runs one task on each node.

Run as `python -m holdfast.pipelines.backends.ray.node_probe --key KEY`. The log gets one line of JSON after MARK, also
when nodes fail. It takes as long as the slowest node, at most SECONDS. The tasks reserve no resources, so a busy
cluster responds too.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast.launch.ray.launcher import connect
from holdfast.pipelines.backends.ray.emit import SPEC
from holdfast.runtime.environment import store_url
from holdfast.spec import parse_spec
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.store import open_store

MODULE = "holdfast.pipelines.backends.ray.node_probe"
MARK = "holdfast-look: "
SECONDS = 60.0  # for all nodes to respond
STORE_SECONDS = 15.0
PACKAGES = ("ray", "holdfast", "torch")


@dataclass(frozen=True)
class NodeProbe:
    """The state of a node, as the node reports it."""

    node: str  # its address in Ray
    resources: dict[str, float]  # total, by Ray's names
    versions: dict[str, str]  # of Python, and of the installed PACKAGES
    store: str = ""  # URL of the store on that node
    word: str = ""  # content under the key; empty if missing
    problem: str = ""  # error of the store
    silent: str = ""  # why the node did not respond


def probe_node(url: str, key: str) -> dict[str, Any]:
    """Installed versions of this machine, and the content under `key` of the store at `url` (default: the steps')."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            versions[name] = "none"
    text = os.environ.get(SPEC)
    url = url or store_url(parse_spec(text) if text else None)
    try:
        word, problem = open_store(url, deadline=STORE_SECONDS).get(key).decode(errors="replace"), ""
    except MissingError:
        word, problem = "", ""
    except (HoldfastError, OSError) as error:
        word, problem = "", str(error)
    return {"versions": versions, "store": url, "word": word, "problem": problem}


def probe_all_nodes(url: str, key: str) -> list[NodeProbe]:
    """Probe every living node."""
    from holdfast.pipelines.backends.ray.node_probe import probe_node as task  # by name: this may be __main__

    nodes = [node for node in ray.nodes() if node["Alive"]]
    references = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        references[node["NodeID"]] = (
            ray.remote(task).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0).remote(url, key)
        )
    done, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=SECONDS)
    probes = []
    for node in nodes:
        probe, reference = (
            NodeProbe(node["NodeManagerAddress"], dict(node["Resources"]), {}),
            references[node["NodeID"]],
        )
        if reference not in done:
            probes.append(replace(probe, silent=f"did not answer in {SECONDS:g} s"))
            continue
        try:
            probes.append(replace(probe, **ray.get(reference)))
        except RayError as error:
            last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            probes.append(replace(probe, silent=last[:500]))
    return probes


def main(argv: Sequence[str]) -> int:
    """Print the probes of all nodes."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", allow_abbrev=False)
    parser.add_argument("--key", required=True, help="of the object that the nodes are to read")
    parser.add_argument("--store", default="", help="root of the store; default: as a step finds it")
    arguments = parser.parse_args(argv)
    connect()
    probes = [asdict(probe) for probe in probe_all_nodes(arguments.store, arguments.key)]
    sys.stdout.write(f"{MARK}{json.dumps(probes)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
