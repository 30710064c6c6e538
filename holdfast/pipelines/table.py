"""The DAG, and with it the product: preprocess, train, evaluate, and register what was blessed; notify at the end.

What each step takes, gives and needs stands in `holdfast.steps`; here are their order, the conditions and
the retries. Every backend renders this: none has a DAG of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.spec import Spec
from holdfast.steps import STEPS, producer_of

DESCRIPTION = "Raw text to a registered language model."


@dataclass(frozen=True)
class Edge:
    """`after` begins when `before` has succeeded; with `when`, only if the first output of `before` is that word; with
    `each`, once for every item of the list that `before` gives, so many at once, and what comes next when all are done.
    """

    before: str
    after: str
    when: str = ""
    each: bool = False


# Only a word decides. A number can be NaN, and a text can hold a quote: both break conditions.
EDGES = (
    Edge("trigger", "preprocess", when="due"),
    Edge("preprocess", "train"),
    Edge("train", "evaluate"),
    Edge("evaluate", "register", when="blessed"),
)
# A sweep: train and evaluate once for each trial, one behind the other; compare when all have ended, however they did.
SWEEP_EDGES = (
    Edge("preprocess", "train"),
    Edge("train", "evaluate"),
    Edge("evaluate", "compare"),
    Edge("compare", "register", when="blessed"),
)
# Two ways in: a DAG that runs by itself asks first whether a retraining is due.
START, SCHEDULED_START = "preprocess", "trigger"

# With `data.fan_out`, many tokenise before preprocess, which then only joins what they made.
FAN_OUT_START = "divide"
FAN_OUT_EDGES = (
    Edge("trigger", "divide", when="due"),
    Edge("divide", "tokenise", each=True),
    Edge("tokenise", "preprocess"),
    *EDGES[1:],
)


def edges_of(spec: Spec) -> tuple[Edge, ...]:
    """The edges of the DAG of a spec."""
    return EDGES if spec.data.fan_out == 1 else FAN_OUT_EDGES


def start_of(spec: Spec) -> str:
    """The first step of the DAG of a spec, when it does not ask whether a retraining is due."""
    return START if spec.data.fan_out == 1 else FAN_OUT_START


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


def steps_from(start: str, edges: Sequence[Edge] = EDGES) -> Iterator[str]:
    """The steps from `start` on, in the order of the edges."""
    yield start
    for edge in edges:
        if edge.before == start:
            yield from steps_from(edge.after, edges)


def inputs_of(step: str, steps: Collection[str]) -> tuple[str, ...]:
    """The inputs of `step` in a DAG of `steps`: what may be missing is left out where no step of it gives that."""
    found = STEPS[step]
    return tuple(name for name in found.inputs if name not in found.optional or producer_of(name) in steps)


def output_of(edge: Edge) -> str:
    """The output of `edge.before` that its condition looks at."""
    return STEPS[edge.before].outputs[0]
