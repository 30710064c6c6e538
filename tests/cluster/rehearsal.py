"""A rehearsal: one spec, from the file to a registered model, on the emulated cluster.

`python -m tests.cluster.rehearsal SPEC [--set key=value] [--kill]` emits the Argo WorkflowTemplate of a spec and runs
it. The small Argo of `tests.pipelines.backends.argo.emulator` runs the steps. The train step creates a PyTorchJob
through the production launcher, and the emulated operator turns it into pods. The pods are real processes on 127.0.0.1
with a real S3 between them. The API server is a real one where KUBEBUILDER_ASSETS names its binaries, and the one of
`tests.cluster.api` elsewhere. `--kill` kills a node's processes in the middle of the training.
"""

import argparse
import logging
import os
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import boto3
import psutil

from holdfast.pipelines.backends.argo import argo_objects, template_name
from holdfast.pipelines.chaos.s3 import S3Server
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import Spec, load_spec
from tests.cluster.container import Printed
from tests.cluster.emulation import Emulation
from tests.cluster.objects import Object
from tests.cluster.real import cluster_plane
from tests.envtest.control_plane import ControlPlane
from tests.faults.nodes import HELD, HOLDS, PLAIN
from tests.pipelines.backends.argo.emulator import Argo, Workflow

SECRET = {"AWS_ACCESS_KEY_ID": "rehearsal", "AWS_SECRET_ACCESS_KEY": "rehearsal-secret", "AWS_REGION": "us-east-1"}


@dataclass
class Rehearsed:
    """Result of a rehearsal."""

    workflow: Workflow
    jobs: list[str]  # the PyTorchJobs that remain for their time to live
    killed: int | None  # the process that was killed


def rehearse(spec: Spec, folder: Path, kill: bool = False, plane: ControlPlane | None = None) -> Rehearsed:
    """Run the DAG of `spec`, whose store is in an S3 bucket, to its end. All other files are in `folder`. With
    `plane` the launcher uses that API server."""
    assert spec.store is not None and spec.store.startswith("s3://"), "the spec of a cluster names an S3 store"
    with S3Server() as endpoint, Emulation(folder / "cluster", plane=plane) as cluster:
        secret = {**SECRET, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}
        cluster.kubelet.variables = dict.fromkeys(spec.cluster.secrets, secret)
        boto3.client(
            "s3", endpoint_url=endpoint, region_name=SECRET["AWS_REGION"],
            aws_access_key_id=SECRET["AWS_ACCESS_KEY_ID"], aws_secret_access_key=SECRET["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=spec.store.removeprefix("s3://").split("/")[0])  # fmt: skip
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "MLFLOW_", "AWS_"))
        }
        environment = {
            **inherited,
            **secret,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "KUBECONFIG": str(cluster.kubeconfig(folder / "kubeconfig")),
            "HOLDFAST_LAUNCHER": "kubernetes",
            "HOLDFAST_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        killer = _Killer(cluster, folder / "holds", spec.checkpoint.every_steps) if kill else None
        workflow = Argo(argo_objects(spec), folder / "pods", environment).submit(
            {"workflowTemplateRef": {"name": template_name(spec)}, "entrypoint": "train-and-register"}
        )
        return Rehearsed(workflow, cluster.jobs(), killer.victim if killer else None)


class _Killer:
    """Kills the ranks of the last node once it has saved a checkpoint. Until then every rank computes at most one
    step beyond it."""

    def __init__(self, cluster: Emulation, file: Path, saved: int) -> None:
        self.victim: int | None = None
        self._file = file
        self._hold(saved + 1)
        cluster.kubelet.program = self._held
        threading.Thread(target=self._watch, args=(cluster,), daemon=True).start()

    def _watch(self, cluster: Emulation) -> None:
        while not any(self._saved(output) for output in list(cluster.kubelet.printed.values())):
            with cluster.objects.changed:
                cluster.objects.changed.wait(0.1)
        try:
            self._kill(cluster)
        finally:
            self._hold(10**9)

    def _kill(self, cluster: Emulation) -> None:
        ranks = sorted(cluster.kubelet.printed)
        pod = cluster.objects.get("pods", ranks[-1])
        if pod is None or pod["metadata"]["uid"] not in cluster.kubelet.processes:
            return
        node = psutil.Process(cluster.kubelet.processes[pod["metadata"]["uid"]].pid)
        for rank in node.children(recursive=True):
            self.victim = rank.pid
            rank.kill()

    def _hold(self, steps: int) -> None:
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(str(steps))
        unfinished.rename(self._file)

    def _held(self, pod: Object) -> None:
        """Let a pod run ranks that hold."""
        for container in pod["spec"]["containers"]:
            for command in (container["command"], container.get("args", [])):
                command[:] = [HELD if argument == PLAIN else argument for argument in command]
            container.setdefault("env", []).append({"name": HOLDS, "value": str(self._file)})

    @staticmethod
    def _saved(printed: Printed) -> bool:
        return any(": saved step " in line for line in printed.snapshot()[0])


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kill", action="store_true", help="kill a node's processes in the middle of the training")
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to S3
    spec = with_absolute_paths(load_spec(arguments.spec, arguments.set))
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder, ExitStack() as stack:
        plane = stack.enter_context(cluster_plane(Path(folder)))
        rehearsal = rehearse(spec, Path(folder), arguments.kill, plane)
    print(rehearsal.workflow.log)
    for node in rehearsal.workflow.nodes.values():
        print(f"{node.phase:10} {node.name}")
    print(
        f"{rehearsal.workflow.phase}; jobs: {', '.join(rehearsal.jobs)}"
        + (f"; killed {rehearsal.killed}" if rehearsal.killed else "")
    )
    return 0 if rehearsal.workflow.phase == "Succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
