"""The log of a pod of a KFP run, from KFP's server, Kubernetes or KFP's UI.

The list of tasks names Argo's node (`<workflow>-<hash>`); its pod is `<workflow>-<template>-<hash>`. KFP's own server
finds an archived log by the node, and a live pod, if at all, by its name. Without a log it responds 200 with
`error_message`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from urllib.parse import urlencode

from holdfast.launch.kubernetes.api_errors import TransientError
from holdfast.launch.kubernetes.client import PODS, Api
from holdfast.launch.kubernetes.output import text_lines
from holdfast.pipelines.backends.kubeflow.connection import Server
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json_object

RUN_LABEL, CONTAINER = "pipeline/runid", "main"
DEFAULT_NAMESPACE = "kubeflow"  # of runs on a server with one user
KUBERNETES_SECONDS = 5.0  # for a cluster that may be another one, or unavailable

log = logging.getLogger("holdfast.kubeflow")


class PodLogs:
    """Reads the logs of the pods of one run."""

    def __init__(self, server: Server, run_id: str, pods: Iterable[str] = (), api: Api | None = None) -> None:
        """`pods`: names of known pods, such as those that the steps reported. `api`: of Kubernetes; default: this
        process's, if it has one.
        """
        self._server, self._run_id, self._known, self._api = server, run_id, set(pods), api
        self._namespace = server.access.namespace or DEFAULT_NAMESPACE
        self._cluster: Api | None = None  # a cluster with pods of the run
        self._away = False  # whether Kubernetes is unavailable

    def learn(self, pods: Iterable[str]) -> None:
        """Add names of known pods."""
        self._known |= set(pods)

    def read(self, node: str) -> bytes:
        """The current log of a node's pod. Raises MissingError with the responses of all sources."""
        answers = []
        for source in (self._archived, self._in_kubernetes, self._of_the_ui):
            for read in source(node):
                try:
                    return read()
                except (HoldfastError, TransientError) as error:
                    answers.append(str(error))
        raise MissingError("; ".join(dict.fromkeys(answers)) or f"{node}: nothing has its log")

    def _archived(self, node: str) -> Iterator[Callable[[], bytes]]:
        for name in (*self._pods_of(node, self._known), node):
            yield lambda name=name: self._fetch(f"/apis/v1alpha1/runs/{self._run_id}/nodes/{name}/log")  # type: ignore[misc]

    def _in_kubernetes(self, node: str) -> Iterator[Callable[[], bytes]]:
        if (api := self._list_cluster(node)) is not None:
            for name in self._pods_of(node, self._known):
                yield partial(_log_in, api, name)

    def _of_the_ui(self, node: str) -> Iterator[Callable[[], bytes]]:
        for name in self._pods_of(node, self._known):
            query = urlencode({"podname": name, "runid": self._run_id, "podnamespace": self._namespace})
            yield lambda query=query: self._fetch(f"/k8s/pod/logs?{query}")  # type: ignore[misc]

    def _fetch(self, path: str) -> bytes:
        content = b"".join(self._server.stream(path))
        if (message := error_in(content)) is not None:
            raise MissingError(f"{self._server.host}: {message}")
        return content

    def _list_cluster(self, node: str) -> Api | None:
        """The cluster, if it has pods of the run.

        It is listed again while the pod of `node` is unknown, because steps begin while the log is followed. An
        unavailable cluster is not tried again.
        """
        if self._away or (self._cluster is not None and self._pods_of(node, self._known)):
            return self._cluster
        try:
            api = self._api or Api.of_this_process(self._namespace, KUBERNETES_SECONDS)
            pods, _ = api.list(PODS, f"{RUN_LABEL}={self._run_id}")
        except (HoldfastError, TransientError, OSError):
            self._away = True
            return self._cluster
        self._known |= {str(pod["metadata"]["name"]) for pod in pods}
        self._cluster = api if pods else self._cluster
        return self._cluster

    @staticmethod
    def _pods_of(node: str, names: Iterable[str]) -> list[str]:
        workflow, _, mark = node.rpartition("-")
        return sorted(name for name in names if name.startswith(f"{workflow}-") and name.endswith(f"-{mark}"))


def error_in(content: bytes) -> str | None:
    """The error in a KFP response with status 200; None for a log."""
    if not content.startswith(b'{"error'):
        return None
    try:
        reply = parse_json_object(content, "the log")
    except DataError:
        return None
    if not reply or not set(reply) <= {"error_message", "error_details"}:
        return None
    return str(next(iter(reply.values())))


def _log_in(api: Api, pod: str) -> bytes:
    with api.log(pod, CONTAINER, follow=False) as lines:
        return "".join(f"{line}\n" for line in text_lines(lines)).encode()
