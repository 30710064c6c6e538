"""A job as a Slurm batch script: one torchrun on each node, a warning before the limit, and a requeue when it may help.

A requeued job runs the same launch again; the gang that forms then claims an attempt of its own. The number of the
restart is part of the rendezvous.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.emitters.pod import command, environment
from holdfast.launch.interface import LEAVE_MARGIN, Job
from holdfast.launch.spares import require_no_spares
from holdfast.spec.cluster import amount

MEETING = (
    "from holdfast.launch.ports import free_port; from holdfast.runtime.sealing import new_key; "
    "print(free_port(), new_key())"
)
CAUSE = "import sys; from holdfast.launch.ending import cause_in; print(cause_in(sys.argv[1], int(sys.argv[2])))"
BODY = """
set -euo pipefail
export PYTHONUNBUFFERED=1
{exports}
# What a job step that sbatch was called from left: srun would take it as options.
for inherited in "${{!SLURM_CPU_BIND@}}" "${{!SLURM_MEM_BIND@}}" "${{!SLURM_STEP@}}" "${{!PMI@}}"; do
  unset "$inherited"
done

restart="${{SLURM_RESTART_COUNT:-0}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_NNODES="${{#hosts[@]}}"
export PET_MASTER_ADDR="${{hosts[0]}}"
export PET_RDZV_ID={rendezvous}-"$restart"
# A port that nobody can compute, and the key by which the nodes know each other: it stands in no file and no command.
read -r PET_MASTER_PORT HOLDFAST_LAUNCH_KEY < <(python -c '{meeting}')
export PET_MASTER_PORT HOLDFAST_LAUNCH_KEY

# How each node ended, beside the log, where every node can write: srun itself tells only the highest code.
export endings="$PWD/{name}-$SLURM_JOB_ID-$restart.endings"
mkdir -p "$endings"
for node in "${{!hosts[@]}}"; do : >"$endings/$node"; done

# shellcheck disable=SC2016 # SLURM_NODEID is known on the node only
srun --wait={grace} bash -c \\
  'PET_NODE_RANK="$SLURM_NODEID" HOLDFAST_ENDING_FILE="$endings/$SLURM_NODEID" exec "$@"' node \\
  {command} &
gang=$!
told=false
trap 'told=true; kill -TERM "$gang" 2>/dev/null || true' TERM

while :; do
  code=0
  wait "$gang" || code=$?
  if ! $told; then break; fi
  told=false # the signal ended the wait, not the gang
done

# srun tells the highest code. The one that explains the others is decided where every launcher decides it.
if cause="$(python -c '{cause}' "$endings" "$code")"; then code="$cause"; fi
rm -rf "$endings"

if ((code == 0)); then exit 0; fi
echo "holdfast: {name} ended with exit code $code after $restart restarts" >&2
state="$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T || true)"
if ((code >= 128 && restart < {budget})) && [[ "$state" == RUNNING ]]; then # not cancelled, nor preempted and requeued
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def emit(job: Job) -> str:
    """The script. It runs with the environment of `sbatch`: secrets are exported before, never written down."""
    header = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _options(job)), *_unused(job)]
    lines = BODY.format(
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment(job).items())),
        meeting=MEETING,
        cause=CAUSE,
        rendezvous=shlex.quote(f"{job.run_id}-{job.launch}"),
        name=job.name,
        grace=math.ceil(job.grace_seconds) + LEAVE_MARGIN,
        command=shlex.join(
            command(
                job,
                f"--nproc-per-node={job.processes}",
                f"--rdzv-conf=timeout={job.cluster.nodes.rendezvous_seconds}",
                in_container=False,
            )
        ),
        budget=job.cluster.restarts.budget,
    )
    return "\n".join(header) + "\n" + lines


def allocation(job: Job) -> Iterator[str]:
    """The nodes of a job, and what it takes of each: options of sbatch, without their dashes. Raises SpecError where
    there shall be spare ones."""
    cluster = job.cluster
    nodes = cluster.nodes
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


def _options(job: Job) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield from allocation(job)
    yield "requeue"
    yield "open-mode=append"
    yield "output=%x-%j.log"
    yield f"signal=B:TERM@{math.ceil(job.grace_seconds) + 2 * LEAVE_MARGIN}"
    if job.cluster.deadline_hours is not None:
        yield f"time={math.ceil(job.cluster.deadline_hours * 60)}"


def _unused(job: Job) -> Iterator[str]:
    """What the spec asks of Kubernetes and Slurm takes from elsewhere, so that nothing is left out without a word."""
    elsewhere = {
        "image": "the Python environment of sbatch",
        "queue": "sbatch --partition",
        "priority_class": "sbatch --qos",
        "node_selector": "sbatch --constraint",
        "tolerations": "nothing",
        "volumes": "shared file systems",
        "settings": "the environment of sbatch",
        "secrets": "the environment of sbatch",
        "service_account": "the user of sbatch",
    }
    for name, instead in elsewhere.items():
        if getattr(job.cluster, name) != type(job.cluster).model_fields[name].get_default(call_default_factory=True):
            yield f"# cluster.{name} is for Kubernetes. Here: {instead}."
