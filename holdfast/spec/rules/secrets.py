"""The rule that no URL of the spec contains a secret."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.redaction import HIDDEN, carries_secret, names_secret
from holdfast.spec.tree import Spec

__all__ = ["carries_secret", "check_no_secrets_in_urls", "names_secret"]


def check_no_secrets_in_urls(spec: Spec) -> Iterator[Problem]:
    """No URL of the spec contains credentials."""
    registry = spec.serving.model_registry
    urls = [
        ("store", spec.store),
        ("serving.model_registry.url", registry.url if registry else None),
        ("model.init_from", spec.model.init_from),
        ("training.distillation.teacher", spec.training.distillation.teacher),
        ("training.grpo.server.url", spec.training.grpo.server.url if spec.training.grpo.server else None),
        ("data.tokenizer.path", spec.data.tokenizer.path),
        ("data.chat.template", spec.data.chat.template),
    ]
    for index, source in enumerate(spec.data.sources):
        urls += [(f"data.sources.{index}.uri", source.uri), (f"data.sources.{index}.repo", source.repo)]
    rewards = enumerate(spec.training.grpo.rewards)
    urls += [(f"training.grpo.rewards.{number}.model", reward.model) for number, reward in rewards]
    urls += [(f"train.inputs.{index}.uri", given.uri) for index, given in enumerate(spec.train.inputs)]
    urls += [(f"evaluation.tasks.{index}.uri", task.uri) for index, task in enumerate(spec.evaluation.tasks)]
    if (checked := spec.data.cleaning.decontaminate) is not None:
        urls += [(f"data.cleaning.decontaminate.tasks.{index}", uri) for index, uri in enumerate(checked.tasks)]
    for field, url in urls:
        if url and carries_secret(url):
            yield Problem(
                field,
                HIDDEN,
                "contains credentials or a query",
                "remove them; credentials come from the environment",
            )
