"""What a model is scored on: the accelerator that the spec asks for where this machine has it, else the CPU.

A machine may have an accelerator that is not for this step (another run trains on it): none is taken unasked.
"""

from __future__ import annotations

import importlib
import logging

import torch

from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.spec.cluster import Cluster
from holdfast.components.spec.errors import MissingError

log = logging.getLogger("holdfast.scoring")


def scoring_device(cluster: Cluster) -> torch.device:
    """The device for scoring, which the log names. Raises MissingError when the spec gives this step a share of an
    accelerator (`cluster.slice`) and there is none."""
    kind = cluster.accelerator
    accelerator = ACCELERATORS[kind]
    if accelerator.device == "cpu":
        log.info("models are scored on the CPU: the spec asks for no accelerator")
        return torch.device("cpu")
    if reason := _unusable(kind):
        if cluster.slice is not None:
            raise MissingError(
                f"cluster.slice: {cluster.slice} of {kind} is for this step, and {reason}; look whether the pod got "
                "its device, or leave cluster.slice out to score on the CPU"
            )
        log.info("models are scored on the CPU: %s", reason)
        return torch.device("cpu")
    log.info("models are scored on %s (cluster.accelerator: %s)", accelerator.device, kind)
    return torch.device(accelerator.device)


def _unusable(kind: str) -> str:
    """Why this process cannot compute on this kind of accelerator; empty if it can."""
    accelerator = ACCELERATORS[kind]
    for module in accelerator.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{kind} needs the module {module} ({error})"
    runtime = getattr(torch, accelerator.device, None)
    if runtime is None or not runtime.is_available():
        return f"this process sees no {accelerator.device} device"
    if accelerator.device == "cuda":
        built = "nvidia" if torch.version.hip is None else "amd"
        if built != kind:
            return f"this torch is built for {built}"
    return ""
