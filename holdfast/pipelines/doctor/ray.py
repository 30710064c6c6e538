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
        seen = _look(jobs, spec, store_root(store) if store else "", key)
    except HoldfastError as error:
        remedy = "see RAY_API_SERVER_ADDRESS; where it asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        yield Finding(NAME, "fail", str(error), remedy, error.exit_code)
        return
    finally:
        if written:
            with suppress(HoldfastError):
                open_store(url, deadline=TIMEOUT).delete(key)
    yield Finding(NAME, "ok", f"answers at {jobs.address}, with {len(seen)} nodes")
    silent = [one for one in seen if one.silent]
    for one in silent:
        remedy = "each node needs Holdfast in the version that submits, and `python` in the path of `ray start`"
        yield Finding("ray nodes", "fail", f"{one.node}: {one.silent}", remedy, ExitCode.KILLED)
    there = [one for one in seen if not one.silent]
    yield from _versions(there)
    if spec is not None:
        yield from _room(spec, seen)
    yield from _store(there, url, word if written else "")


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
    words = ["python", "-m", MODULE, f"--key={key}", *([f"--store={store}"] if store else [])]
    environment: dict[str, Any] = RayOrder.of(RunRequest(spec)).runtime_env() if spec else {}
    jobs.submit(name, "exec " + shlex.join(words), environment, {"name": "doctor"})
    try:
        job = _ended(jobs, name)
        printed = jobs.logs(name)
    finally:
        with suppress(HoldfastError):
            jobs.forget(name)
    said = next((line.removeprefix(MARK) for line in printed.splitlines() if line.startswith(MARK)), None)
    if said is None:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), job.message)
        raise HoldfastError(f"a job that looks around ended as {job.state}: {last[:500]}")
    return parse_json(said, list[NodeProbe], "what a Ray job found")


def _ended(jobs: Jobs, name: str) -> RayJob:
    end = time.monotonic() + SECONDS
    while True:
        job = next(one for one in jobs.all() if one.id == name)
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
        having = defaultdict(list)
        for one in seen:
            having[one.versions[name]].append(one.node)
        told = "; ".join(f"{found} on {', '.join(sorted(set(nodes)))}" for found, nodes in having.items())
        if len(having) > 1:
            alike = False
            remedy = "install one version on every node: else one run has several bits, or none"
            yield Finding(check, "fail", f"{name} differs: {told}", remedy)
            continue
        here = _installed(name)
        if having and here not in having and name in ("ray", "holdfast"):
            alike = False
            remedy = f"submit with {name} {next(iter(having))}, or install {here} on the nodes"
            yield Finding(check, "fail" if name == "holdfast" else "warn", f"{name}: {told}; here it is {here}", remedy)
    if alike and seen:
        same = ", ".join(f"{name} {found}" for name, found in seen[0].versions.items())
        yield Finding(check, "ok", f"every node has {same}")


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

    nodes = [one.resources for one in seen]
    wanted = {"the training job": (bundle(training_job(spec, PREFIX, 1, "")), spec.cluster.nodes.min)}
    for step in steps_from(start_of(spec), edges_of(spec)):
        if not STEPS[step].launches:
            wanted[step] = (bundle_of_step(step, spec), 1)
    missing = [
        shortfall(who, what, count, nodes)
        for who, (what, count) in wanted.items()
        if sum(fits(what, node) for node in nodes) < count
    ]
    for said in missing:
        remedy = "ask for less in cluster.resources or cluster.steps, use fewer nodes, or add larger ones"
        yield Finding("ray room", "fail", said, remedy, ExitCode.UNSCHEDULABLE)
    if not missing:
        yield Finding("ray room", "ok", f"nodes are large enough for {', '.join(wanted)}")


def _store(seen: Sequence[NodeProbe], url: str, word: str) -> Iterator[Finding]:
    """Check that the nodes read the object that was written here."""
    check, fine = "ray store", True
    remedy = "use a bucket, or a folder that all machines share; name it in the spec, or as HOLDFAST_STORE of the nodes"
    for one in seen:
        what = ""
        if one.problem:
            what = f"{one.node} does not read {one.store}: {one.problem}"
        elif one.store.rstrip("/") != url.rstrip("/"):
            what = f"{one.node} has its store at {one.store}, and this machine at {url}"
        elif one.word != word:
            what = f"{one.node} sees another {one.store} than this machine"
        if what:
            fine = False
            yield Finding(check, "fail", what, remedy)
    if fine and seen:
        yield Finding(check, "ok", f"every node reads {seen[0].store}")
