"""A small valid spec, as text and as a tree, for tests that break one field."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.spec import Problem, Spec, SpecError, parse_spec, strict_yaml

Refused = Callable[..., list[Problem]]
RIGHT: dict[str, Any] = {"name": "small", "data": {"sources": [{"uri": "corpus/*.txt"}]}}


def text_with(**changes: object) -> str:
    """The valid spec with changed fields: `text_with(**{"model.layers": 2})`."""
    tree = copy.deepcopy(RIGHT)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = tree
        for part, following in itertools.pairwise([*parents, last]):
            if isinstance(node, list) and not node:
                node.append({})
            empty: object = [] if following.isdigit() else {}
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, empty)
        if isinstance(node, list) and not node:
            node.append(None)
        node[int(last) if isinstance(node, list) else last] = value
    return strict_yaml.write(tree)


@pytest.fixture
def refused() -> Refused:
    """The problems for which a spec is refused."""

    def refuse(text: str | None = None, overrides: tuple[str, ...] = (), **changes: object) -> list[Problem]:
        with pytest.raises(SpecError) as error:
            parse_spec(text_with(**changes) if text is None else text, overrides)
        for problem in error.value.problems:
            assert f"{problem.field}: {problem.message}" in str(error.value)
            assert problem.remedy in str(error.value)
        return error.value.problems

    return refuse


@pytest.fixture
def spec() -> Spec:
    """The valid spec."""
    return parse_spec(text_with())
