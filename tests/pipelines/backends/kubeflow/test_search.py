"""A search whose trials are runs of Kubeflow Pipelines: its controller is killed once; the best equals the run alone.

A KFP API server of `tests/kubeflow_server.py` takes the requests of KFP's client. `kfp.local` runs the pipelines that
it was given, with the parameters of the runs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
from holdfast.pipelines.backends.kubeflow.connection import Access
from holdfast.pipelines.backends.request import RunRequest
from holdfast.store import layout, open_store
from holdfast.store.json_reading import read_json_object
from tests import empty_mlflow
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.argo.test_emulated import small
from tests.pipelines.backends.killed_search import KILL_AT, Killed, best_of_killed_search
from tests.whole.small import ROOT, environment, write_corpus, write_spec

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


class Cluster:
    """Runs of requests. `kill_at`: the number of the run after whose end the controller is gone."""

    def __init__(self, server: KubeflowServer, folder: Path, store: str, kill_at: int) -> None:
        self._server, self._folder, self._kill_at = server, folder, kill_at
        self._kubeflow = Kubeflow(Access(endpoint=server.endpoint), store)
        self.words: list[str] = []  # of the verdict of each run

    def submit(self, wanted: RunRequest) -> RunStatus:
        status, created = self._kubeflow.submit(wanted)
        assert created, "no run is submitted twice"
        self._run(status.id)
        if len(self.words) == self._kill_at:
            raise Killed
        return self._kubeflow.status(status.id)

    def status(self, run: str) -> RunStatus:
        return self._kubeflow.status(run)

    def _run(self, identity: str) -> None:
        """Run the pipeline of a run as the server has it, and report its steps."""
        run, folder = self._server.runs[identity], self._folder / f"run-{len(self.words)}"
        folder.mkdir()
        version = self._server.versions[run["pipeline_version_reference"]["pipeline_version_id"]]
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(version["pipeline_spec"]["pipeline_spec"]))
        (folder / "arguments.json").write_text(json.dumps(run["runtime_config"]["parameters"]))
        ran = subprocess.run(
            [sys.executable, "-m", "tests.whole.kfp_local", str(folder)],
            env=environment(self._folder / "home", HOLDFAST_LAUNCHER="local", PYTHONPATH=str(ROOT)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        outcomes = [json.loads(path.read_text()) for path in (folder / "outcomes").glob("*.json")]
        self.words.append(next(str(one["result"]) for one in outcomes if one["step"] == "evaluate"))
        self._server.progress(identity, "SUCCEEDED", {one["step"]: "SUCCEEDED" for one in outcomes})


def test_a_search_on_kubeflow_continues_after_its_controller_and_registers_the_best_trial(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path)
    empty_mlflow.place(tmp_path / "home")
    store = open_store((tmp_path / "home/store").as_uri())
    with KubeflowServer() as server:
        cluster = Cluster(server, tmp_path, store.url, kill_at=KILL_AT)
        row = best_of_killed_search(tmp_path, store, cluster.submit, cluster.status)
        assert all(words.startswith("paused: ") or words == "paused" for words in cluster.words[:3])
        assert len(server.runs) == 4, "two rungs, the promotion, and the run of the best trial"
        registered = (tmp_path / "home/store/runs").glob("*/registrations/*.json")
        assert [path.parent.parent.name for path in registered] == [row.run_id]
        empty_mlflow.place(tmp_path / "elsewhere/home")
        alone = open_store((tmp_path / "elsewhere/home/store").as_uri())
        elsewhere = Cluster(server, tmp_path / "elsewhere", alone.url, kill_at=0)
        elsewhere.submit(RunRequest(small(tmp_path).with_overrides(row.changes), alone.url))
    assert read_json_object(alone, layout.result(row.run_id))["state_digest"] == row.state_digest
