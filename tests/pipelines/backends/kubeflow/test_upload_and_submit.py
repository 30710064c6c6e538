"""A pipeline is uploaded once for each content, and a plan is run once, even if requests are lost, repeated or
concurrent."""

import re
import threading
from functools import partial
from pathlib import Path

import pytest
import yaml

from holdfast.pipelines.backends.kubeflow import submit as submitting
from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_digest, pipeline_text
from holdfast.pipelines.backends.kubeflow.connection import (
    Access,
    KubeflowRefusedError,
    KubeflowUnreachableError,
    Server,
)
from holdfast.pipelines.backends.kubeflow.submit import submit, upload
from holdfast.pipelines.backends.request import RunRequest, identify_request
from holdfast.spec.errors import AccessDeniedError, ExitCode, MissingError, SpecError
from tests.kubeflow_server import Fault, KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import compiled_text, connect, spec

WANTED = RunRequest(spec(), run_id="3f2a4b5c6d7e8f90")


def test_the_same_content_is_uploaded_once(kubeflow: KubeflowServer, server: Server) -> None:
    first, second = upload(server, spec()), upload(server, spec())
    assert (first.created, second.created) == (True, False)
    assert first.version_id == second.version_id
    assert len(kubeflow.pipelines) == len(kubeflow.versions) == 1


def test_other_content_is_another_version_of_the_same_pipeline(kubeflow: KubeflowServer, server: Server) -> None:
    first, second = upload(server, spec()), upload(server, spec("training.steps=7"))
    assert first.pipeline_id == second.pipeline_id
    assert first.version != second.version
    assert len(kubeflow.versions) == 2


def test_upload_sends_the_pipeline_and_its_platform_spec(kubeflow: KubeflowServer, server: Server) -> None:
    upload(server, spec("cluster.secrets=[bucket]"))
    (version,) = kubeflow.versions.values()
    assert set(version["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]) == {
        "spec", "steps", "learning_rate", "layers", "hidden", "heads", "data", "overrides", "store", "salt", "replan",
    }  # fmt: skip
    assert "bucket" in str(version["pipeline_spec"]["platform_spec"])


def test_many_versions_are_looked_through_to_the_last_page(kubeflow: KubeflowServer, server: Server) -> None:
    kubeflow.page_size = 1
    versions = [upload(server, spec(f"training.steps={steps}")) for steps in (5, 6, 7)]
    assert upload(server, spec("training.steps=7")).version_id == versions[-1].version_id
    assert len(kubeflow.versions) == 3


def test_submitting_twice_gives_one_run(kubeflow: KubeflowServer, server: Server) -> None:
    first, second = submit(server, WANTED), submit(server, WANTED)
    assert (first.created, second.created) == (True, False)
    assert first.kfp_run_id == second.kfp_run_id
    (run,) = kubeflow.runs.values()
    assert run["display_name"].startswith("small 3f2a4b5c6d7e8f90 ")
    assert run["runtime_config"]["parameters"]["spec"]["name"] == "small"
    assert first.link == f"{kubeflow.endpoint}/#/runs/details/{first.kfp_run_id}"


@pytest.mark.parametrize(
    ("state", "again"),
    [("RUNNING", False), ("SUCCEEDED", False), ("FAILED", True), ("CANCELED", True), ("CANCELING", True)],
)
def test_only_a_run_that_failed_or_was_ended_is_submitted_again(
    kubeflow: KubeflowServer, server: Server, state: str, again: bool
) -> None:
    first = submit(server, WANTED)
    kubeflow.runs[first.kfp_run_id]["state"] = state
    assert submit(server, WANTED).created is again


def test_an_archived_run_does_not_count(kubeflow: KubeflowServer, server: Server) -> None:
    kubeflow.runs[submit(server, WANTED).kfp_run_id] |= {"state": "SUCCEEDED", "storage_state": "ARCHIVED"}
    assert submit(server, WANTED).created


def test_where_the_data_cannot_be_seen_a_success_may_be_one_on_older_data(
    kubeflow: KubeflowServer, server: Server
) -> None:
    request = RunRequest(spec())
    first = submit(server, request)
    assert not submit(server, request).created  # still running
    kubeflow.runs[first.kfp_run_id]["state"] = "SUCCEEDED"
    assert submit(server, request).created


def test_a_salt_another_store_or_other_settings_make_another_run(kubeflow: KubeflowServer, server: Server) -> None:
    others = [
        WANTED,
        RunRequest(spec(), run_id="aaaabbbbccccdddd", salt="ab"),
        RunRequest(spec(), run_id=WANTED.run_id, store="s3://other/prefix"),
        RunRequest(spec("evaluation.max_loss=2"), run_id=WANTED.run_id),
        RunRequest(spec(), run_id=WANTED.run_id, service_account="other"),
    ]
    assert all(submit(server, other).created for other in others)
    assert len(kubeflow.runs) == len(others)


def test_at_the_same_moment_one_run_stays(kubeflow: KubeflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(connect(kubeflow), WANTED.spec)
    text = pipeline_text(WANTED.spec)  # KFP's compiler supports one thread at a time; these threads stand for processes
    monkeypatch.setattr(submitting, "order_text", lambda _: text)
    count = 4
    together = threading.Barrier(count)
    run_ids: list[str] = []
    monkeypatch.setattr(submitting, "SETTLE_SECONDS", 1.2)  # long enough to see all runs of one second

    def fault(_index: int, method: str, path: str) -> Fault:
        if (method, path) == ("POST", "/apis/v2beta1/runs"):
            together.wait(timeout=120)  # no thread creates a run before all have checked
        return None

    kubeflow.fault = fault
    threads = [
        threading.Thread(target=lambda: run_ids.append(submit(connect(kubeflow), WANTED).kfp_run_id))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run_ids) == count
    assert len(set(run_ids)) == 1
    pending = [run["run_id"] for run in kubeflow.runs.values() if run["state"] == "PENDING"]
    assert pending == run_ids[:1]


def _fault_at(at: int, fault: Fault, index: int, _method: str, _path: str) -> Fault | None:
    return fault if index == at else None


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(429, 500), ("lose", "lose")], ids=["refused", "lost"])
def test_every_request_may_fail_once_and_nothing_is_made_twice(
    kubeflow: KubeflowServer, faults: tuple[Fault, Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is refused with one of two codes, or applied although its answer is lost."""
    text = compiled_text(spec())
    monkeypatch.setattr("holdfast.pipelines.backends.kubeflow.submit.pipeline_text", lambda *_: text)
    submit(connect(kubeflow), RunRequest(spec("name=other"), run_id="00"))
    count = len(kubeflow.requests)
    for broken in range(count):
        name, first = f"small-{broken}", len(kubeflow.requests)
        kubeflow.fault = partial(_fault_at, first + broken, faults[broken % 2])
        submission = submit(connect(kubeflow), RunRequest(spec(f"name={name}"), run_id="00"))
        assert [run["run_id"] for run in kubeflow.runs.values() if run["display_name"].startswith(f"{name} ")] == [
            submission.kfp_run_id
        ]
        assert len([pipeline for pipeline in kubeflow.pipelines.values() if pipeline["display_name"] == name]) == 1
        assert (
            len([experiment for experiment in kubeflow.experiments.values() if experiment["display_name"] == name]) == 1
        )
    assert kubeflow.terminated == []


def test_a_server_with_persistent_errors_is_reported_unreachable(kubeflow: KubeflowServer) -> None:
    kubeflow.fault = lambda *_: 503
    with pytest.raises(KubeflowUnreachableError, match="status 503") as error:
        connect(kubeflow)
    assert error.value.exit_code.retryable


def test_an_unreachable_endpoint_is_reported_with_a_remedy() -> None:
    with pytest.raises(KubeflowUnreachableError, match="port-forward") as error:
        Server(Access(endpoint="http://127.0.0.1:9"))
    assert error.value.exit_code is ExitCode.STORE_UNREACHABLE


def test_a_missing_endpoint_is_reported() -> None:
    with pytest.raises(MissingError, match="KFP_ENDPOINT"):
        Server(Access())


def test_a_wrong_token_is_denied_and_shown_nowhere(kubeflow: KubeflowServer, caplog: pytest.LogCaptureFixture) -> None:
    kubeflow.required = {"Authorization": "Bearer right"}
    with pytest.raises(AccessDeniedError) as error:
        submit(connect(kubeflow, token="a-wrong-secret"), WANTED)
    assert "KFP_TOKEN" in str(error.value)
    assert "(hidden)" in str(error.value)
    assert "a-wrong-secret" not in str(error.value) + caplog.text + repr(Access(token="a-wrong-secret"))
    assert kubeflow.changes == []


def test_a_token_that_expires_is_read_again(kubeflow: KubeflowServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    kubeflow.required = {"Authorization": "Bearer first"}
    server = connect(kubeflow, token_file=str(file))
    upload(server, spec())

    def rotate(_index: int, _method: str, _path: str) -> Fault:
        if kubeflow.required["Authorization"] == "Bearer first":
            kubeflow.required["Authorization"] = "Bearer second"
            file.write_text("second")  # the kubelet writes it slightly later than the server needs it
        return None

    kubeflow.fault = rotate
    assert submit(server, WANTED).created
    file.write_text("stale")
    with pytest.raises(AccessDeniedError):
        submit(server, WANTED)


@pytest.mark.parametrize(
    ("access", "required"),
    [
        ({"token": "abc"}, {"Authorization": "Bearer abc"}),
        ({"cookie": "authservice_session=abc"}, {"Cookie": "authservice_session=abc"}),
        ({"header": "X-Auth-Token: abc"}, {"X-Auth-Token": "abc"}),
    ],
    ids=["token", "cookie", "header"],
)
def test_every_form_of_credentials_is_sent_with_every_request(
    kubeflow: KubeflowServer, access: dict[str, str], required: dict[str, str]
) -> None:
    kubeflow.required = required
    assert submit(connect(kubeflow, **access), WANTED).created


def test_a_login_page_is_not_followed(kubeflow: KubeflowServer) -> None:
    server = connect(kubeflow, cookie="session=abc")
    kubeflow.fault = lambda *_: 302
    with pytest.raises(AccessDeniedError, match="status 302"):
        upload(server, spec())
    assert all("/login" not in path for _, path in kubeflow.requests)


def test_a_refusal_has_the_message_of_the_server(kubeflow: KubeflowServer) -> None:
    with pytest.raises(KubeflowRefusedError, match="single-user mode"):
        submit(connect(kubeflow, namespace="another"), WANTED)


def test_several_users_keep_to_their_namespaces() -> None:
    with KubeflowServer(multi_user=True) as kubeflow:
        submission = submit(connect(kubeflow, namespace="ours"), WANTED)
        assert not submit(connect(kubeflow, namespace="ours"), WANTED).created
        (run,) = kubeflow.runs.values()
        assert (run["run_id"], run["namespace"]) == (submission.kfp_run_id, "ours")
        with pytest.raises(KubeflowRefusedError, match="namespace is required"):
            submit(connect(kubeflow), RunRequest(spec("name=other")))


def test_a_dry_run_sends_nothing_and_lists_its_requests(kubeflow: KubeflowServer) -> None:
    for access in (Access(), Access(endpoint=kubeflow.endpoint)):
        dry = Server(access, dry=True)
        submit(dry, WANTED)
        assert [(request.method, request.path.rsplit("/", 1)[1]) for request in dry.requests] == [
            ("POST", "pipelines"), ("POST", "upload_version"), ("POST", "experiments"), ("POST", "runs"),
        ]  # fmt: skip
        assert dry.requests[-1].body["display_name"] == WANTED.name(pipeline_digest(order_text(WANTED)))
    assert kubeflow.changes == []


def test_a_dry_run_needs_no_kubeflow_in_the_cluster_of_the_kubeconfig(
    kubeflow: KubeflowServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server of the kubeconfig answers 404 to the path of a service that it does not know."""
    config: dict[str, object] = {
        "clusters": [{"name": "c", "cluster": {"server": kubeflow.endpoint}}],
        "users": [{"name": "u", "user": {}}],
    }
    config |= {"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x"}
    (tmp_path / "config").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with pytest.raises(MissingError, match="has no such thing"):
        Server(Access())
    dry = Server(Access(), dry=True)
    submit(dry, WANTED)
    assert dry.offline
    assert dry.requests[-1].path == "/apis/v2beta1/runs"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("data.sources.0.uri=corpus/*.txt", "data.sources.0.uri"),
        ("data.sources.0.uri=/here/*.txt", "data.sources.0.uri"),
        ("store=file:///here", "store"),
    ],
)
def test_paths_of_this_machine_are_refused_before_anything_is_sent(change: str, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        identify_request(RunRequest(spec(change)))


def test_paths_on_a_volume_of_the_pods_are_fine() -> None:
    mounted = identify_request(
        RunRequest(spec("data.sources.0.uri=/corpus/*.txt", "cluster.volumes=[{claim: corpus, path: /corpus}]"))
    )
    assert mounted.run_id == ""
    assert "/corpus" in mounted.unread


def test_a_version_carries_date_and_commit_and_the_same_content_is_found_on_any_day(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_GIT_COMMIT", "5e9577d0" + "a" * 32)
    first = upload(server, spec())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-5e9577d0-[0-9a-f]{16}", first.version)
    monkeypatch.setenv("HOLDFAST_GIT_COMMIT", "0" * 40 + "-dirty")  # nothing of the pipeline has changed
    version = upload(server, spec())
    assert (version.version_id, version.version, version.created) == (first.version_id, first.version, False)
    assert upload(server, spec("training.steps=7")).version.split("-")[3:5] == ["00000000", "dirty"]
