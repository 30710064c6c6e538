"""Launching on Kubernetes: one job object for each launch, followed through failures of its pods, of the API server and
of this process. Importing it loads nothing heavy."""

from holdfast.launch.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
