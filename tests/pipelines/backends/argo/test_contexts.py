"""A run goes to the first context whose cluster takes it, once, and is found there again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import api as holdfast_api
from holdfast.api import ClusterOptions, Location
from holdfast.launch.kubernetes.api_errors import OverQuotaError
from holdfast.launch.kubernetes.configuration import own_namespace
from holdfast.pipelines.backends import open_backend
from holdfast.pipelines.backends.argo import contexts
from holdfast.pipelines.backends.argo.backend import Argo
from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.record import find_record
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import SpecError, parse_spec
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, DataError, HoldfastError, MissingError
from holdfast.store import layout, open_store
from tests.cluster.api import NAMESPACE, ApiServer, StatusError
from tests.pipelines.backends.argo.test_backend import PERSON, workflows

RUN_ID = "3f2a4b5c6d7e8f90"
QUOTA = StatusError(
    403, 'workflows.argoproj.io "x" is forbidden: exceeded quota: runs, requested: 1, used: 1, limited: 1'
)


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ApiServer]]:
    """Two clusters, and a kubeconfig whose current context is a third one, which does not answer."""
    monkeypatch.setattr(contexts, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("holdfast.pipelines.backends.argo.backend.PATIENCE_SECONDS", 0.5)
    with ApiServer() as first, ApiServer() as second:
        servers = {"first": first, "second": second}
        for server in servers.values():
            server.allowed = PERSON
        urls = {"away": "http://127.0.0.1:9", **{name: server.url for name, server in servers.items()}}
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "away",
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": "me", "namespace": NAMESPACE}} for name in urls
            ],
            "clusters": [{"name": name, "cluster": {"server": url}} for name, url in urls.items()],
            "users": [{"name": "me", "user": {"token": "token-1"}}],
        }  # fmt: skip
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(document))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        monkeypatch.setenv("HOLDFAST_STORE", f"file://{tmp_path}/store")
        yield servers


def request_for(*names: str, **more: Any) -> RunRequest:
    spec = parse_spec(
        f"{{name: small, data: {{sources: [{{uri: 'python:stdlib'}}]}}, cluster: {{contexts: [{', '.join(names)}]}}}}"
    )
    return RunRequest(spec, run_id=RUN_ID, **more)


def refusal(error: StatusError, plural: str = "workflows") -> Any:
    return lambda verb, kind: error if (verb, kind) == ("create", plural) else None


def test_the_first_context_that_takes_a_run_gets_it_once(clusters: dict[str, ApiServer]) -> None:
    request = request_for("first", "second")
    status, created = Argo().submit(request)
    assert (created, status.endpoint) == (True, "first")
    assert Argo().submit(request) == (status, False)
    assert (len(workflows(clusters["first"])), len(workflows(clusters["second"]))) == (1, 0)


@pytest.mark.parametrize("names", [("away", "second"), ("unknown", "second")])
def test_a_context_that_cannot_be_reached_is_left_out(clusters: dict[str, ApiServer], names: tuple[str, ...]) -> None:
    status, created = Argo().submit(request_for(*names))
    assert (created, status.endpoint) == (True, "second")
    assert len(workflows(clusters["second"])) == 1


@pytest.mark.parametrize(
    "fault",
    [
        refusal(QUOTA),
        refusal(StatusError(403, "workflows.argoproj.io is forbidden: User cannot create resource")),
        refusal(StatusError(404, "the server could not find the requested resource"), "workflowtemplates"),
    ],
    ids=["quota", "rights", "no Argo"],
)
def test_a_cluster_that_refuses_a_run_is_followed_by_the_next_one(clusters: dict[str, ApiServer], fault: Any) -> None:
    clusters["first"].faults.append(fault)
    status, created = Argo().submit(request_for("first", "second"))
    assert (created, status.endpoint) == (True, "second")
    assert workflows(clusters["first"]) == []


def test_a_run_of_a_later_context_is_not_repeated_in_an_earlier_one(clusters: dict[str, ApiServer]) -> None:
    request = request_for("first", "second")
    clusters["first"].faults.append(refusal(QUOTA))
    status, _ = Argo().submit(request)
    clusters["first"].faults.clear()
    assert Argo().submit(request) == (status, False)
    clusters["first"].away = True  # it has refused the run, so it cannot have it
    assert Argo().submit(request) == (status, False)
    assert workflows(clusters["first"]) == []


def test_a_context_that_has_refused_a_run_cannot_have_it(clusters: dict[str, ApiServer]) -> None:
    for name in ("first", "second"):
        clusters[name].faults.append(refusal(QUOTA))
    with pytest.raises(OverQuotaError):
        Argo().submit(request_for("first", "second"))
    clusters["first"].away = True
    clusters["second"].faults.clear()
    assert Argo().submit(request_for("first", "second"))[0].endpoint == "second"


def test_two_commands_at_the_same_time_use_one_cluster(clusters: dict[str, ApiServer], tmp_path: Path) -> None:
    """The first command has noted its cluster, which no longer answers, after the second one read the notes."""
    request, url = request_for("first", "second"), f"file://{tmp_path}/store"
    places = [Argo(context=name) for name in ("first", "second")]
    notes, others = (contexts.Notes(url, "d") for _ in range(2))
    others.add("first")
    clusters["first"].away = True
    with pytest.raises(ClusterUnreachableError, match="context first may have the run"):
        contexts.submit_in_order(places, request, notes)
    assert workflows(clusters["second"]) == []
    clusters["first"].away = False
    others.add("second")  # as a command does whose first cluster has refused
    assert contexts.submit_in_order(places, request, notes)[0].context == "first"


@pytest.mark.parametrize("note", ["{}", '{"contexts": 5}', '{"contexts": "first"}', "["])
def test_a_damaged_note_is_reported(clusters: dict[str, ApiServer], tmp_path: Path, note: str) -> None:
    open_store(f"file://{tmp_path}/store").put("submissions/d.json", note.encode())
    with pytest.raises(DataError, match=r"submissions/d\.json: is damaged"):
        contexts.Notes(f"file://{tmp_path}/store", "d")


def test_no_second_cluster_is_asked_after_an_answer_that_may_be_lost(clusters: dict[str, ApiServer]) -> None:
    clusters["first"].faults.append(refusal(StatusError(503, "etcd has a new leader")))
    with pytest.raises(ClusterUnreachableError):
        Argo().submit(request_for("first", "second"))
    clusters["first"].away = True  # and the same command again
    with pytest.raises(ClusterUnreachableError, match="context first may have the run"):
        Argo().submit(request_for("first", "second"))
    assert workflows(clusters["second"]) == []
    clusters["first"].away = False
    clusters["first"].faults.clear()
    assert Argo().submit(request_for("first", "second"))[0].endpoint == "first"
    clusters["first"].away = True  # for less time than the run takes
    with pytest.raises(ClusterUnreachableError, match="context first may have the run"):
        Argo().submit(request_for("first", "second"))
    assert workflows(clusters["second"]) == []


def test_a_run_goes_to_no_cluster_if_the_store_cannot_keep_the_note(
    clusters: dict[str, ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_STORE")
    with pytest.raises(MissingError, match="none is known here; give --store"):
        Argo().submit(request_for("first", "second"))
    with pytest.raises(HoldfastError, match="/dev/null/store"):
        Argo().submit(request_for("first", "second", store="file:///dev/null/store"))
    assert workflows(clusters["first"]) == workflows(clusters["second"]) == []


def test_a_workflow_that_was_created_before_a_quota_refuses_its_repetition_is_the_run(
    clusters: dict[str, ApiServer],
) -> None:
    created: list[RunStatus] = []

    def create_and_refuse(verb: str, kind: str) -> StatusError | None:
        if (verb, kind) != ("create", "workflows") or clusters["first"].faults == []:
            return None
        clusters["first"].faults.clear()
        created.append(Argo(context="first").submit(request_for("first", "second"))[0])
        return QUOTA

    clusters["first"].faults.append(create_and_refuse)
    status, _ = Argo().submit(request_for("first", "second"))
    assert [status] == created
    assert workflows(clusters["second"]) == []


@pytest.mark.parametrize("current", [True, False])
def test_a_context_has_its_own_namespace(clusters: dict[str, ApiServer], tmp_path: Path, current: bool) -> None:
    path = tmp_path / "kubeconfig"
    document = yaml.safe_load(path.read_text())
    document["contexts"][2]["context"]["namespace"] = "elsewhere"
    if not current:
        del document["current-context"]
    path.write_text(yaml.safe_dump(document))
    assert own_namespace("second") == "elsewhere"
    assert own_namespace("first") == NAMESPACE
    assert own_namespace("unknown") == "default"


@pytest.mark.parametrize(
    ("names", "fault", "error"),
    [
        (("away", "first"), refusal(QUOTA), OverQuotaError),
        (("away",), None, ClusterUnreachableError),
        (("unknown",), None, AccessDeniedError),
    ],
)
def test_if_no_context_takes_a_run_the_error_has_the_reason_of_each(
    clusters: dict[str, ApiServer], names: tuple[str, ...], fault: Any, error: type[Exception]
) -> None:
    if fault is not None:
        clusters["first"].faults.append(fault)
    with pytest.raises(error) as raised:
        Argo().submit(request_for(*names))
    assert type(raised.value) is error
    assert all(f"{name}: " in str(raised.value) for name in names)


def test_commands_find_a_run_in_the_context_that_took_it(clusters: dict[str, ApiServer], tmp_path: Path) -> None:
    request = replace(request_for("away", "second"), store=f"file://{tmp_path}/store")
    made = holdfast_api.submit(request, backend="argo")
    record = find_record(open_store(f"file://{tmp_path}/store"), RUN_ID)
    assert record is not None
    assert record.endpoint == "second"
    backend, identity = holdfast_api.find_backend(RUN_ID)
    assert (identity, backend.status(identity).endpoint) == (made.run.id, "second")
    assert holdfast_api.stop(RUN_ID).ended
    assert workflows(clusters["second"])[0]["spec"]["shutdown"] == "Stop"


def test_a_record_of_an_unknown_backend_is_named(clusters: dict[str, ApiServer], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    holdfast_api.submit(replace(request_for("second"), store=url), backend="argo")
    store, key = open_store(url), layout.run(RUN_ID, "backend.json")
    store.put(key, store.get(key).replace(b'"argo"', b'"nomad"'))
    with pytest.raises(DataError, match=rf"{url}/{key}: .* names the backend 'nomad', .* --backend") as raised:
        holdfast_api.stop(RUN_ID)
    assert raised.value.exit_code == 11
    assert holdfast_api.stop(RUN_ID, at=Location(backend="argo", endpoint="second")).ended


def test_a_named_context_is_the_only_one(clusters: dict[str, ApiServer]) -> None:
    status, _ = open_backend("argo", endpoint="second").submit(request_for("first"))
    assert status.endpoint == "second"
    request = request_for("first", store="s3://bucket/prefix")
    (result,) = holdfast_api.check_preview(Argo().objects(request), request, "argo", ClusterOptions(endpoint="second"))
    assert result.by == f"the API server {clusters['second'].url} (context second)"


def test_a_dry_run_is_checked_by_each_context(clusters: dict[str, ApiServer]) -> None:
    request = request_for("away", "first", "second", store="s3://bucket/prefix")
    clusters["second"].faults.append(refusal(StatusError(422, "Workflow is invalid: spec.templates is too long")))
    checked = holdfast_api.check_preview(Argo().objects(request), request, "argo")
    places = [f"the API server {clusters[name].url} (context {name})" for name in ("first", "second")]
    assert [result.by for result in checked[1:]] == places
    assert checked[0].by.endswith("because no API server can be reached (context away)")
    assert [len(result.problems) for result in checked] == [0, 0, 1]
    assert "is too long" in checked[2].problems[0]


@pytest.mark.parametrize("name", ["", "-x", "a\\nb", "x" * 254])
def test_a_text_that_is_no_name_of_a_context_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"cluster\.contexts"):
        request_for(f'"{name}"')


@pytest.mark.parametrize("content", ["this: [is not", "[]", "contexts: 3", "\x00"])
def test_a_kubeconfig_that_cannot_be_read_is_named(
    clusters: dict[str, ApiServer], tmp_path: Path, content: str
) -> None:
    (tmp_path / "kubeconfig").write_text(content)
    with pytest.raises(AccessDeniedError, match=r"context 'first' cannot be used: .*kubeconfig\); set KUBECONFIG"):
        Argo(context="first").submit(request_for("first"))
    with pytest.raises(AccessDeniedError, match="no kubeconfig can be used"):
        Argo().submit(request_for())
