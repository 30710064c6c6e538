"""Check that a Ray cluster responds, that its nodes are alike and large enough for a spec, and that they read the
store.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from holdfast.launch.choose import require_ray
from holdfast.pipelines.backends.ray.client import Jobs, RayJob
from holdfast.pipelines.backends.ray.emit import PREFIX, RayOrder
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.doctor.findings import TIMEOUT, Finding
from holdfast.pipelines.paths import store_root
from holdfast.pipelines.table import edges_of, start_of, steps_from
from holdfast.spec import Spec
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import open_store

if TYPE_CHECKING:
    from holdfast.pipelines.backends.ray.node_probe import NodeProbe

NAME = "ray"
SECONDS = 150  # limit of the probe job
POLL_SECONDS = 0.5


def check(spec: Spec | None, store: str, url: str) -> Iterator[Finding]:
    """Check for a job of `spec`, with the store at `url` here.

    `store` also names the store for the nodes; if it is empty, they find it as steps do.
    """
    jobs, key, word = Jobs(), f"doctor/{secrets.token_hex(8)}", secrets.token_hex(8)
    written = _written(url, key, word)
    try:
        probes = _look(jobs, spec, store_root(store) if store else "", key)
    except HoldfastError as error:
        remedy = "see RAY_API_SERVER_ADDRESS; where it asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        yield Finding(NAME, "fail", str(error), remedy, error.exit_code)
        return
    finally:
        if written:
            with suppress(HoldfastError):
                open_store(url, deadline=TIMEOUT).delete(key)
    yield Finding(NAME, "ok", f"answers at {jobs.address}, with {len(probes)} nodes")
    silent_nodes = [probe for probe in probes if probe.silent]
    for probe in silent_nodes:
        remedy = "each node needs Holdfast in the version that submits, and `python` in the path of `ray start`"
        yield Finding("ray nodes", "fail", f"{probe.node}: {probe.silent}", remedy, ExitCode.KILLED)
    responding = [probe for probe in probes if not probe.silent]
    yield from _versions(responding)
    if spec is not None:
        yield from _room(spec, probes)
    yield from _store(responding, url, word if written else "")


def _written(url: str, key: str, word: str) -> bool:
    """Write an object for the nodes to read. Another check reports a failing store."""
    try:
        open_store(url, deadline=TIMEOUT).put(key, word.encode())
    except (HoldfastError, OSError):
        return False
    return True


def _look(jobs: Jobs, spec: Spec | None, store: str, key: str) -> list[NodeProbe]:
    """Probe all nodes. Raises the errors of the Jobs API, and HoldfastError when the job fails or takes too long."""
    require_ray()
    from holdfast.pipelines.backends.ray.node_probe import MARK, MODULE, NodeProbe

    name = f"{PREFIX}-doctor-{secrets.token_hex(6)}"
    command = ["python", "-m", MODULE, f"--key={key}", *([f"--store={store}"] if store else [])]
    environment: dict[str, Any] = RayOrder.of(RunRequest(spec)).runtime_env() if spec else {}
    jobs.submit(name, "exec " + shlex.join(command), environment, {"name": "doctor"})
    try:
        job = _ended(jobs, name)
        output = jobs.logs(name)
    finally:
        with suppress(HoldfastError):
            jobs.forget(name)
    result = next((line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)), None)
    if result is None:
        last = next((line for line in reversed(output.splitlines()) if line.strip()), job.message)
        raise HoldfastError(f"a job that looks around ended as {job.state}: {last[:500]}")
    return parse_json(result, list[NodeProbe], "what a Ray job found")


def _ended(jobs: Jobs, name: str) -> RayJob:
    end = time.monotonic() + SECONDS
    while True:
        job = next(candidate for candidate in jobs.all() if candidate.id == name)
        if not job.unfinished:
            return job
        if time.monotonic() > end:
            jobs.stop(name)
            raise HoldfastError(f"a job that looks around was {job.state} for {SECONDS} s: {job.message}")
        time.sleep(POLL_SECONDS)


def _versions(seen: Sequence[NodeProbe]) -> Iterator[Finding]:
    """Check that all nodes have the same versions, and the submitting machine's versions of Ray and Holdfast."""
    check, alike = "ray versions", True
    for name in ("python", "ray", "torch", "holdfast"):
        nodes_by_version = defaultdict(list)
        for probe in seen:
            nodes_by_version[probe.versions[name]].append(probe.node)
        summary = "; ".join(f"{value} on {', '.join(sorted(set(nodes)))}" for value, nodes in nodes_by_version.items())
        if len(nodes_by_version) > 1:
            alike = False
            remedy = "install one version on every node: else one run has several bits, or none"
            yield Finding(check, "fail", f"{name} differs: {summary}", remedy)
            continue
        local_version = _installed(name)
        if nodes_by_version and local_version not in nodes_by_version and name in ("ray", "holdfast"):
            alike = False
            remedy = f"submit with {name} {next(iter(nodes_by_version))}, or install {local_version} on the nodes"
            yield Finding(
                check,
                "fail" if name == "holdfast" else "warn",
                f"{name}: {summary}; here it is {local_version}",
                remedy,
            )
    if alike and seen:
        versions = ", ".join(f"{name} {value}" for name, value in seen[0].versions.items())
        yield Finding(check, "ok", f"every node has {versions}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _room(spec: Spec, seen: Sequence[NodeProbe]) -> Iterator[Finding]:
    """Check that nodes are large enough for the gang and for each step, regardless of their current use."""
    from holdfast.launch.emitters import training_job
    from holdfast.launch.ray.launcher import bundle
    from holdfast.launch.ray.placement_group import fits, shortfall
    from holdfast.pipelines.backends.ray.task import bundle as bundle_of_step
    from holdfast.steps import STEPS

    nodes = [probe.resources for probe in seen]
    bundles = {"the training job": (bundle(training_job(spec, PREFIX, 1, "")), spec.cluster.nodes.min)}
    for step in steps_from(start_of(spec), edges_of(spec)):
        if not STEPS[step].launches:
            bundles[step] = (bundle_of_step(step, spec), 1)
    missing = [
        shortfall(owner, resources, count, nodes)
        for owner, (resources, count) in bundles.items()
        if sum(fits(resources, node) for node in nodes) < count
    ]
    for problem in missing:
        remedy = "ask for less in cluster.resources or cluster.steps, use fewer nodes, or add larger ones"
        yield Finding("ray room", "fail", problem, remedy, ExitCode.UNSCHEDULABLE)
    if not missing:
        yield Finding("ray room", "ok", f"nodes are large enough for {', '.join(bundles)}")


def _store(seen: Sequence[NodeProbe], url: str, word: str) -> Iterator[Finding]:
    """Check that the nodes read the object that was written here."""
    check, is_ok = "ray store", True
    remedy = "use a bucket, or a folder that all machines share; name it in the spec, or as HOLDFAST_STORE of the nodes"
    for one in seen:
        message = ""
        if one.problem:
            message = f"{one.node} does not read {one.store}: {one.problem}"
        elif one.store.rstrip("/") != url.rstrip("/"):
            message = f"{one.node} has its store at {one.store}, and this machine at {url}"
        elif one.word != word:
            message = f"{one.node} sees another {one.store} than this machine"
        if message:
            is_ok = False
            yield Finding(check, "fail", message, remedy)
    if is_ok and seen:
        yield Finding(check, "ok", f"every node reads {seen[0].store}")
