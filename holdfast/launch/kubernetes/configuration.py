"""Cluster and credentials of this process, the same for the launcher and for checks of the cluster.

In a pod with a service account, it is the pod's own cluster, else that of the kubeconfig's current context. A context
that is named takes precedence.
"""

import os
from pathlib import Path

import yaml
from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.config import kube_config

from holdfast.runtime.node import NAMESPACE_VARIABLE
from holdfast.spec.errors import AccessDeniedError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


# The last two: the library reads a file of YAML that is no kubeconfig.
_UNUSABLE = (config.ConfigException, yaml.YAMLError, OSError, UnicodeDecodeError, TypeError, AttributeError)


class NoClusterError(AccessDeniedError):
    """Neither a service account nor a usable kubeconfig exists."""


def load_configuration(context: str = "") -> Configuration:
    """Address and credentials, those of `context` if one is named. Raises NoClusterError."""
    configuration = Configuration()
    if context:
        try:
            config.load_kube_config(context=context, client_configuration=configuration)
        except _UNUSABLE as error:
            message = f"cannot be used: {_first_line(error)} ({kube_config.KUBE_CONFIG_DEFAULT_LOCATION})"
            remedy = "set KUBECONFIG to the file that has it; `kubectl config get-contexts` lists its contexts"
            raise NoClusterError(f"context {context!r} {message}; {remedy}") from None
        return configuration
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=configuration)
        except _UNUSABLE as error:
            raise NoClusterError(
                f"no cluster is configured: this is not a pod with a service account, and no kubeconfig can be used "
                f"({_first_line(error)}); set KUBECONFIG, or HOLDFAST_LAUNCHER=local to train on this machine"
            ) from None
    return configuration


def own_namespace(context: str = "") -> str:
    """The namespace of this pod (HOLDFAST_POD_NAMESPACE, else its service account's), else that of the kubeconfig's
    current context. If `context` is named, that context's."""
    if context:
        return _namespace_of(context)
    if namespace := os.environ.get(NAMESPACE_VARIABLE):
        return namespace
    if NAMESPACE_FILE.exists():
        return NAMESPACE_FILE.read_text().strip()
    try:
        _, current = config.list_kube_config_contexts()
    except _UNUSABLE:
        return "default"
    return str(current["context"].get("namespace") or "default")


def _namespace_of(context: str) -> str:
    """The namespace of a context of the kubeconfig, which may have no current one."""
    try:
        merged = kube_config.KubeConfigMerger(kube_config.KUBE_CONFIG_DEFAULT_LOCATION).config
    except _UNUSABLE:
        return "default"
    for each in (merged.safe_get("contexts") if merged is not None else None) or ():
        if each.safe_get("name") == context and (settings := each.safe_get("context")) is not None:
            return str(settings.get("namespace") or "default")
    return "default"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
