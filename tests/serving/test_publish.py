"""Registration, promotion and rollback: the served model follows the champion. Real MLflow, real S3, real HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.components.register import run
from holdfast.pipelines.cli.entry import app
from holdfast.serving import publishing
from holdfast.spec import SpecError, dump_spec
from holdfast.spec.errors import AccessDeniedError
from holdfast.store import layout, open_store
from holdfast.tracking import Champion, champion
from tests.register.conftest import STEP, FinishIn, bare_home, finish_in, home
from tests.serving.registry import Registry
from tests.tracking import made

__all__ = ["bare_home", "finish_in", "home"]
OTHER = "1111222233334444"


class Cluster:
    """Records the applied InferenceServices."""

    namespace = "models"

    def __init__(self) -> None:
        self.applied: list[dict[str, Any]] = []
        self.away = False

    def apply(self, _: object, body: dict[str, Any], manager: str) -> dict[str, Any]:
        assert manager == "holdfast"
        if self.away:
            raise AccessDeniedError("no")
        self.applied.append(body)
        return body

    @property
    def sources(self) -> list[str]:
        return [service["spec"]["predictor"]["model"]["storageUri"] for service in self.applied]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster()
    monkeypatch.setattr(publishing.Api, "of_this_process", lambda *_, **__: fake)
    return fake


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        yield server


@pytest.mark.slow
def test_a_champion_is_served_and_a_rollback_serves_the_one_before(
    home: Path, s3_url: str, finish_in: FinishIn, cluster: Cluster, registry: Registry, tmp_path: Path
) -> None:
    store = open_store(s3_url)
    first = made.spec("evaluation.versus_champion=ignore")  # not served yet
    serving = made.spec(
        "evaluation.versus_champion=ignore", "serving.kserve.namespace=models",
        f"serving.model_registry={{url: '{registry.url}', author: me}}",
    )  # fmt: skip
    exports = [f"{s3_url}/{layout.export(run_id, STEP, f'state-{run_id}')}" for run_id in (made.RUN_ID, OTHER)]
    finish_in(store)(spec=first)
    run(first, made.RUN_ID, store)
    assert cluster.applied == []
    finish_in(store)(run_id=OTHER, spec=serving)
    run(serving, OTHER, store)
    assert cluster.sources == exports[1:]
    assert cluster.applied[0]["metadata"]["annotations"] == {
        "holdfast/model": "story", "holdfast/version": "2", "holdfast/run_id": OTHER,
        "holdfast/dataset_id": made.DATASET_ID, "holdfast/state_digest": f"state-{OTHER}",
        "holdfast/verdict": "settings-none",
        "holdfast/git_commit": cluster.applied[0]["metadata"]["annotations"]["holdfast/git_commit"],
    }  # fmt: skip
    (version,) = registry.entries["model_versions"].values()
    assert (version["name"], version["author"]) == ("2", "me")
    assert version["customProperties"]["bits_per_byte"] == {"metadataType": "MetadataDoubleValue", "double_value": 0.5}

    run(serving, OTHER, store)  # repeated, like a step that was killed
    assert cluster.sources == [exports[1]] * 2
    assert len(registry.entries["model_versions"]) == 1

    gone_back = CliRunner().invoke(app, ["models", "rollback", "story", "--store", s3_url])
    assert gone_back.exit_code == 0, gone_back.output
    assert "InferenceService models/story serves it" in gone_back.output
    assert cluster.sources[2:] == exports[:1]
    (entry,) = registry.entries["registered_models"].values()
    assert entry["customProperties"]["champion"]["string_value"] == "1"

    run(serving, OTHER, store)  # a repetition does not undo the rollback
    assert cluster.sources[3:] == []
    assert champion("story", store).version == 1  # type: ignore[union-attr]

    cluster.away = True
    promotion = CliRunner().invoke(app, ["models", "promote", "story/2", "--store", s3_url])
    assert promotion.exit_code == 16
    assert "is the champion, and is not served yet" in promotion.output
    assert champion("story", store).version == 2  # type: ignore[union-attr]
    cluster.away = False
    spec = tmp_path / "spec.yaml"
    spec.write_text(dump_spec(serving))
    assert CliRunner().invoke(app, ["serve", str(spec), "--store", s3_url]).exit_code == 0
    assert cluster.sources[3:] == exports[1:]
    result = CliRunner().invoke(app, ["serve", str(spec), "--store", s3_url, "--dry-run"])
    assert f"storageUri: {exports[1]}" in result.output
    spec.write_text(dump_spec(made.spec(f"serving.model_registry={{url: '{registry.url}', author: me}}")))
    result = CliRunner().invoke(app, ["serve", str(spec), "--store", s3_url, "--dry-run"])
    assert "InferenceService" not in result.output
    assert f"version 2 of story would be entered in {registry.url}" in result.output
    assert len(cluster.sources) == 4


@pytest.mark.parametrize("champion", [False, True])
def test_a_challenger_is_registered_but_neither_served_nor_marked_champion(
    champion: bool, cluster: Cluster, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_require_servable", lambda _: None)  # its export does not matter here
    spec = made.spec("serving.kserve.namespace=models", f"serving.model_registry={{url: '{registry.url}', author: me}}")
    version = Champion(
        registry="r", model="story", version=2, run_id=OTHER, store_url="s3://bucket", export="runs/x/export/", tags={},
        export_digest="d", run_digest="d", dataset_id="d", metrics={}, created=0.0,
    )  # fmt: skip
    published = publishing.publish(spec, version, champion=champion)
    assert len(registry.entries["model_versions"]) == 1
    (entry,) = registry.entries["registered_models"].values()
    assert ("champion" in entry.get("customProperties", {})) is champion
    assert len(cluster.applied) == champion
    assert bool(published.service) is champion
    assert published.entry


def test_a_service_without_a_namespace_is_not_guessed_outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SpecError, match=r"serving\.kserve\.namespace.*is missing"):
        publishing._namespace(made.spec("serving.kserve={}"), "kserve")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert publishing._namespace(made.spec("serving.kserve={}"), "kserve") is None
    assert publishing._namespace(made.spec("serving.kserve={}", "cluster.namespace=a"), "kserve") == "a"
