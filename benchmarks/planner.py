"""The planner against real steps: memory, time and collectives. `python -m benchmarks.planner [--ranks N]`.

Each line of the first part is a step of the torch engine on a CPU. It compares the peak bytes of tensors, state
included, with the planner's estimate without its allowance for fragmentation. The bar is 5 % (S1). The second part is
`holdfast calibrate` with N ranks: predicted over measured, for collectives of sizes outside the fit and for whole steps
(bar: 15 %).
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch

from benchmarks._living import Living
from holdfast.engines.assignment import Assignment
from holdfast.engines.torch.engine import TorchEngine
from holdfast.pipelines.measure import calibrate
from holdfast.pipelines.view.planning import print_calibration
from holdfast.planning import Accelerator, Architecture, Layout, memory, practice_here
from holdfast.spec import parse_spec

BAR = 0.05
STEP_BAR = 0.15
HERE = Accelerator(
    name="here",
    kind="cpu",
    bf16=1e11,
    fp32=1e11,
    memory=1e10,
    bandwidth=1e10,
    node=1,
    link=1e9,
    network=1e9,
    watts=0,
    context=0,
)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    ranks = parser.parse_args().ranks
    print(f"planner: memory within {compare_memory():.1%} of real steps (bar {BAR:.0%})")
    calibration = calibrate(ranks)
    print_calibration(calibration)
    ratios = sorted(calibration.step(step).seconds / step.seconds for step in calibration.steps)
    off = {name: error for name, error in calibration.errors().items() if name != "step"}
    print(
        f"planner: steps of {ranks} ranks predicted at {ratios[0]:.2f} to {ratios[-1]:.2f} of what is measured "
        f"(bar {STEP_BAR:.0%}); collectives off by " + ", ".join(f"{error:.0%} ({name})" for name, error in off.items())
    )


def compare_memory() -> float:
    """Measure, estimate and print. Returns the largest error."""
    worst = 0.0
    kinds = itertools.product(("none", "selective", "full"), ("fp32", "bf16"), (False, True), ((4, 4), (12, 8)))
    for checkpointing, precision, masks, (layers, micro_batch) in kinds:
        spec = parse_spec(
            f"""
            name: a
            store: s3://bucket/prefix
            data: {{sources: [{{uri: x}}], document_masks: {str(masks).lower()}}}
            model: {{layers: {layers}, hidden: 192, heads: 6, kv_heads: 2, context: 256}}
            training:
              {{steps: 3, global_batch: 8, micro_batch: {micro_batch}, precision: {precision},
               activation_checkpointing: {checkpointing}}}
            """
        )
        engine = TorchEngine(Assignment.of(spec, "run", "dataset"), 512, 3)
        rows = (torch.arange(8 * 257) % 512).view(8, -1)
        with Living([box.data for box in engine.boxes()]) as living:
            engine.step(rows, 1e-3)
        layout = Layout(micro_batch=micro_batch, checkpointing=spec.training.activation_checkpointing)
        planned = memory(
            Architecture.of(spec.model, 512),
            layout,
            HERE,
            global_batch=8,
            precision=precision,
            practice=practice_here(precision, layout, "cpu"),
        )
        estimate = planned.total - planned.terms["fragmentation"]
        error = estimate / living.peak - 1
        worst = max(worst, abs(error))
        print(
            f"{checkpointing:<10} {precision}  {layers:>2} layers, micro-batch {micro_batch}{', masks' * masks:<7}  "
            f"measured {living.peak / 1e6:7.1f} MB, planned {estimate / 1e6:7.1f} MB, {error:+.1%}  ({planned.moment})"
        )
    return worst


if __name__ == "__main__":
    main()
