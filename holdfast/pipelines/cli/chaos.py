"""`holdfast chaos`: the promise, proved on a spec of yours."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, SpecFile, StoreRoot, print_json

if TYPE_CHECKING:
    from holdfast.pipelines.chaos.compare import Chaos


def chaos(
    spec: SpecFile,
    seed: Annotated[int | None, typer.Option(help="Of the schedule. Default: drawn, and printed.")] = None,
    minutes: Annotated[float, typer.Option(help="Go on with further storms until so many have passed.")] = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=10, help="That each run trains. Default: the spec's, 60 at most.")
    ] = None,
    faults: Annotated[str, typer.Option(metavar="A,B", help="Only these. Default: all; see docs/chaos.md.")] = "",
    overrides: Overrides = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Train a spec twice on this machine, calm and under faults, and compare the bits.

    Every fault happens once, in an order and at steps that the seed decides; each must be survived. Ends with 0 when
    all were and the two models are the same to the last bit, with 6 when they differ, and names where.

    Example: holdfast chaos examples/quickstart.yaml
    """
    from holdfast.pipelines.chaos import compare
    from holdfast.pipelines.view.chaos import Teller
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    asked = compare.Chaos(
        spec, overrides or (), steps or min(checked.training.steps, compare.STEPS),
        compare.draw_seed() if seed is None else seed, minutes, compare.known_faults(faults), store,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing of the runs may stay behind
    with Teller(asked, to_stderr=as_json) as teller:
        try:
            compare.run_with_faults(asked, teller.tell)
        finally:
            if as_json and asked.calm is not None:
                print_json(_as_json(asked))


def _as_json(asked: Chaos) -> dict[str, object]:
    assert asked.calm is not None
    return {
        "seed": asked.seed,
        "calm": asked.calm.model_dump(mode="json"),
        "left_out": asked.left_out,
        "storms": [
            {
                "seed": storm.seed, "equal": storm.equal, "faults": storm.survived, "missed": storm.missed,
                "commands": storm.commands,
                "state_digest": storm.result.state_digest, "attempts": storm.result.attempts,
                "seconds": storm.result.seconds, "goodput": asked.goodput(storm), "divergence": storm.divergence,
            }
            for storm in asked.storms
        ],
    }  # fmt: skip
