"""What looks like a secret, and the rule that none stands in a URL of the spec."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.components.spec.errors import Problem
from holdfast.components.spec.tree import Spec

_SECRET = re.compile(r"(?i)secret|passw|credential|api_?key|access_?key|(^|_)token$")


def names_secret(name: str) -> bool:
    """Whether a key looks as if its value were a secret."""
    return bool(_SECRET.search(name))


def carries_secret(url: str) -> bool:
    """Whether a URL has a password, a user (that of ssh://git@host is none) or a query such as a signature's."""
    scheme, separator, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, at, _ = place.partition("/")[0].rpartition("@")
    return bool(separator) and ((bool(at) and (":" in user or "ssh" not in scheme)) or "=" in query)


def no_secret_in_urls(spec: Spec) -> Iterator[Problem]:
    """Credentials never stand in a spec."""
    registry = spec.serving.model_registry
    urls = [
        ("store", spec.store),
        ("serving.model_registry.url", registry.url if registry else None),
        ("model.init_from", spec.model.init_from),
        ("data.tokenizer.path", spec.data.tokenizer.path),
        ("data.chat.template", spec.data.chat.template),
    ]
    for index, source in enumerate(spec.data.sources):
        urls += [(f"data.sources.{index}.uri", source.uri), (f"data.sources.{index}.repo", source.repo)]
    for field, url in urls:
        if url and carries_secret(url):
            yield Problem(
                field,
                "(hidden)",
                "carries credentials or a query",
                "remove them; credentials come from the environment",
            )
