"""Retry policy of the engine below Kubeflow Pipelines, from the configuration of Argo's workflow controller.

KFP's compiler gives a task with `set_retry` a limit and a backoff, and no policy: the controller's
`workflowDefaults.spec.templateDefaults` fills that in, and without one Argo takes OnFailure. Sources: docs/retries.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

CONFIG_MAP = "workflow-controller-configmap"  # in the namespace of the controller
PLACE = "workflowDefaults.spec.templateDefaults.retryStrategy"
DEFAULT_POLICY = "OnFailure"


@dataclass(frozen=True)
class EngineRetries:
    """The kinds of failures after which the engine retries a step."""

    policy: str
    failures: bool  # a step that ended with an exit code, was evicted, or ran out of memory
    errors: bool  # a pod that was deleted, as with its node, or that the controller could not create

    @property
    def text(self) -> str:
        """The policy in one sentence, with its consequence."""
        missing = [
            words
            for tried, words in (
                (self.failures, "a step that failed, was evicted or ran out of memory"),
                (self.errors, "one whose pod was deleted, as with its node"),
            )
            if not tried
        ]
        if not missing:
            return f"retryPolicy {self.policy}: failed steps and lost pods are tried again"
        return (
            f"retryPolicy {self.policy}: the engine does not try again {' or '.join(missing)}. What a step can try "
            "again in its own pod it does (cluster.retries); for the rest set retryPolicy: Always in "
            f"{PLACE} of the ConfigMap {CONFIG_MAP}, or submit the same again, which goes on where it was"
        )


def engine_retries(data: Mapping[str, str]) -> EngineRetries:
    """The retry policy of a KFP task under `data`, the controller's ConfigMap. Raises ValueError for invalid YAML."""
    policy = _policy(data)
    return EngineRetries(policy, policy in ("Always", "OnFailure"), policy in ("Always", "OnError"))


def _policy(data: Mapping[str, str]) -> str:
    try:
        everything = yaml.safe_load(data.get("config") or "") or {}  # the older form: everything under one key
        defaults = yaml.safe_load(data.get("workflowDefaults") or "") or _under(everything, "workflowDefaults")
    except yaml.YAMLError as error:
        raise ValueError(f"{CONFIG_MAP}: is no YAML: {error}") from error
    strategy = _under(_under(_under(defaults, "spec"), "templateDefaults"), "retryStrategy")
    if policy := strategy.get("retryPolicy"):
        return str(policy)
    return "Always" if strategy.get("expression") else DEFAULT_POLICY


def _under(node: Any, key: str) -> dict[str, Any]:
    found = node.get(key) if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}
