"""A train step in a pod of Kubeflow Pipelines: Python has less than a second after SIGTERM, so its first act must
suffice."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.spec import Spec, dump_spec
from tests.cluster.emulation import Emulation
from tests.cluster.objects import NAMESPACE, Object
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

ROOT = Path(__file__).parents[2]
SERVE = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(204)); time.sleep(600)"


class Step:
    """The train step's container in pod launcher-1; its ranks do nothing."""

    def __init__(self, cluster: Emulation, folder: Path) -> None:
        self.cluster = cluster
        cluster.start_workflow()
        cluster.kubelet.program = lambda pod: [sys.executable, "-c", SERVE]
        store = new_store(folder / "store")
        volume = f'[{{claim: store, path: "{folder / "store"}"}}]'
        spec: Spec = tiny_spec("cluster.nodes={min: 2, max: 2}", f"cluster.volumes={volume}")
        (folder / "spec.yaml").write_text(dump_spec(spec))
        command = [
            sys.executable,
            "-m",
            "tests.cluster.kfp_launcher",
            sys.executable,
            "-m",
            "holdfast.components.train",
        ]
        command += ["--spec", str(folder / "spec.yaml"), "--dataset-id", DATASET_ID, "--store", store.url]
        pod = cluster.objects.get("pods", "launcher-1")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "HOLDFAST_HOME": str(folder / "home"),
            "KUBECONFIG": str(cluster.kubeconfig(folder / "kubeconfig")), "HOLDFAST_LAUNCHER": "kubernetes",
            "HOLDFAST_POD_NAME": "launcher-1", "HOLDFAST_POD_NAMESPACE": NAMESPACE,
            "HOLDFAST_POD_UID": pod["metadata"]["uid"],
        }  # fmt: skip
        self.log = folder / "step.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, check: Callable[[], object]) -> None:
        with self.cluster.objects.changed:
            assert self.cluster.objects.changed.wait_for(check, 240), self.log.read_text()

    def ranks_run(self) -> bool:
        pods = [pod for pod in self.cluster.objects.all("pods", NAMESPACE) if "launcher" not in pod["metadata"]["name"]]
        return len(pods) == 2 and all(pod.get("status", {}).get("phase") == "Running" for pod in pods)

    def terminate(self, enough: Callable[[], object]) -> None:
        """Send SIGTERM to the container, which ends as a whole as soon as `enough` holds."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (python,) = (child for child in children if "holdfast.components.train" in child.cmdline()[1:3])
        self.process.terminate()
        while not enough():
            try:
                python.wait(0.05)
                break
            except psutil.TimeoutExpired:
                pass
        with suppress(psutil.NoSuchProcess):
            python.kill()
        assert self.process.wait(240) == 143


@pytest.fixture
def step(cluster: Emulation, tmp_path: Path) -> Iterator[Step]:
    """A step whose ranks run."""
    train_step = Step(cluster, tmp_path)
    train_step.wait(train_step.ranks_run)
    yield train_step
    if train_step.process.poll() is None:
        os.killpg(train_step.process.pid, signal.SIGKILL)
        train_step.process.wait()


def test_a_pipeline_run_that_is_ended_takes_its_job_with_it_before_anything_else(step: Step) -> None:
    def end(flow: Object) -> None:
        flow["spec"]["activeDeadlineSeconds"] = 0  # as Kubeflow terminates a run

    step.cluster.objects.change("workflows", "pipeline", end)
    step.terminate(enough=lambda: step.cluster.jobs() == [])
    assert step.cluster.jobs() == [], step.log.read_text()
    _, after = step.log.read_text().split(": created ")
    lines = [line for line in after.splitlines()[1:] if "waiting: " not in line]  # those lines came before the end
    assert "ending job" in lines[0]  # nothing came before it


@pytest.mark.slow
def test_an_evicted_step_leaves_its_job_running(step: Step) -> None:
    step.terminate(enough=lambda: False)
    assert len(step.cluster.jobs()) == 1
    assert step.ranks_run()
