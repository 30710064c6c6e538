"""The DAG of `holdfast.pipelines.table` as Slurm batch jobs: the sbatch options and the script of each step.

Scripts and command lines contain no secrets: jobs get the submitter's environment from sbatch. `step` reads the results
of earlier steps from the store.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.choose import require_no_spares
from holdfast.launch.emitters import training_job
from holdfast.launch.interface import Job
from holdfast.pipelines.backends.pods import resources_of
from holdfast.pipelines.backends.request import ORDER_DIGITS, RunRequest, identify_request
from holdfast.pipelines.documents import as_yaml
from holdfast.pipelines.paths import store_root, with_absolute_paths
from holdfast.pipelines.table import START, Edge, edges_of, inputs_of, start_of, steps_from
from holdfast.pipelines.trials import text_of
from holdfast.runtime.environment import home, store_url
from holdfast.spec import Spec, SpecError, digest, dump_spec
from holdfast.spec.cluster import amount
from holdfast.spec.errors import Problem
from holdfast.steps import PARAMETERS, STEPS, Step, producer_of
from holdfast.steps.outcomes import EXIT_HANDLER, RUN_ID

PREFIX = "holdfast"
STORE_DIGITS = 6  # the same run in another store is another chain
WARNING_MARGIN = 30  # seconds for a step between its ranks' exit and its time limit

SCRIPT = """#!/bin/bash
# {name}: the step `{step}` of run {key}.
set -eu
export PYTHONUNBUFFERED=1
{exports}
exec {command}
"""


@dataclass(frozen=True)
class Chain:
    """The common data of all jobs of one run."""

    request: RunRequest
    spec: Spec  # as the jobs read it
    key: str  # the run id, or a digest of the request where the run cannot be identified here; then the store's mark
    store: str
    folder: Path  # of the spec and the logs; shared with the nodes
    excluded_nodes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, request: RunRequest) -> Chain:
        """The chain of a request. Paths of the spec become absolute, because jobs run elsewhere. Raises SpecError."""
        spec = with_absolute_paths(request.spec)
        store = store_root(request.store or store_url(spec))
        identity = [request.question(), *([request.trials] if request.trials else [])]
        key = f"{request.run_id or digest(identity)}-{store_mark(store)}"
        _require_one_allocation(request, spec)
        if "\\" in str(home()):
            remedy = "Slurm leaves it out of the paths of logs: name a folder without"
            raise SpecError([Problem("HOLDFAST_HOME", str(home()), "has a backslash in it", remedy)], "Slurm")
        return cls(request, spec, key, store, folder_of(key))

    @property
    def spec_file(self) -> Path:
        """The jobs' spec file; another text is another file."""
        return self.folder / f"spec-{digest([dump_spec(self.spec)])[:ORDER_DIGITS]}.yaml"

    @property
    def trials_file(self) -> Path:
        """The jobs' file with the trials of a sweep."""
        return self.folder / f"trials-{digest([self.request.trials])[:ORDER_DIGITS]}.json"

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges of its DAG."""
        return edges_of(self.spec, sweep=bool(self.request.trials))

    @property
    def steps(self) -> list[str]:
        """The steps in the order in which their jobs are submitted; the exit handler comes last."""
        start = start_of(self.spec, sweep=bool(self.request.trials))
        return [*steps_from(start, self.edges), EXIT_HANDLER]

    def tasks(self, step: str) -> int:
        """The number of array tasks that share the work of a step; 0 without an array."""
        is_array = any(edge.each for edge in self.edges if edge.after == step)
        return self.spec.data.fan_out if is_array else 0

    def array(self, step: str) -> str:
        """The task numbers of a step's array for sbatch; empty without an array. In a sweep they are trial numbers."""
        if tasks := self.tasks(step):
            return f"0-{tasks - 1}"
        if not self.request.trials or not STEPS[step].per_trial:
            return ""
        return f"1-{len(self.request.trials)}" + (
            f"%{self.request.concurrent_trials}" if self.request.concurrent_trials else ""
        )

    def write(self) -> None:
        """Create the folder with the spec and the trials of a sweep."""
        self.folder.mkdir(parents=True, exist_ok=True)
        keep(self.spec_file, dump_spec(self.spec))
        if self.request.trials:
            keep(self.trials_file, text_of(self.request.trials))


def _require_one_allocation(request: RunRequest, spec: Spec) -> None:
    """Raise SpecError for nodes that Slurm cannot give, and for trials that differ in their allocation.

    All tasks of an array have the same allocation.
    """
    allocation = _allocation(spec)
    for trial in request.trials:
        trial_spec = spec.with_overrides(trial)
        if _allocation(trial_spec) != allocation:
            remedy = "sweep over fields that do, or submit such trials as runs of their own"
            raise SpecError([Problem("--over", ", ".join(trial), "does not keep the job's size", remedy)], "sweep")


def _allocation(spec: Spec) -> list[str]:
    return list(_nodes_of(training_job(spec, "", 0, "")))


def _nodes_of(job: Job) -> Iterator[str]:
    """The nodes of a training job and its resources per node, as sbatch options without dashes.

    Raises SpecError for spare nodes.
    """
    cluster, nodes = job.cluster, job.cluster.nodes
    require_no_spares(cluster, "Slurm")
    yield f"nodes={nodes.min}-{nodes.max}" if nodes.min < nodes.max else f"nodes={nodes.max}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={math.ceil(amount(cluster.resources.cpu))}"
    yield f"mem={math.ceil(amount(cluster.resources.memory) / 2**20)}M"
    if gres := ACCELERATORS[cluster.accelerator].gres:
        yield f"gres={gres}:{job.processes}"
    if job.excluded_nodes:
        yield f"exclude={','.join(sorted(job.excluded_nodes))}"
    if cluster.topology.placement != "any":
        wait = "@0" if cluster.topology.placement == "prefer" else ""
        yield f"switches={cluster.topology.tier}{wait}"


def keep(path: Path, text: str) -> None:
    """Write a file atomically: jobs that read it at any time see the whole file or its previous version."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def store_mark(store: str) -> str:
    """A digest of the store at the end of a key."""
    return digest([store])[:STORE_DIGITS]


def folder_of(key: str) -> Path:
    """The folder with the spec and the logs of a chain."""
    return home() / "slurm" / key


def job_name(key: str, step: str) -> str:
    """The name of a step's job. Jobs of one name run one after another."""
    return f"{PREFIX}-{key}-{step}"


def jobs_of(request: RunRequest) -> list[dict[str, Any]]:
    """The sbatch options and the script of each job of a request, with example ids for earlier jobs."""
    chain, job_ids, jobs = Chain.of(request), dict[str, int](), []
    for step in chain.steps:
        jobs.append(
            {"job": step, "sbatch": options_of(chain, step, job_ids), "script": script_of(chain, step, job_ids)}
        )
        job_ids[step] = len(job_ids) + 1
    return jobs


def slurm_text(spec: Spec) -> str:
    """The jobs that `holdfast run --backend slurm` sends for a spec, as YAML."""
    return as_yaml(*jobs_of(identify_request(RunRequest(spec), shared_folders=True)))


def options_of(chain: Chain, step: str, made: Mapping[str, int]) -> list[str]:
    """The sbatch options for the job of `step`, with the ids of earlier jobs."""
    return [f"--{option}" for option in _options(chain, STEPS[step], made)]


def script_of(chain: Chain, step: str, made: Mapping[str, int]) -> str:
    """The batch script of `step`."""
    variables = dict(chain.spec.cluster.environment)
    if chain.request.run_id and not chain.request.trials:
        variables[RUN_ID] = chain.request.run_id
    variables["HOLDFAST_HOME"] = str(home())
    return SCRIPT.format(
        name=job_name(chain.key, step),
        step=step,
        key=chain.key,
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        command=shlex.join(_command(chain, step, made)),
    )


def _options(chain: Chain, step: Step, made: Mapping[str, int]) -> Iterator[str]:
    slurm = chain.spec.cluster.slurm
    yield f"job-name={job_name(chain.key, step.name)}"
    first = f"-{next(iter(made.values()))}" if made else ""
    yield f"comment={chain.request.title} {chain.key}{first}"
    yield f"chdir={chain.folder}"
    if array := chain.array(step.name):
        yield f"array={array}"
    # Slurm replaces %j and similar in the whole path, and %% by %.
    yield f"output={str(chain.folder).replace('%', '%%')}/{step.name}-{'%A_%a' if array else '%j'}.log"
    yield "open-mode=append"  # a requeued job continues in its log
    yield "requeue"
    yield "kill-on-invalid-dep=yes"
    yield f"dependency={_dependency(chain, step.name, made)}"
    if not made:
        yield "hold"  # until the chain is complete
    yield from (
        f"{option}={value}"
        for option, value in (("partition", slurm.partition), ("account", slurm.account), ("qos", slurm.qos))
        if value
    )
    if step.launches:
        job = training_job(chain.spec, chain.key, 0, chain.store, chain.excluded_nodes)
        yield from _nodes_of(job)
        if slurm.constraint:
            yield f"constraint={slurm.constraint}"
        if slurm.slot_minutes:
            yield f"time={slurm.slot_minutes}"
        # SIGTERM to the batch shell ahead of the limit: the ranks save, and the job returns to the queue.
        yield f"signal=B:TERM@{math.ceil(job.grace_seconds) + WARNING_MARGIN}"
        return
    resources = resources_of(step, chain.spec)
    yield "nodes=1"
    yield "ntasks=1"
    yield f"cpus-per-task={math.ceil(amount(resources.cpu))}"
    yield f"mem={math.ceil(amount(resources.memory) / 2**20)}M"
    if resources.accelerators and (gres := ACCELERATORS[chain.spec.cluster.accelerator].gres):
        yield f"gres={gres}:{resources.accelerators}"


def _dependency(chain: Chain, step: str, made: Mapping[str, int]) -> str:
    """The dependencies of a job: the steps before it, and any older job with the same name.

    Tasks of an array share a name and do not wait for each other. In a sweep, the steps of one trial wait for each
    other, and the comparison waits until all of them have ended.
    """
    if step == EXIT_HANDLER:
        return "afterany:" + ":".join(map(str, made.values()))
    dependencies = []
    for edge in (edge for edge in chain.edges if edge.after == step and edge.before in made):
        arrays = chain.request.trials and STEPS[edge.before].per_trial
        kind = "aftercorr" if arrays and STEPS[step].per_trial else "afterany" if arrays else "afterok"
        dependencies.append(f"{kind}:{made[edge.before]}")
    if step == "compare" and START in made:
        dependencies.insert(0, f"afterok:{made[START]}")
    return ",".join([*dependencies, *([] if chain.array(step) else ["singleton"])])


def _command(chain: Chain, step: str, made: Mapping[str, int]) -> list[str]:
    """The command that runs the step. A chain is named after its first job, which learns its id only when it runs."""
    command = [sys.executable, "-m", "holdfast.pipelines.backends.slurm.step", step, f"--key={chain.key}"]
    if made:
        command.append(f"--first={next(iter(made.values()))}")
    for edge in chain.edges:
        if edge.after == step and edge.when and edge.before in made:
            command.append(f"--when={edge.before}={edge.when}")
    if step == EXIT_HANDLER:
        command += [f"--job={name}={number}" for name, number in made.items()]
    parameters = {"salt": chain.request.salt, "replan": str(chain.request.replan).lower()}
    arguments = {"spec": str(chain.spec_file), "store": chain.store}
    arguments |= {name: parameters[name] for name in STEPS[step].inputs if name in PARAMETERS}
    if chain.request.trials:
        command.append(f"--trials-file={chain.trials_file}")
    inputs = [f"--needs={name}={producer_of(name)}" for name in inputs_of(step, made) if producer_of(name)]
    if "compare" in made and step != EXIT_HANDLER:
        inputs = ["--best-of=compare"]
    if STEPS[step].launches and (hours := chain.spec.cluster.deadline_hours):
        command.append(f"--deadline={hours * 3600:g}")
    if tasks := chain.tasks(step):
        inputs.append(f"--tasks={tasks}")
    if chain.spec.code is not None:  # on the command line, and not only in the file
        inputs.append(f"--set=code={chain.spec.code}")
    if (script := chain.spec.train.script) is not None:
        fields: dict[str, object] = {"script": script, "arguments": chain.spec.train.arguments}
        if chain.spec.train.inputs:
            fields["inputs"] = [each.model_dump() for each in chain.spec.train.inputs]
        inputs += [f"--set=train.{name}={json.dumps(value)}" for name, value in fields.items()]
    return [*command, *inputs, *(f"--{name}={value}" for name, value in arguments.items())]
