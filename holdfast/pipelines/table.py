"""The DAG: preprocess, train, evaluate, and register a blessed model; notify at the end.

`holdfast.steps` has the inputs, outputs and resources of each step; this module has their order, conditions and
retries. Every backend renders this table, and none defines another DAG.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.spec import Spec
from holdfast.steps import STEPS, producer_of

DESCRIPTION = "Raw text to a registered language model."


@dataclass(frozen=True)
class Edge:
    """An edge of the DAG: `after` begins when `before` has succeeded.

    With `when`, only if the first output of `before` equals that word. With `each`, concurrently once per item of the
    list that `before` returns; the next step waits for all of them.
    """

    before: str
    after: str
    when: str = ""
    each: bool = False


# Only words decide conditions. A NaN or a text with a quote would break them.
EDGES = (
    Edge("trigger", "preprocess", when="due"),
    Edge("preprocess", "train"),
    Edge("train", "evaluate"),
    Edge("evaluate", "register", when="blessed"),
)
# A sweep: train, then evaluate, once for each trial. Compare when all trials have ended with any result.
SWEEP_EDGES = (
    Edge("preprocess", "train"),
    Edge("train", "evaluate"),
    Edge("evaluate", "compare"),
    Edge("compare", "register", when="blessed"),
)
# Two entrypoints: a scheduled DAG first checks whether a retraining is due.
START, SCHEDULED_START = "preprocess", "trigger"
SCRIPT_START = "train"  # of the DAG of a training script, which reads its own data

# With `data.fan_out`, many tokenise steps run before preprocess, which then only joins their results.
FAN_OUT_START = "divide"
FAN_OUT_EDGES = (
    Edge("trigger", "divide", when="due"),
    Edge("divide", "tokenise", each=True),
    Edge("tokenise", "preprocess"),
    *EDGES[1:],
)


def edges_of(spec: Spec, *, sweep: bool = False) -> tuple[Edge, ...]:
    """The edges of the DAG of a spec, or of a `sweep` of it. Without data it begins with training. It ends with a
    script that is not evaluated."""
    if sweep:
        return SWEEP_EDGES if spec.data.sources else SWEEP_EDGES[1:]
    edges = EDGES if spec.data.fan_out == 1 else FAN_OUT_EDGES
    if not spec.data.sources:
        edges = (Edge("trigger", SCRIPT_START, when="due"), *edges[2:])
    return edges if spec.is_evaluated else tuple(edge for edge in edges if edge.before not in ("train", "evaluate"))


def start_of(spec: Spec, *, sweep: bool = False) -> str:
    """The first step of the DAG of a spec without a retraining check, or of a `sweep` of it."""
    if not spec.data.sources:
        return SCRIPT_START
    return START if sweep or spec.data.fan_out == 1 else FAN_OUT_START


@dataclass(frozen=True)
class Retry:
    """Retries of failed steps. A retry resumes the step, and a permanent failure fails immediately."""

    wait: int = 15  # seconds before the first retry
    factor: int = 2  # growth of each wait; KFP's backend truncates fractions
    longest_wait: int = 600  # seconds
    tries: int = 20  # if the platform reads the exit code and retries only the table's retryable ones
    blind_tries: int = 3  # otherwise
    seconds: int = 90 * 24 * 3600  # limit on platforms that count from the first start; exceeds the longest training


RETRY = Retry()


def steps_from(start: str, edges: Sequence[Edge] = EDGES) -> Iterator[str]:
    """The steps from `start`, in the order of the edges."""
    yield start
    for edge in edges:
        if edge.before == start:
            yield from steps_from(edge.after, edges)


def inputs_of(step: str, steps: Collection[str]) -> tuple[str, ...]:
    """The inputs of `step` in a DAG of `steps`. An optional input is omitted if no step of the DAG produces it."""
    definition = STEPS[step]
    return tuple(name for name in definition.inputs if name not in definition.optional or producer_of(name) in steps)


def output_of(edge: Edge) -> str:
    """The output of `edge.before` that its condition tests."""
    return STEPS[edge.before].outputs[0]
