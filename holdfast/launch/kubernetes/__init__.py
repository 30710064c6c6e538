"""Launching on Kubernetes: one job object for each launch, followed through whatever happens to its pods, to the API
server and to this process. Nothing heavy is imported before a launcher is made."""

from holdfast.launch.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
