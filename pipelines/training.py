"""The DAG, and with it the product: preprocess, train, evaluate, and register what was blessed; notify at the end.

What each step takes, gives and needs stands in `holdfast.components.steps`; here are their order, the conditions and
the retries. Every backend renders this: none has a DAG of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.components.steps import STEPS

DESCRIPTION = "Raw text to a registered language model."


@dataclass(frozen=True)
class Edge:
    """`after` begins when `before` has succeeded; with `when`, only if the first output of `before` is that word."""

    before: str
    after: str
    when: str = ""


# Only a word decides. A number can be NaN, and a text can hold a quote: both break conditions.
EDGES = (
    Edge("trigger", "preprocess", when="due"),
    Edge("preprocess", "train"),
    Edge("train", "evaluate"),
    Edge("evaluate", "register", when="blessed"),
)
# Two ways in: a DAG that runs by itself asks first whether a retraining is due.
START, SCHEDULED_START = "preprocess", "trigger"


@dataclass(frozen=True)
class Retry:
    """When a step that failed is tried again: it goes on where it was, and one that cannot succeed fails at once."""

    wait: int = 15  # seconds before the first try again
    factor: int = 2  # by which each wait is longer than the one before; KFP's backend drops a fraction
    longest_wait: int = 600  # seconds
    tries: int = 20  # where the platform can read the exit code, and tries again only what the table calls retryable
    blind_tries: int = 3  # where it cannot
    seconds: int = 90 * 24 * 3600  # for a platform that counts from the first start: longer than the longest training


RETRY = Retry()


def from_here(start: str) -> Iterator[str]:
    """The steps from `start` on, in the order of the edges."""
    yield start
    for edge in EDGES:
        if edge.before == start:
            yield from from_here(edge.after)


def output_of(edge: Edge) -> str:
    """The output of `edge.before` that its condition looks at."""
    return STEPS[edge.before].outputs[0]
