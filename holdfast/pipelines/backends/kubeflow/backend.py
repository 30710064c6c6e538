"""Kubeflow Pipelines as a backend (`holdfast.pipelines.backends.interface`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.interface import RunStatus, StepStatus, ended_with
from holdfast.pipelines.backends.kubeflow import watch
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.kubeflow.records import with_records
from holdfast.pipelines.backends.kubeflow.submit import in_namespace, submit
from holdfast.pipelines.backends.rank_shell import RankShell, in_pod
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root
from holdfast.runtime.environment import store_url
from holdfast.steps.jobs import outcomes_of


class Kubeflow:
    """A KFP server."""

    name = "kubeflow"
    capabilities = capabilities.KUBEFLOW

    def __init__(self, access: Access, store: str = "", api: Callable[[], Api] = Api.of_this_process) -> None:
        """`store`: URL of the store with the steps' outcomes; default: the one that a run names. `api`: makes the
        client of Kubernetes.
        """
        self._access, self._api = access, api
        self._store = store_root(store) if store else ""
        self._url = self._store or store_url()
        self._connected: Server | None = None

    @property
    def server(self) -> Server:
        """The connection, made on first use."""
        if self._connected is None:
            self._connected = Server(self._access)
        return self._connected

    def objects(self, order: RunRequest) -> list[dict[str, Any]]:
        """The requests that `submit` would send. Without a known server, those to an empty one."""
        dry = Server(self._access, dry=True)
        submit(dry, order)
        return [asdict(request) for request in dry.requests]

    def submit(self, order: RunRequest) -> tuple[RunStatus, bool]:
        """The run of `order` on the server. See `holdfast.pipelines.backends.kubeflow.submit`."""
        submitted = submit(self.server, order)
        return RunStatus(
            self.name, submitted.kfp_run_id, submitted.name, submitted.state, submitted.link
        ), submitted.created

    def status(self, run: str) -> RunStatus:
        """The status of a run and its steps."""
        kfp_run = watch.find_run(self.server, run)
        status = self._status(kfp_run, tuple(watch.steps_of(kfp_run)))
        return with_records(self.server, kfp_run, status, self._store, self._api)

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """All logs of the steps that KFP has."""
        yield from watch.logs(self.server, run, step, follow=follow, pods=self._pods)

    def _pods(self, run: str) -> list[str]:
        """The names of the pods that the steps reported."""
        return [outcome.pod for outcome in outcomes_of(run, "", store=self._url) if outcome.pod]

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Terminate a run."""
        kfp_run, ended = watch.cancel(self.server, run)
        return self._status(kfp_run), ended

    def list(self) -> list[RunStatus]:
        """All runs on the server, newest first."""
        runs = self.server.every(
            self.server.runs.run_service_list_runs, "runs", sort_by="created_at desc", **in_namespace(self.server)
        )
        return [self._status(run) for run in runs]

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """`kubectl exec` in the pod of the rank."""
        return in_pod(shell)

    def resume(self, order: RunRequest) -> tuple[RunStatus, bool]:
        """Submit the request again. A new run replaces one that ended without success, and resumes its training."""
        return self.submit(order)

    def _status(self, run: Any, steps: tuple[StepStatus, ...] = ()) -> RunStatus:
        message = str(run.error.message or "") if run.error else ""
        link = self.server.link("runs", run.run_id)
        state = watch.state_of(run)
        code = ended_with(state, steps)
        return RunStatus(self.name, run.run_id, run.display_name, state, link, message, steps, code)
