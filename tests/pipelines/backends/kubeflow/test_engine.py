"""Retries of the engine below Kubeflow, read from its controller's configuration."""

import pytest

from holdfast.pipelines.doctor.cluster import EngineRetries, engine_retries

DEFAULTS = (
    "spec:\n  ttlStrategy: {secondsAfterCompletion: 3600}\n  templateDefaults:\n    retryStrategy:\n      limit: '2'\n"
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"workflowDefaults": DEFAULTS + "      retryPolicy: OnError\n"}, EngineRetries("OnError", False, True)),
        ({"workflowDefaults": DEFAULTS + "      retryPolicy: Always\n"}, EngineRetries("Always", True, True)),
        ({"workflowDefaults": DEFAULTS}, EngineRetries("OnFailure", True, False)),
        ({"workflowDefaults": DEFAULTS + '      expression: "true"\n'}, EngineRetries("Always", True, True)),
        ({"artifactRepository": "archiveLogs: true"}, EngineRetries("OnFailure", True, False)),
        ({}, EngineRetries("OnFailure", True, False)),
        ({"workflowDefaults": "spec: [1]"}, EngineRetries("OnFailure", True, False)),
        (
            {"config": "workflowDefaults:\n" + "".join(f"  {line}\n" for line in DEFAULTS.splitlines())
             + "        retryPolicy: OnError\n"},
            EngineRetries("OnError", False, True),
        ),
    ],
    ids=["2.17", "always", "no policy", "an expression", "2.16", "nothing", "odd", "one key"],
)  # fmt: skip
def test_the_policy_is_the_controllers_default_and_on_failure_without_one(
    data: dict[str, str], expected: EngineRetries
) -> None:
    assert engine_retries(data) == expected


def test_the_retry_report_lists_failures_without_retry_and_the_remedy() -> None:
    on_error = engine_retries({"workflowDefaults": DEFAULTS + "      retryPolicy: OnError\n"}).text
    assert "does not try again a step that failed, was evicted or ran out of memory." in on_error
    assert "cluster.retries" in on_error
    assert "retryPolicy: Always" in on_error
    assert "does not try again one whose pod was deleted, as with its node." in engine_retries({}).text
    always = {"workflowDefaults": DEFAULTS + "      retryPolicy: Always\n"}
    assert engine_retries(always).text.endswith("failed steps and lost pods are tried again")


def test_an_invalid_controller_configuration_is_reported() -> None:
    with pytest.raises(ValueError, match="workflow-controller-configmap"):
        engine_retries({"workflowDefaults": "a: [b"})
