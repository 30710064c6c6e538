"""Execution plan of a training script: what its bits depend on besides its code."""

import os

import torch

from holdfast.code.packages import installed_packages
from holdfast.collectives import Gang
from holdfast.rank.plan import require_equal_packages, require_one_plan, surroundings_of
from holdfast.script.assignment import ScriptAssignment
from holdfast.spec.identity import digest
from holdfast.spec.plan import Plan


def agree_on_plan(assignment: ScriptAssignment, device: torch.device, gang: Gang) -> Plan:
    """The plan that all ranks of the gang share. A collective call. Raises PlanChangedError for ranks with different
    packages or plans."""
    packages = list(installed_packages())
    plan = Plan(
        settings={
            "parallel.strategy": "script",
            "parallel.processes": assignment.processes,
            "parallel.threads": assignment.threads,
            "cluster.accelerator": assignment.accelerator,
            "cluster.nodes": gang.size // assignment.processes,
        },
        surroundings=surroundings_of(device, "script")
        | {"packages": digest(packages), "variable PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "not set")},
    )
    plans = gang.all_gather(plan, Plan)
    if len({each.surroundings["packages"] for each in plans}) > 1:
        require_equal_packages(gang.all_gather(packages, list[str]), assignment.determinism)
    require_one_plan(plans, assignment.determinism)
    return plan
