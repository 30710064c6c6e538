"""Devices for scoring: the accelerators that are assigned to this step, otherwise the CPU.

A machine may have an accelerator that is not for this step. Another run may train on it, or a container runtime may
show every device to every pod. So no accelerator is used without a request.
"""

import importlib
import logging

import torch

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.runtime.environment import in_step_pod
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MissingError

log = logging.getLogger("holdfast.scoring")
CPU = (torch.device("cpu"),)


def scoring_devices(cluster: Cluster) -> tuple[torch.device, ...]:
    """The devices for scoring; the log names them.

    In a pod they are those that the spec gives to the step (`cluster.steps.evaluate.accelerators`, or the share
    `cluster.slice`). Elsewhere it is one of `cluster.accelerator`, if the machine has it. Raises MissingError when the
    spec gives the step accelerators and this process does not see them.
    """
    kind, own = cluster.accelerator, cluster.steps.evaluate.accelerators
    accelerator = ACCELERATORS[kind]
    field = "cluster.steps.evaluate.accelerators" if own else "cluster.slice"
    declared = own or (1 if cluster.slice is not None else 0)
    if accelerator.device == "cpu":
        log.info("models are scored on the CPU: the spec asks for no accelerator")
        return CPU
    if in_step_pod() and not declared:
        log.info(
            "models are scored on the CPU: the spec gives this step no accelerator "
            "(cluster.steps.evaluate.accelerators, cluster.slice)"
        )
        return CPU
    count = declared or 1
    if reason := _unusable(kind, count):
        if declared:
            raise MissingError(
                f"{field}: {own or cluster.slice} of {kind} is for this step, and {reason}; look whether the pod got "
                f"its device, or leave {field} out to score on the CPU"
            )
        log.info("models are scored on the CPU: %s", reason)
        return CPU
    log.info("models are scored on %d %s (cluster.accelerator: %s)", count, accelerator.device, kind)
    if count == 1:
        return (torch.device(accelerator.device),)
    return tuple(torch.device(accelerator.device, index) for index in range(count))


def _unusable(kind: str, wanted: int) -> str:
    """Why this process cannot compute on `wanted` accelerators of this kind; empty if it can."""
    accelerator = ACCELERATORS[kind]
    for module in accelerator.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{kind} needs the module {module} ({error})"
    runtime = getattr(torch, accelerator.device, None)
    if runtime is None or not runtime.is_available():
        return f"this process sees no {accelerator.device} device"
    if runtime.device_count() < wanted:
        return f"this process sees {runtime.device_count()} {accelerator.device} devices"
    if accelerator.device == "cuda":
        built = "nvidia" if torch.version.hip is None else "amd"
        if built != kind:
            return f"this torch is built for {built}"
    return ""
