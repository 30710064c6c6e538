"""A search whose trials are Workflows: its controller is killed once; the best trial equals the run alone."""

from pathlib import Path

import pytest

from holdfast.pipelines.backends.argo.backend import Argo as ArgoBackend
from holdfast.pipelines.backends.interface import FAILED, RUNNING, SUCCEEDED, RunStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.store import layout, open_store
from holdfast.store.json_reading import read_json_object
from tests.pipelines.backends.argo.emulator import Argo, Workflow
from tests.pipelines.backends.argo.test_emulated import argo, phases, small
from tests.pipelines.backends.killed_search import KILL_AT, Killed, best_of_killed_search
from tests.whole.small import write_corpus, write_spec

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


class Cluster:
    """Workflows of requests. `kill_at`: the number of the Workflow after whose end the controller is gone."""

    def __init__(self, folder: Path, environment: dict[str, str], kill_at: int) -> None:
        self._folder, self._environment, self._kill_at = folder, environment, kill_at
        self.workflows: list[Workflow] = []

    def submit(self, wanted: RunRequest) -> RunStatus:
        template, workflow = ArgoBackend("test").objects(wanted)
        given = {one["name"]: one for one in workflow["spec"]["arguments"]["parameters"]}
        defaults = {one["name"]: one for one in template["spec"]["arguments"]["parameters"]}
        arguments = {"parameters": list((defaults | given).values())}
        pods = Argo([template], self._folder / f"pods-{len(self.workflows)}", self._environment)
        self.workflows.append(pods.submit({**workflow["spec"], "arguments": arguments}))
        if len(self.workflows) == self._kill_at:
            raise Killed
        return RunStatus("argo", workflow["metadata"]["name"], "", RUNNING)

    def status(self, run: str) -> RunStatus:
        state = SUCCEEDED if self.workflows[-1].phase == "Succeeded" else FAILED
        return RunStatus("argo", run, "", state, message=self.workflows[-1].log[-3000:], exit_code=int(state == FAILED))


def test_a_search_on_argo_continues_after_its_controller_and_registers_the_best_trial(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path)
    store = open_store((tmp_path / "home/store").as_uri())
    cluster = Cluster(tmp_path, dict(argo(tmp_path).environment), kill_at=KILL_AT)
    row = best_of_killed_search(tmp_path, store, cluster.submit, cluster.status)
    first, second, promoted, best = cluster.workflows
    for workflow in (first, second, promoted):
        assert workflow.nodes["evaluate"].outputs["word"] == "paused"
        assert phases(workflow)["register"] == "Skipped"
    assert phases(best)["register"] == "Succeeded"
    alone = open_store((tmp_path / "alone").as_uri())
    trial = small(tmp_path).with_overrides(row.changes)
    cluster.submit(RunRequest(trial, alone.url))
    assert read_json_object(alone, layout.result(row.run_id))["state_digest"] == row.state_digest
