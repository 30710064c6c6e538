"""The kind overlay applied to a real API server with its admission, and the findings of `holdfast doctor`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines import doctor
from holdfast.pipelines.backends.validate import validate
from holdfast.runtime.environment import home
from holdfast.spec import Spec, load_spec
from tests.envtest.control_plane import ADMIN, ControlPlane, assets, until

ROOT = Path(__file__).parents[2]
ENFORCE = "pod-security.kubernetes.io/enforce"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        assets() is None,
        reason="needs etcd, kube-apiserver and kubectl in KUBEBUILDER_ASSETS",
    ),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with everything of the kind overlay and the Secret from the documentation."""
    binaries = assets()
    assert binaries is not None
    with ControlPlane(binaries, tmp_path_factory.mktemp("doctor")) as running:
        strict = ("--server-side", "--validate=strict")
        running.kubectl("apply", *strict, "-k", str(ROOT / "manifests/overlays/kind"))
        running.kubectl(
            "create", "secret", "generic", "holdfast-secrets", "-n", "holdfast",
            "--from-literal=AWS_ACCESS_KEY_ID=me", "--from-literal=AWS_SECRET_ACCESS_KEY=hidden-value",
        )  # fmt: skip
        yield running


@pytest.fixture
def looked(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    """The plane as the cluster of this process, for an administrator."""
    kubeconfig = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": plane.url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "c", "user": {"token": ADMIN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "holdfast"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return plane


def findings(*overrides: str) -> dict[str, list[doctor.Finding]]:
    """The doctor's findings, by check, about the CPU example."""
    by_check: dict[str, list[doctor.Finding]] = {}
    for finding in doctor.examine(spec(*overrides), "holdfast", store=f"file://{home()}/absent"):
        by_check.setdefault(finding.check, []).append(finding)
    return by_check


def spec(*overrides: str) -> Spec:
    return load_spec(ROOT / "examples/cluster-cpu.yaml", overrides)


def outcomes(found: list[doctor.Finding]) -> set[str]:
    return {finding.outcome for finding in found}


def test_under_the_shipped_manifests_everything_that_they_bring_is_fine(looked: ControlPlane) -> None:
    until(looked, lambda: outcomes(findings()["account policy"]) == {"ok"})  # new policies act after a while
    by_check = findings("cluster.priority_class=holdfast-standard")
    for check in (
        "permissions", "service accounts", "priority class", "settings", "secrets", "pod admission", "account policy",
        "quota",
    ):  # fmt: skip
        assert outcomes(by_check[check]) == {"ok"}, by_check[check]
    (policies,) = by_check["network policies"]  # this server has an unusual port, which no policy names
    assert policies.message == f"nothing lets through: steps to the API server (TCP {looked.url.rpartition(':')[2]})"
    assert "hidden-value" not in str(by_check)
    assert not json.loads(looked.kubectl("get", "pods", "-n", "holdfast", "-o", "json"))["items"]


@pytest.mark.parametrize("kind", ["cluster.job=trainjob", "cluster.job=pytorchjob"])
def test_every_kind_of_rank_passes_the_restricted_standard(looked: ControlPlane, kind: str) -> None:
    assert outcomes(findings(kind)["pod admission"]) == {"ok"}


def test_a_rank_beyond_the_pod_security_standard_is_refused_by_the_server(looked: ControlPlane) -> None:
    admission = findings("cluster.capabilities=[IPC_LOCK]")["pod admission"]
    assert [finding.outcome for finding in admission] == ["fail", "ok"]
    assert 'violates PodSecurity "restricted' in admission[0].message
    assert "enforce=privileged" in admission[0].remedy
    looked.kubectl("label", "namespace", "holdfast", f"{ENFORCE}=baseline", "--overwrite")
    try:  # which the remedy does not name, correctly
        assert (
            'violates PodSecurity "baseline' in findings("cluster.capabilities=[IPC_LOCK]")["pod admission"][0].message
        )
    finally:
        looked.kubectl("label", "namespace", "holdfast", f"{ENFORCE}=restricted", "--overwrite")


def test_a_missing_role_of_the_service_account_is_reported_to_an_admin(looked: ControlPlane) -> None:
    binding = looked.kubectl("get", "rolebinding", "holdfast-launcher", "-n", "holdfast", "-o", "yaml")
    looked.kubectl("delete", "rolebinding", "holdfast-launcher", "-n", "holdfast")
    try:
        (finding,) = findings()["permissions"]
    finally:
        document = yaml.safe_load(binding)
        for name in ("uid", "resourceVersion", "creationTimestamp"):
            document["metadata"].pop(name, None)
        looked.kubectl("apply", "-f", "-", text=yaml.safe_dump(document))
    assert (finding.outcome, int(finding.code)) == ("fail", 16)
    assert "create pytorchjobs" in finding.message


def test_manifests_of_a_profile_apply_in_an_existing_namespace(looked: ControlPlane, tmp_path: Path) -> None:
    from tests.manifests.rendering import PROFILE, render_in

    looked.kubectl("create", "namespace", "ann")
    everything = yaml.safe_dump_all(render_in("ann", PROFILE, tmp_path))
    looked.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", text=everything)
    looked.kubectl("create", "serviceaccount", "default-editor", "-n", "ann")
    command = ["auth", "can-i", "create", "leases", "-n", "ann", "--as=system:serviceaccount:ann:default-editor"]
    assert looked.kubectl(*command).strip() == "yes"


def test_validation_uses_a_dry_run_of_the_api_server(looked: ControlPlane) -> None:
    job = objects_for(training_job(spec(), "run", 1, "s3://b"))
    validation = validate(job, "holdfast")
    assert (validation.by, validation.problems, validation.unseen) == (f"the API server {looked.url}", [], [])
    job[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["replikas"] = 2
    (problem,) = validate(job, "holdfast").problems
    assert "unknown field" in problem
    assert "spec.pytorchReplicaSpecs.Worker.replikas" in problem
    body = looked.api(ADMIN).read("/apis/kubeflow.org/v1/pytorchjobs")
    assert body is not None
    assert body["items"] == []
