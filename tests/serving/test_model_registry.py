"""A version is entered in the Model Registry exactly once, also with concurrent writers and lost replies."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.serving import model_registry
from holdfast.serving.model_registry import ModelRegistry, RefusedError
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError
from tests.serving.registry import Entry, Registry, refusal

SOURCE = "s3://bucket/prefix/runs/r/export/step-000000008/"
PROPERTIES: dict[str, str | float] = {"run_id": "fedcba9876543210", "loss": 1.25}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.delenv(model_registry.TOKEN, raising=False)
    monkeypatch.setattr(model_registry, "FIRST_PAUSE", 0.01)
    with Registry() as server:
        yield server


def enter(registry: Registry, version: str = "3") -> str:
    return ModelRegistry(registry.url, "me").enter("story", version, SOURCE, "huggingface", PROPERTIES)


def test_a_version_has_its_model_its_artifact_and_its_lineage(registry: Registry) -> None:
    version_id = enter(registry)
    (model,) = registry.entries["registered_models"].values()
    (version,) = registry.entries["model_versions"].values()
    (artifact,) = registry.entries["model_artifacts"].values()
    assert model["name"] == "story"
    assert (version["id"], version["name"], version["registeredModelId"]) == (version_id, "3", model["id"])
    assert (version["author"], version["state"]) == ("me", "LIVE")
    assert version["customProperties"] == {
        "run_id": {"metadataType": "MetadataStringValue", "string_value": "fedcba9876543210"},
        "loss": {"metadataType": "MetadataDoubleValue", "double_value": 1.25},
    }
    assert (artifact["_parent"], artifact["uri"], artifact["modelFormatName"]) == (version_id, SOURCE, "huggingface")


def test_entered_again_nothing_is_made_and_what_people_wrote_stays(registry: Registry) -> None:
    version_id = enter(registry)
    review = {"reviewed": {"metadataType": "MetadataStringValue", "string_value": "yes"}}
    registry.entries["model_versions"][version_id]["customProperties"] |= review
    before = {kind: set(entries) for kind, entries in registry.entries.items()}
    assert enter(registry) == version_id
    assert {kind: set(entries) for kind, entries in registry.entries.items()} == before
    assert registry.entries["model_versions"][version_id]["customProperties"].items() >= review.items()


@pytest.mark.parametrize("lost", range(3))
def test_an_answer_that_is_lost_after_the_entry_was_made_makes_no_second_one(registry: Registry, lost: int) -> None:
    """The request is sent again and finds its own effect."""
    replies, whole = 0, registry.answer

    def answer(method: str, path: str, body: Entry | None, authorization: str) -> tuple[int, Entry]:
        nonlocal replies
        reply = whole(method, path, body, authorization)
        if method == "POST" and reply[0] == 201:
            if replies == lost:
                registry.lost.append("POST")
            replies += 1
        return reply

    registry.answer = answer  # type: ignore[method-assign]
    enter(registry)
    assert [len(entries) for entries in registry.entries.values()] == [1, 1, 1]


def test_concurrent_entries_of_one_version_create_one_version(registry: Registry) -> None:
    with ThreadPoolExecutor(8) as pool:
        version_ids = set(pool.map(lambda _: enter(registry), range(16)))
    assert len(version_ids) == 1
    assert [len(entries) for entries in registry.entries.values()] == [1, 1, 1]


def test_the_model_names_its_champion_also_after_a_rollback(registry: Registry) -> None:
    client = ModelRegistry(registry.url, "me")
    for version in ("3", "4", "3"):
        enter(registry, version)
        client.point("story", version)
        (model,) = registry.entries["registered_models"].values()
        assert model["customProperties"]["champion"]["string_value"] == version


def test_a_briefly_unreachable_registry_is_retried(registry: Registry) -> None:
    registry.failing = [503, 500, 429]
    enter(registry)
    assert [len(entries) for entries in registry.entries.values()] == [1, 1, 1]


def test_a_registry_that_stays_away_is_an_error_that_may_pass(registry: Registry) -> None:
    registry.failing = [503] * 100
    with pytest.raises(ClusterUnreachableError, match=r"does not answer.*run the same command again") as error:
        enter(registry)
    assert error.value.exit_code >= 128


def test_the_token_is_read_from_the_environment_and_never_shown(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.token = "hunter2"
    with pytest.raises(AccessDeniedError, match="MODEL_REGISTRY_TOKEN"):
        enter(registry)
    monkeypatch.setenv(model_registry.TOKEN, "hunter2")
    with pytest.raises(AccessDeniedError, match=f"MODEL_REGISTRY_TOKEN_FOR; set it to {registry.url}"):
        enter(registry)
    monkeypatch.setenv(model_registry.TOKEN_FOR, registry.url)
    enter(registry)
    registry.token = "another"
    with pytest.raises(AccessDeniedError) as error:
        enter(registry)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("named", "url", "sent"),
    [
        ("https://r.example", "https://r.example/path", True),
        ("https://r.example:443", "https://R.example", True),
        ("https://r.example", "https://evil.example", False),
        ("https://r.example", "https://r.example.evil.example", False),
        ("https://r.example", "https://r.example@evil.example", False),
        ("https://r.example", "https://evil.example\\@r.example", False),
        ("https://r.example:port", "https://r.example", False),
        ("https://[::1", "https://[::1", False),
        ("http://[::1]:9", "http://[::1]:9/", True),
        ("https://r.example", "https://r.example:8443", False),
        ("https://r.example", "http://r.example", False),
        ("http://r.example", "http://r.example", False),
        ("http://registry.kubeflow.svc:8080", "http://registry.kubeflow.svc:8080", True),
        ("http://registry.kubeflow.svc:8080", "http://registry.other.svc:8080", False),
        ("http://127.0.0.1:9", "http://127.0.0.1:9/", True),
        ("", "https://r.example", False),
        ("r.example", "https://r.example", False),
    ],
)
def test_the_token_is_sent_only_to_its_server_and_not_over_plain_http(
    named: str, url: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(model_registry.TOKEN_FOR, named)
    assert model_registry.is_for(url) is sent


def test_a_registry_refusal_has_the_message_of_the_registry(registry: Registry) -> None:
    with pytest.raises(RefusedError, match=r"POST .*status 400.*required field") as error:
        ModelRegistry(registry.url, "me")._ask("POST", "model_versions", {"name": "3"})
    assert error.value.exit_code < 128


def test_the_server_of_these_tests_is_strict() -> None:
    """Like the real server, it forbids unknown fields."""
    assert "unknown field" in refusal("model_versions", {"name": "3", "registeredModelId": "1", "uri": "x"}, True)
    assert "zero value" in refusal("model_versions", {"name": "3"}, True)
    assert "no metadataType" in refusal("model_versions", {"customProperties": {"a": {"string_value": "x"}}}, False)
    assert "is no state" in refusal("model_versions", {"state": "ALIVE"}, False)
