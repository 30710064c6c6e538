"""`holdfast chaos`: trains your spec with and without faults, and compares the bits."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, SpecFile, StoreRoot, print_json

if TYPE_CHECKING:
    from holdfast.pipelines.chaos.compare import Chaos


def chaos(
    spec: SpecFile,
    seed: Annotated[int | None, typer.Option(help="Seed of the schedule. Default: random, and printed.")] = None,
    minutes: Annotated[float, typer.Option(help="Repeat the faulty run until these minutes are over.")] = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=10, help="Steps of each run. Default: those of the spec, at most 60.")
    ] = None,
    faults: Annotated[str, typer.Option(metavar="A,B", help="Faults to use. Default: all; see docs/chaos.md.")] = "",
    overrides: Overrides = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Train a spec twice on this machine, undisturbed and under faults, and compare the bits.

    The run must survive every fault. Each fault happens once, in an order and at steps that the seed decides. Prints
    the schedule, each fault, the goodput and the result. Ends with 0 if every fault was survived and both models have
    the same bits. Ends with 6 if the bits differ, and names the first difference.

    Example: holdfast chaos examples/quickstart.yaml
    """
    from holdfast.api import machines
    from holdfast.pipelines.view.chaos import Teller

    request = machines.chaos(
        spec, overrides=overrides or (), steps=steps, seed=seed, minutes=minutes, faults=faults, store=store
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up, as Ctrl-C does
    with Teller(request, to_stderr=as_json) as teller:
        try:
            machines.run_with_faults(request, teller.tell)
        finally:
            if as_json and request.calm is not None:
                print_json(_as_json(request))


def _as_json(experiment: Chaos) -> dict[str, object]:
    assert experiment.calm is not None
    return {
        "seed": experiment.seed,
        "calm": experiment.calm.model_dump(mode="json"),
        "left_out": experiment.left_out,
        "storms": [
            {
                "seed": storm.seed,
                "equal": storm.equal,
                "faults": storm.survived,
                "missed": storm.missed,
                "commands": storm.commands,
                "state_digest": storm.result.state_digest,
                "attempts": storm.result.attempts,
                "seconds": storm.result.seconds,
                "goodput": experiment.goodput(storm),
                "divergence": storm.divergence,
            }
            for storm in experiment.storms
        ],
    }
