"""Check that Slurm responds, has the partition of a spec, and sees the folders that its jobs need."""

import math
import secrets
from collections.abc import Iterator
from pathlib import Path

from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.doctor.findings import Finding
from holdfast.runtime.environment import home
from holdfast.spec import Spec
from holdfast.spec.cluster import amount
from holdfast.spec.errors import HoldfastError, MissingError

NAME = "slurm"
FREE_SECONDS = 20  # to wait for a free node for the check


def check(spec: Spec | None, store: str) -> Iterator[Finding]:
    """Check for jobs of `spec`, with the store at the URL `store`."""
    try:
        partitions = client.partitions()
    except (HoldfastError, ValueError) as error:
        code = error.exit_code if isinstance(error, HoldfastError) else MissingError.exit_code
        yield Finding(NAME, "fail", str(error), "see SLURM_CONF and `scontrol ping`", code)
        return
    yield Finding(NAME, "ok", f"answers; partitions: {', '.join(partition.name for partition in partitions)}")
    partition_names = spec.cluster.slurm.partition if spec else None
    names = (
        partition_names.split(",")
        if partition_names
        else [partition.name for partition in partitions if partition.default]
    )
    if not names:
        yield Finding(NAME, "fail", "there is no default partition", "name one in cluster.slurm.partition")
        return
    for name in names:
        yield _partition(name, {partition.name: partition for partition in partitions}, spec)
    options = _options(spec)
    yield _folder("home folder", home() / "slurm", options, "set HOLDFAST_HOME to a folder that all nodes have")
    if store.startswith("file:"):
        remedy = "a folder must lie on a file system that all nodes share; else set HOLDFAST_STORE=s3://bucket/prefix"
        yield _folder("store", Path(store.removeprefix("file://")), options, remedy)


def _partition(name: str, known: dict[str, client.Partition], spec: Spec | None) -> Finding:
    found = known.get(name)
    if found is None:
        remedy = f"use one of {', '.join(known)} in cluster.slurm.partition"
        return Finding("slurm partition", "fail", f"there is no partition {name}", remedy)
    if not found.up:
        return Finding("slurm partition", "warn", f"{name} is not up: jobs wait", "ask an administrator")
    if spec is not None:
        nodes, cores = spec.cluster.nodes.min, math.ceil(amount(spec.cluster.resources.cpu))
        memory = math.ceil(amount(spec.cluster.resources.memory) / 2**20)
        if nodes > found.nodes:
            remedy = "use fewer cluster.nodes, or another partition"
            return Finding("slurm partition", "fail", f"{name} has {found.nodes} nodes, not {nodes}", remedy)
        if cores > found.cores or memory > found.memory:
            message = (
                f"{name} has nodes of {found.cores} cores and {found.memory} MiB; {cores} and {memory} are requested"
            )
            return Finding("slurm partition", "warn", message, "only its larger nodes will do: see cluster.resources")
    return Finding("slurm partition", "ok", f"{name} is up, with {found.nodes} nodes")


def _folder(what: str, path: Path, options: list[str], remedy: str) -> Finding:
    """Check that a node reads a file that is written here."""
    check, word = f"slurm {what}", secrets.token_hex(8)
    probe = path / f"doctor-{word}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text(word)
        content = client.on_a_node(["cat", str(probe)], options, FREE_SECONDS)
    except OSError as error:
        return Finding(check, "fail", f"{path}: {error.strerror}", remedy)
    except HoldfastError as error:
        message = str(error).splitlines()[1] if "\n" in str(error) else str(error)
        if "cat:" in message or "No such file" in message:
            return Finding(check, "fail", f"no node sees {path}", remedy)
        return Finding(
            check, "warn", f"could not look from a node: {message.strip()}", "run this again when one is free"
        )
    finally:
        probe.unlink(missing_ok=True)
    if content.strip() != word:
        return Finding(check, "fail", f"a node sees another {path}", remedy)
    return Finding(check, "ok", f"nodes see {path}")


def _options(spec: Spec | None) -> list[str]:
    if spec is None:
        return []
    slurm = spec.cluster.slurm
    fields = (("partition", slurm.partition), ("account", slurm.account), ("qos", slurm.qos))
    return [f"--{option}={value}" for option, value in fields if value]
