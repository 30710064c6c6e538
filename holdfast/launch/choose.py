"""Selection of the launcher that HOLDFAST_LAUNCHER names."""

import logging
import os
from pathlib import Path

from holdfast.launch.interface import Launcher
from holdfast.launch.local import LocalLauncher
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import Problem, SpecError, require_package
from holdfast.spec.tree import Spec

log = logging.getLogger("holdfast.launch")

VARIABLE = "HOLDFAST_LAUNCHER"


def choose_launcher(spec: Spec, logs: Path) -> Launcher:
    """The launcher of this environment, checked against the spec. Logs go to the folder `logs`, except on Kubernetes.

    - `local` (the default): torchrun on this machine
    - `kubernetes`: a job object of kind `cluster.job`, in the cluster of this pod or of the kubeconfig
    - `slurm`: a step of the batch job that this process is in
    - `ssh`: the machines of the file that HOLDFAST_HOSTS names
    - `ray`: a placement group of the Ray cluster that this machine belongs to

    Raises SpecError for an unknown name or a spec that the launcher cannot run, and MissingError for a missing package.
    """
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
    if name == "ssh":
        from holdfast.launch.ssh.hosts import hosts_file, read_hosts, require_enough
        from holdfast.launch.ssh.launcher import SshLauncher

        require_no_spares(spec.cluster, "ssh")
        hosts = read_hosts(hosts_file())
        require_enough(spec.cluster, hosts)
        return SshLauncher(logs, hosts)
    if name != "local":
        remedy = "use local, kubernetes, slurm, ssh or ray"
        raise SpecError([Problem(VARIABLE, name, "is no launcher", remedy)], "environment")
    require_this_machine(spec)
    return LocalLauncher(logs)


def require_ray() -> None:
    """Raises MissingError if Ray is not installed."""
    require_package("ray", "a Ray cluster")


def require_engine(spec: Spec) -> None:
    """Raises MissingError if the package of the spec's engine is not installed here."""
    if spec.parallel.engine == "deepspeed":
        require_package("deepspeed", f"parallel.strategy: {spec.parallel.strategy}", "use parallel.strategy: fsdp")


def require_this_machine(spec: Spec) -> None:
    """Raises SpecError if a spec needs more than one machine, and MissingError if its engine's package is not installed
    here."""
    if (nodes := spec.cluster.nodes.max) > 1:
        remedy = "compile it for a cluster, or use --set cluster.nodes.min=1 --set cluster.nodes.max=1: another run"
        raise SpecError([Problem("cluster.nodes.max", nodes, "is more than this one machine", remedy)])
    if spec.cluster.spares:
        log.info("cluster.spares: %d would stand by on a cluster; here is one machine", spec.cluster.spares)
    require_engine(spec)


def spares_refused(cluster: Cluster, where: str) -> list[Problem]:
    """The problems with spares on `where`, whose nodes meet once for each launch."""
    if not cluster.spares:
        return []
    remedy = "remove it, or run on Kubernetes with cluster.job: pytorchjob"
    return [Problem("cluster.spares", cluster.spares, f"cannot be on {where}, whose nodes meet once a launch", remedy)]


def require_no_spares(cluster: Cluster, where: str) -> None:
    """Raises SpecError if `cluster` has spares, which `where` does not support."""
    if problems := spares_refused(cluster, where):
        raise SpecError(problems, where)
