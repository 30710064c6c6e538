"""A CUDA device computes every family and objective: the same bits twice, the losses of the CPU, and no attention by
the math kernel. Skipped where torch sees no CUDA device.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.engines.interface import build_engine
from holdfast.model.hub import first_weights_digest
from holdfast.rank.randomness import make_deterministic
from holdfast.rank.state_loading import first_state
from tests.model.tiny_model import decoder, export
from tests.train.test_family_layouts import MODELS
from tests.train.test_preferences import LABELS, LORA, ODDS, PAIRS, REWARD
from tests.train.test_preferences import global_batch as pairs_batch
from tests.train.test_reference import END, global_batch
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CUDA, STEPS, RATE = "cluster.accelerator=nvidia", 3, 0.01
WIDE = (
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=2",
    "data.document_masks=true",
    "parallel.processes=1",
    "model.ffn=192",
)
# Bounds of the losses against those of the CPU in fp32. A loss is a difference of logits, which bf16 rounds by 2**-9.
BOUNDS = {"fp32": (2e-4, 1e-6), "bf16": (5e-2, 5e-3)}  # relative, absolute
NARROW = {"bf16": ("training.lora.base=bf16",), "nf4": ("training.lora.base=nf4",)}


@dataclass(frozen=True)
class Trained:
    """What some steps gave."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    operations: set[str]  # of the last step, as torch's profiler names them


def train(*fields: str, marked: bool = False) -> Trained:
    """Some steps of a run from its first state, on its device. `marked` rows hold pairs of answers."""
    given = tiny_spec(*fields)
    assignment = tiny_assignment(*fields)
    if given.model.init_from or given.training.objective.kind == "distillation":
        assignment = assignment.model_copy(update={"first_weights": first_weights_digest(given)})
    make_deterministic("exact", 1)
    engine = build_engine(assignment, VOCABULARY, -1 if marked else END)
    first = first_state(assignment, VOCABULARY)
    for box in engine.frozen():
        first.fill([box])
    first.fill(engine.boxes())
    engine.restored(0)
    losses, norms, operations = [], [], set[str]()
    for step in range(STEPS):
        batch = pairs_batch(step, given.data.kind == "unpaired") if marked else global_batch(step, ignored=False)
        with profile(activities=[ProfilerActivity.CPU]) if step == STEPS - 1 else nullcontext() as profiler:
            output = engine.step(batch, RATE)
            losses.append(float(output.loss))
        norms.append(float(output.grad_norm))
        if profiler is not None and (results := profiler.profiler.kineto_results) is not None:
            operations = {event.name() for event in results.events()}
    state = {box.name: box.data.cpu().clone() for box in engine.saved()}
    engine.close()
    return Trained(losses, norms, state, operations)


def require_as_on_the_cpu(fields: tuple[str, ...], precision: str, *, marked: bool = False) -> None:
    on_device = (*fields, CUDA, f"training.precision={precision}")
    here, again = train(*on_device, marked=marked), train(*on_device, marked=marked)
    assert (here.losses, here.norms) == (again.losses, again.norms)
    assert here.state.keys() == again.state.keys()
    assert [name for name, value in here.state.items() if not torch.equal(value, again.state[name])] == []
    math = {name for name in here.operations if "attention_math" in name or name.endswith("dot_product_attention")}
    assert math == set()
    expected = train(*fields, marked=marked)
    relative, absolute = BOUNDS[precision]
    torch.testing.assert_close(here.losses, expected.losses, rtol=relative, atol=absolute)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights to fine-tune."""
    folder = tmp_path_factory.mktemp("base")
    export(folder, decoder(tiny_spec(*WIDE).model, VOCABULARY))
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    shape = tiny_spec(*WIDE).model.model_copy(update={"layers": 1})
    export(folder, decoder(shape, VOCABULARY))
    return folder


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("family", ["llama", *MODELS])
def test_a_family_trains_as_on_the_cpu_and_to_the_same_bits_twice(family: str, precision: str) -> None:
    require_as_on_the_cpu((*WIDE, *MODELS.get(family, ())), precision)


@pytest.mark.parametrize(
    "fields",
    [
        ("training.activation_checkpointing=full",), ("training.activation_checkpointing=selective",),
        ("training.loss_chunk=7",), ("model.sliding_window=4", "model.family=mistral"), ("parallel.strategy=fsdp",),
        ("training.compile=true",),
    ],
    ids=str,
)  # fmt: skip
def test_a_way_of_training_gives_the_losses_of_the_cpu(fields: tuple[str, ...]) -> None:
    require_as_on_the_cpu((*WIDE, *fields), "bf16")


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("objective", [(), ODDS, REWARD, LABELS, LORA, (*LABELS, *LORA)], ids=str)
def test_an_objective_of_answers_gives_the_losses_of_the_cpu(
    base: Path, objective: tuple[str, ...], precision: str
) -> None:
    require_as_on_the_cpu((*WIDE, *PAIRS, *objective, f"model.init_from={base}"), precision, marked=True)


@pytest.mark.parametrize("stored", NARROW)
def test_a_narrow_frozen_base_gives_the_losses_of_the_cpu(base: Path, stored: str) -> None:
    require_as_on_the_cpu((*WIDE, *LORA, *NARROW[stored], f"model.init_from={base}"), "bf16")


def test_a_teacher_gives_the_losses_of_the_cpu(teacher: Path) -> None:
    fields = ("training.objective=distillation", f"training.distillation.teacher={teacher}")
    require_as_on_the_cpu((*WIDE, *fields, "training.distillation.top_k=6"), "bf16")
