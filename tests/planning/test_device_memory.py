"""The planner's memory compared with the peaks that a CUDA device measured (`benchmarks.accelerator`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.accelerator.workload import shapes, spec_for
from holdfast.planning import ACCELERATORS, Architecture, Layout, Updates, memory, practice_here

FIGURES = json.loads((Path(benchmarks.__file__).parent / "figures" / "accelerator-h200.json").read_text())["memory"][
    "all"
]
BAR = 0.05  # S1


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if isinstance(figure, dict)])
def test_the_plan_is_within_five_percent_of_what_torch_allocated_on_a_device(name: str) -> None:
    size, checkpointing, *documents = name.split()
    _, vocabulary, _, global_batch = shapes(size)
    settings = {"precision": "bf16", "activation_checkpointing": checkpointing, "masks": bool(documents)}
    spec = spec_for(size, "nvidia", **settings)
    layout = Layout(micro_batch=spec.training.micro_batch, checkpointing=checkpointing)
    planned = memory(
        Architecture.of(spec.model, vocabulary),
        layout,
        ACCELERATORS["H200"],
        global_batch=global_batch,
        precision="bf16",
        practice=practice_here("bf16", layout, "nvidia", Updates.of(spec.training)),
    ).terms
    allocated = sum(planned[term] for term in planned.keys() - {"fragmentation", "driver and collectives"})
    assert allocated == pytest.approx(FIGURES[name]["peak"], rel=BAR)
