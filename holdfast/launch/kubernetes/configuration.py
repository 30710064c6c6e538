"""Cluster and credentials of this process, the same for the launcher and for checks of the cluster.

In a pod with a service account, it is the pod's own cluster, else that of the kubeconfig's current context. A context
that is named takes precedence.
"""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes import config
from kubernetes.client import Configuration

from holdfast.runtime.node import NAMESPACE_VARIABLE
from holdfast.spec.errors import AccessDeniedError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoClusterError(AccessDeniedError):
    """Neither a service account nor a usable kubeconfig exists."""


def load_configuration(context: str = "") -> Configuration:
    """Address and credentials, those of `context` if one is named. Raises NoClusterError."""
    configuration = Configuration()
    if context:
        try:
            config.load_kube_config(context=context, client_configuration=configuration)
        except config.ConfigException as error:
            raise NoClusterError(
                f"context {context!r}: cannot be used ({error}); `kubectl config get-contexts` lists yours"
            ) from None
        return configuration
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=configuration)
        except config.ConfigException as error:
            raise NoClusterError(
                f"no cluster is configured: this is not a pod with a service account, and no kubeconfig can be used "
                f"({error}); set KUBECONFIG, or HOLDFAST_LAUNCHER=local to train on this machine"
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
    return _namespace_of("")


def _namespace_of(context: str) -> str:
    """The namespace of a context of the kubeconfig; empty: of the current one."""
    try:
        contexts, current = config.list_kube_config_contexts()
    except config.ConfigException:
        return "default"
    found = next((each for each in contexts if each["name"] == context), current)
    return str(found["context"].get("namespace") or "default")
