"""What the nodes of a Ray cluster are, as `holdfast doctor` asks it: a job that has a task look around on each of them,
`python -m holdfast.pipelines.backends.ray.node_probe --key KEY`.

Promises one line of JSON behind MARK in its log, whatever the nodes say, and no longer than it takes the slowest, or
SECONDS. It takes no room: a busy cluster answers too.
"""

from __future__ import annotations

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
SECONDS = 60.0  # for all nodes to answer
STORE_SECONDS = 15.0
PACKAGES = ("ray", "holdfast", "torch")


@dataclass(frozen=True)
class NodeProbe:
    """A node, as it sees itself."""

    node: str  # its address, as Ray knows it
    resources: dict[str, float]  # in all, by Ray's names
    versions: dict[str, str]  # of Python, and of PACKAGES as far as they are installed
    store: str = ""  # its URL there
    word: str = ""  # what stands under the key; nothing, if nothing does
    problem: str = ""  # with the store
    silent: str = ""  # why the node said nothing of all this


def probe_node(url: str, key: str) -> dict[str, Any]:
    """What this machine has installed, and what it reads under `key` of the store at `url`, or as steps find it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    text = os.environ.get(SPEC)
    url = url or store_url(parse_spec(text) if text else None)
    try:
        word, problem = open_store(url, deadline=STORE_SECONDS).get(key).decode(errors="replace"), ""
    except MissingError:
        word, problem = "", ""
    except (HoldfastError, OSError) as error:
        word, problem = "", str(error)
    return {"versions": found, "store": url, "word": word, "problem": problem}


def probe_all_nodes(url: str, key: str) -> list[NodeProbe]:
    """What every living node says."""
    from holdfast.pipelines.backends.ray.node_probe import probe_node as task  # by its name: this may be __main__

    nodes = [one for one in ray.nodes() if one["Alive"]]
    asked = {}
    for one in nodes:
        place = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
        asked[one["NodeID"]] = ray.remote(task).options(num_cpus=0, scheduling_strategy=place, max_retries=0).remote(
            url, key
        )  # fmt: skip
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=SECONDS)
    found = []
    for one in nodes:
        seen, reference = NodeProbe(one["NodeManagerAddress"], dict(one["Resources"]), {}), asked[one["NodeID"]]
        if reference not in done:
            found.append(replace(seen, silent=f"did not answer in {SECONDS:g} s"))
            continue
        try:
            found.append(replace(seen, **ray.get(reference)))
        except RayError as error:
            last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            found.append(replace(seen, silent=last[:500]))
    return found


def main(argv: Sequence[str]) -> int:
    """Print what every node says."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", allow_abbrev=False)
    parser.add_argument("--key", required=True, help="of the object that the nodes are to read")
    parser.add_argument("--store", default="", help="root of the store; default: as a step finds it")
    arguments = parser.parse_args(argv)
    connect()
    said = [asdict(one) for one in probe_all_nodes(arguments.store, arguments.key)]
    sys.stdout.write(f"{MARK}{json.dumps(said)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
