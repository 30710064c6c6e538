"""The emulated cluster as a place for drills. It has a real API server where KUBEBUILDER_ASSETS names one. Its S3 is
a real one behind a proxy that can go away, and its real MLflow server is killed and restarted."""

import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import boto3
import psutil

from holdfast.components.train.result import read_result
from holdfast.pipelines.chaos.proxy import FaultyProxy, reset
from holdfast.pipelines.chaos.s3 import S3Server
from holdfast.spec import dump_spec, run_id
from holdfast.spec.cluster import Cluster
from holdfast.store import open_store
from tests import warm
from tests.cluster.drill.place import DrillError, Ended
from tests.cluster.emulation import Emulation
from tests.cluster.objects import NAMESPACE, Object
from tests.cluster.real import cluster_plane
from tests.ports import free_port
from tests.tracking.conftest import mlflow_server
from tests.train.tiny_run import DATASET_ID, tiny_spec, write_dataset

LAUNCHER = "launcher-1"
AWAY_SECONDS = 4.0  # length of an outage
SPEC = (
    "training.steps=120",
    "checkpoint.every_steps=5",
    "checkpoint.grace_seconds=10",
    "cluster.nodes.min=2",
    "cluster.nodes.max=2",
    "cluster.ttl_minutes=0",
    "cluster.restarts={budget: 100, backoff_seconds: 0}",
)
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "drill-secret", "AWS_REGION": "us-east-1",
               "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
               "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}  # fmt: skip


class EmulatedPlace:
    """Emulated cluster for drills: see `Place`. All files are in `folder`."""

    def __init__(self, folder: Path, random_seed: int = 0) -> None:
        self.faults: Mapping[str, Callable[[], str]] = {
            "launcher killed": lambda: self._kill_launcher(signal.SIGKILL),
            "launcher evicted": lambda: self._kill_launcher(signal.SIGTERM),
            "rank killed": self._kill_rank,
            "pod deleted": self._delete_pod,
            "node lost": self._lose_node,
            "operator away": self._operator_away,
            "s3 away": self._s3_away,
            "mlflow away": self._mlflow_away,
            "api server away": self._api_server_away,
        }
        self._folder = folder
        self._stack = ExitStack()
        self._mlflow = ExitStack()
        self._random = random.Random(random_seed)
        self._spec = tiny_spec(*SPEC)
        self._salt = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            return self._start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> Self:
        s3 = self._stack.enter_context(S3Server())
        self._proxy = self._stack.enter_context(FaultyProxy(s3))
        bucket = f"drill-{uuid.uuid4().hex[:8]}"
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=s3)  # this process bypasses the proxy
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
        self._url = f"s3://{bucket}/store"
        self._store = open_store(self._url)
        write_dataset(self._store)
        self._mlflow_port = free_port()
        self._start_mlflow()
        plane = self._stack.enter_context(cluster_plane(self._folder))
        print(f"on the emulated cluster, API server: {'a real one' if plane else 'in this process'}", flush=True)
        self._cluster = self._stack.enter_context(Emulation(self._folder / "cluster", plane=plane))
        self._settings = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": self._proxy.url,
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self._mlflow_port}",
        }
        defaults = Cluster()
        names = [defaults.settings, *defaults.secrets]
        self._cluster.kubelet.variables = {name: self._settings for name in names if name}
        self._cluster.start_workflow(pods=(LAUNCHER,))
        (self._folder / "spec.yaml").write_text(dump_spec(self._spec))
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stack.close()
        self._mlflow.close()

    def listed(self) -> frozenset[str]:
        kinds = ("pytorchjobs", "pods", "leases", "workflows", "configmaps", "trainjobs", "jobs", "trainingruntimes")
        return frozenset(f"{kind}/{manifest['metadata']['name']}" for kind in kinds for manifest in self._objects(kind))

    def launch(self, salt: str) -> None:
        self._salt = salt
        command = [sys.executable, "-m", "holdfast.components.train", "--spec", str(self._folder / "spec.yaml")]
        command += ["--dataset-id", DATASET_ID, "--store", self._url, "--salt", salt]
        environment = {
            **os.environ, **self._settings, "HOLDFAST_LAUNCHER": "kubernetes", "HOLDFAST_POD_NAME": LAUNCHER,
            "HOLDFAST_POD_NAMESPACE": NAMESPACE, "OMP_NUM_THREADS": "1",
            "KUBECONFIG": str(self._cluster.kubeconfig(self._folder / "kubeconfig")),
            "HOLDFAST_HOME": str(self._folder / "home"),
        }  # fmt: skip
        pod = self._cluster.objects.get("pods", LAUNCHER)
        environment["HOLDFAST_POD_UID"] = pod["metadata"]["uid"]
        with (self._folder / "launcher.log").open("ab") as log:
            self._process = warm.popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> Ended | None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        lines = (self._folder / "launcher.log").read_text(errors="replace").splitlines()[-15:]
        return Ended(128 - code if code < 0 else code, "\n".join(lines))

    def training(self) -> bool:
        return any(pod.get("status", {}).get("phase") == "Running" for pod in self._ranks())

    def digest(self) -> str:
        result = read_result(self._store, run_id(self._spec, DATASET_ID, self._salt))
        if result is None:
            raise DrillError(f"run {self._salt} ended well and has no result")
        return result.state_digest

    def _objects(self, kind: str) -> list[Object]:
        return list(self._cluster.objects.all(kind, NAMESPACE))

    def _ranks(self) -> list[Object]:
        return [pod for pod in self._objects("pods") if pod["metadata"]["name"] != LAUNCHER]

    def _running(self) -> list[Object]:
        kept_pods = [pod for pod in self._ranks() if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in kept_pods if pod.get("status", {}).get("phase") == "Running"]

    def _kill_launcher(self, number: int) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return ""
        self._process.send_signal(number)
        return f"pid {self._process.pid}, signal {number}"

    def _kill_rank(self) -> str:
        for pod in self._random.sample(pods := self._running(), len(pods)):
            process = self._cluster.kubelet.processes.get(pod["metadata"]["uid"])
            try:
                children = psutil.Process(process.pid).children(recursive=True) if process else []
                victim = self._random.choice([child for child in children if "worker" in " ".join(child.cmdline())])
                victim.kill()
                return f"pid {victim.pid} of {pod['metadata']['name']}"
            except (IndexError, psutil.Error):
                continue
        return ""

    def _delete_pod(self) -> str:
        for pod in self._random.sample(pods := self._running(), len(pods)):
            self._cluster.objects.delete("pods", pod["metadata"]["name"], pod["metadata"]["uid"])
            return str(pod["metadata"]["name"])
        return ""

    def _lose_node(self) -> str:
        nodes = sorted({pod["spec"]["nodeName"] for pod in self._running()})
        if not nodes:
            return ""
        node = self._random.choice(nodes)
        self._cluster.kubelet.lose(node)
        _later(lambda: self._cluster.kubelet.bring_back(node))
        return str(node)

    def _operator_away(self) -> str:
        self._cluster.away.set()
        hit = self._kill_rank()
        _later(self._cluster.away.clear) if hit else self._cluster.away.clear()
        return hit

    def _s3_away(self) -> str:
        self._proxy.inject(reset(), times=None)
        _later(self._proxy.heal)
        return f"for {AWAY_SECONDS:.0f} s"

    def _mlflow_away(self) -> str:
        self._mlflow.close()
        _later(self._start_mlflow)
        return f"for {AWAY_SECONDS:.0f} s"

    def _start_mlflow(self) -> None:
        self._mlflow.enter_context(mlflow_server(self._folder, self._mlflow_port))

    def _api_server_away(self) -> str:
        outage = self._cluster.server.outage()
        outage.__enter__()
        _later(lambda: outage.__exit__(None, None, None))
        return f"for {AWAY_SECONDS:.0f} s"


def _later(act: Callable[[], object]) -> None:
    threading.Timer(AWAY_SECONDS, act).start()
