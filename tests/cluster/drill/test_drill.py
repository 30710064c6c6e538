"""The drill itself, in a short run of what `python -m tests.cluster.drill` runs for any length."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import boto3
import pytest

from holdfast.pipelines.chaos.s3 import S3Server
from tests.cluster.drill.__main__ import Drill
from tests.cluster.drill.namespace import lasting_name, run_command
from tests.cluster.drill.place import DrillError, Ended
from tests.cluster.emulation import Emulation
from tests.envtest.control_plane import ADMIN, ControlPlane, needs_assets
from tests.whole.small import write_corpus

ROOT = Path(__file__).parents[3]


class Words:
    """A place that only returns given words."""

    def __init__(self, digests: list[str], left: str = "") -> None:
        self.faults: Mapping[str, Callable[[], str]] = {"nothing": lambda: "nothing"}
        self._digests, self._left, self._polls = digests, left, 0

    def listed(self) -> frozenset[str]:
        return frozenset({"pods/other", self._left} if self._left and not self._digests else {"pods/other"})

    def launch(self, salt: str) -> None:
        self._polls = 0

    def ended(self) -> Ended | None:
        self._polls += 1
        return None if self._polls < 10 else Ended(0)

    def training(self) -> bool:
        return True

    def digest(self) -> str:
        return self._digests.pop(0)


def test_the_drill_stops_at_the_first_other_digest_and_at_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = lambda *_, **__: None  # noqa: E731
    Drill(Words(["a", "a"]), 1, quiet).run(0)
    with pytest.raises(DrillError, match="after nothing the state is b, undisturbed it is a"):
        Drill(Words(["a", "b"]), 1, quiet).run(0)
    monkeypatch.setattr("tests.cluster.drill.__main__.SETTLE_SECONDS", 0.1)
    with pytest.raises(DrillError, match=r"there is left: .'leases/holdfast-x'"):
        Drill(Words(["a", "a"], "leases/holdfast-x"), 1, quiet).run(0)


@pytest.mark.parametrize(("missed", "trainings"), [(1, 2), (2, 3)])
def test_a_training_that_was_over_before_its_fault_is_followed_by_another(missed: int, trainings: int) -> None:
    place, last_lines = Words(["a"] * 4), list[str]()
    place.faults = {"late": lambda: "" if len(place._digests) > 3 - missed else "hit"}
    drill = Drill(place, 1, lambda words, **_: last_lines.append(words))
    drill.run(0)
    assert (drill.done, place._digests) == (1, ["a"] * (3 - trainings))
    assert sum("before late: once more" in message for message in last_lines) == missed


def test_a_training_that_is_always_over_before_its_fault_is_too_short() -> None:
    place = Words(["a"] * 4)
    place.faults = {"late": lambda: ""}
    with pytest.raises(DrillError, match="over before late, 3 times: give it more steps"):
        Drill(place, 1, lambda *_, **__: None).run(0)


def test_a_command_is_a_fault_and_one_that_fails_is_an_error() -> None:
    assert run_command("true") == "true"
    with pytest.raises(DrillError, match="ended with 3: no host"):
        run_command("echo no host; exit 3")


def drill(*arguments: str, **more: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.drill", *arguments],
        cwd=ROOT, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
    assert "each the same to the last bit" in result.stdout


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("assets", ["", pytest.param(os.environ.get("KUBEBUILDER_ASSETS", ""), marks=needs_assets)])
def test_no_fault_of_the_emulated_cluster_changes_bits_or_leaves_objects(assets: str) -> None:
    drill("--minutes", "0", "--seed", "7", "--together", "3", KUBEBUILDER_ASSETS=assets)


@pytest.mark.drill
@needs_assets
@pytest.mark.timeout(1800)
def test_the_drill_in_a_namespace_needs_nothing_but_the_api(control_plane: ControlPlane, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with S3Server() as s3, Emulation(tmp_path / "cluster", plane=control_plane) as cluster:
        credentials = {"AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        boto3.client("s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="drill",
                     aws_secret_access_key="secret").create_bucket(Bucket="drill")  # fmt: skip
        kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
        settings = {
            **credentials,
            "AWS_ENDPOINT_URL": s3,
            "AWS_EC2_METADATA_DISABLED": "true",
            "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
            "KUBECONFIG": str(kubeconfig),
        }
        cluster.kubelet.variables = {"holdfast-settings": settings, "holdfast-secrets": {}}
        control_plane.kubectl("create", "serviceaccount", "holdfast-launcher", "-n", "training")
        admin = tmp_path / "admin"
        admin.write_text(kubeconfig.read_text().replace(cluster.token.read_text(), ADMIN))
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            f"""
name: drill
store: s3://drill/store
data:
  sources: [{{uri: "{tmp_path}/corpus/*.txt"}}]
  tokenizer: {{vocabulary: 300}}
  validation_fraction: 0.2
model: {{layers: 2, hidden: 32, heads: 2, context: 32}}
training: {{steps: 150, global_batch: 4, micro_batch: 2}}
checkpoint: {{every_steps: 5}}
cluster: {{nodes: {{min: 2, max: 2}}, ttl_minutes: 0, restarts: {{budget: 100, backoff_seconds: 0}}}}
"""
        )
        options = ["--namespace", "training", "--kubeconfig", str(admin), "--spec", str(spec)]
        drill("--minutes", "0", "--seed", "3", "--together", "3", "--nodes", *options)


def test_a_pod_that_its_replica_set_replaced_is_not_left_behind() -> None:
    owner = {"kind": "ReplicaSet", "name": "mlflow-1"}
    assert lasting_name({"name": "mlflow-1-a", "ownerReferences": [owner]}) == "mlflow-1"
    assert (
        lasting_name({"name": "run-worker-0", "ownerReferences": [{"kind": "PyTorchJob", "name": "run"}]})
        == "run-worker-0"
    )
    assert lasting_name({"name": "alone"}) == "alone"
