"""Which launcher runs a gang: the one that HOLDFAST_LAUNCHER names."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from holdfast.launch.interface import Launcher
from holdfast.launch.local import LocalLauncher
from holdfast.launch.spares import require_no_spares
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.extras import require_package
from holdfast.spec.tree import Spec

log = logging.getLogger("holdfast.launch")

VARIABLE = "HOLDFAST_LAUNCHER"


def choose_launcher(spec: Spec, logs: Path) -> Launcher:
    """`local` (the default): torchrun on this machine, with logs in the folder `logs`. `kubernetes`: a job object, as
    `cluster.job` says, in the cluster this pod runs in or that the kubeconfig names. `slurm`: a step of the batch job
    that this process is in, with logs in the folder `logs`. `ray`: a placement group of the Ray that this machine
    belongs to, with logs in the folder `logs`."""
    name = os.environ.get(VARIABLE) or "local"
    if name == "kubernetes":
        from holdfast.launch.kubernetes import KubernetesLauncher

        return KubernetesLauncher(spec.cluster)
    if name == "slurm":
        from holdfast.launch.slurm import SlurmLauncher

        require_no_spares(spec.cluster, "Slurm")
        require_engine(spec)
        return SlurmLauncher(logs)
    if name == "ray":
        require_ray()
        require_no_spares(spec.cluster, "Ray")
        from holdfast.launch.ray.launcher import RayLauncher

        return RayLauncher(logs)
    if name != "local":
        remedy = "use local, kubernetes, slurm or ray"
        raise SpecError([Problem(VARIABLE, name, "is no launcher", remedy)], "environment")
    require_this_machine(spec)
    return LocalLauncher(logs)


def require_ray() -> None:
    """Raises MissingError where Ray is not installed."""
    require_package("ray", "a Ray cluster")


def require_engine(spec: Spec) -> None:
    """Raises MissingError when what computes the steps is not installed here."""
    if spec.parallel.engine == "deepspeed":
        require_package("deepspeed", f"parallel.strategy: {spec.parallel.strategy}", "use parallel.strategy: fsdp")


def require_this_machine(spec: Spec) -> None:
    """Raises SpecError when a spec asks for more machines than this one, MissingError when what its engine needs is not
    installed here."""
    if (nodes := spec.cluster.nodes.max) > 1:
        remedy = "compile it for a cluster, or use --set cluster.nodes.min=1 --set cluster.nodes.max=1: another run"
        raise SpecError([Problem("cluster.nodes.max", nodes, "is more than this one machine", remedy)])
    if spec.cluster.spares:
        log.info("cluster.spares: %d would stand by on a cluster; here is one machine", spec.cluster.spares)
    require_engine(spec)
