"""The planner's memory compared with the peaks that a CUDA device measured (`benchmarks.accelerator`)."""

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.accelerator.workload import shapes, spec_for
from holdfast.planning import ACCELERATORS, Architecture, Layout, Updates, memory, practice_here
from holdfast.planning.activations import layer_activations
from holdfast.spec import Spec
from holdfast.spec.training import LOSS_CHUNK

ALL_FIGURES = json.loads((Path(benchmarks.__file__).parent / "figures" / "accelerator-h200.json").read_text())
FIGURES = ALL_FIGURES["memory"]["all"]
OLDER = next(name for name in ALL_FIGURES if name.startswith("mfu of 16 rows a step"))
BAR = 0.05  # S1
ROWS = {"mfu": (16, 64, 2048), OLDER: (4, 16, LOSS_CHUNK)}  # of a micro-batch and of a step, and tokens of the loss


def allocated(spec: Spec, vocabulary: int) -> float:
    """Bytes that the plan expects of torch's allocator."""
    training = spec.training
    layout = Layout(micro_batch=training.micro_batch, checkpointing=training.activation_checkpointing)
    planned = memory(
        Architecture.of(spec.model, vocabulary),
        layout,
        ACCELERATORS["H200"],
        global_batch=training.global_batch,
        precision=training.precision,
        practice=practice_here(training.precision, layout, "nvidia", Updates.of(training)),
    ).terms
    return sum(planned[term] for term in planned.keys() - {"fragmentation", "driver and collectives"})


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if isinstance(figure, dict)])
def test_the_plan_is_within_five_percent_of_what_torch_allocated_on_a_device(name: str) -> None:
    size, checkpointing, *documents = name.split()
    settings = {"precision": "bf16", "activation_checkpointing": checkpointing, "masks": bool(documents)}
    spec = spec_for(size, "nvidia", **settings)
    assert allocated(spec, shapes(size)[1]) == pytest.approx(FIGURES[name]["peak"], rel=BAR)


@pytest.mark.parametrize(
    ("section", "variant"),
    [(section, name) for section in ROWS for name in ALL_FIGURES[section] if not name.startswith("bare")],
)
def test_the_plan_of_the_mfu_benchmark_is_within_five_percent_of_what_torch_allocated(
    section: str, variant: str
) -> None:
    micro, rows, chunk = ROWS[section]
    spec = spec_for(
        "large",
        "nvidia",
        precision="bf16",
        compile=variant.endswith("compiled"),
        micro_batch=micro,
        global_batch=rows,
        loss_chunk=chunk,
        masks="documents" in variant,
    )
    peak = ALL_FIGURES[section][variant]["peak_bytes"]
    assert allocated(spec, shapes("large")[1]) == pytest.approx(peak, rel=BAR)


def planned_bytes(layout: Layout, compiled: bool, gated: bool = True) -> tuple[float, float]:
    """What a layer keeps, and all terms together."""
    shape = Architecture(24, 2048, 16, 16, 5632, 2048, 32_000, gated=gated)
    practice = practice_here("bf16", layout, "nvidia", Updates(compiled=compiled))
    terms = memory(shape, layout, ACCELERATORS["H200"], global_batch=8, precision="bf16", practice=practice).terms
    return layer_activations(shape, layout, "bf16", practice), sum(terms.values())


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(context=2)])
def test_ranks_that_split_layers_or_sequences_count_as_eager_until_they_are_measured(layout: Layout) -> None:
    assert planned_bytes(layout, compiled=True) == planned_bytes(layout, compiled=False)
    eager, compiled = (planned_bytes(Layout(), compiled) for compiled in (False, True))
    assert compiled[0] < eager[0] and compiled[1] < eager[1]


def test_only_a_gate_has_an_activation_that_is_recomputed_and_not_kept() -> None:
    gated, plain = (planned_bytes(Layout(), compiled=True, gated=gated)[0] for gated in (True, False))
    assert gated - plain == 5632 * 2 * 2048  # gate, up and their product, or before and after GELU
