"""Activation checkpointing: less memory, the same bits, in every engine."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from holdfast.dataset.vocabulary import ID
from holdfast.engines.recompute import recompute
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from tests.checkpoint.ranks import in_ranks
from tests.train.test_reference import _engine_steps, global_batch
from tests.train.tiny_run import VOCABULARY, tiny_spec

KINDS = ("none", "selective", "full")
LAYOUTS = list(product(("ddp", "fsdp"), ("fp32", "bf16")))
ZERO = [("zero2", "fp32"), ("zero3", "bf16")]


def recomputing(kind: str) -> tuple[str]:
    return (f"training.activation_checkpointing={kind}",)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(ZERO, marks=pytest.mark.drill)], ids=["torch", "deepspeed"])
def test_recomputed_activations_have_the_same_bits(tmp_path: Path, layouts: list[tuple[str, str]]) -> None:
    runs = [
        (
            f"parallel.strategy={strategy}",
            f"training.precision={precision}",
            f"training.activation_checkpointing={kind}",
        )
        for strategy, precision in layouts
        for kind in KINDS
    ]
    results = in_ranks(2, _engine_steps, tmp_path / "ranks", runs, True, seconds=400)
    for rank in results:
        for first in range(0, len(runs), len(KINDS)):
            curve, boxes = rank[first]
            for other_seen, other_boxes in rank[first + 1 : first + len(KINDS)]:
                assert other_seen == curve, runs[first]
                for (name, _, data), (_, _, other) in zip(boxes, other_boxes, strict=True):
                    assert data.tobytes() == other.tobytes(), (name, runs[first])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_compiled_with_its_recomputation(kind: str) -> None:
    torch._dynamo.reset()
    compiled = counters["stats"]["unique_graphs"]
    decoder = Decoder(tiny_spec().model, VOCABULARY)
    initialise(decoder, 0)
    for layer in decoder.model.layers:
        recompute(layer, kind)  # type: ignore[arg-type]
        layer.compile()
    rows = global_batch(0)[:2] & ID
    decoder(rows[:, :-1], rows[:, 1:]).backward()
    assert counters["stats"]["unique_graphs"] == compiled + 1  # for all layers


def kept(kind: str) -> int:
    """The bytes that the layers' forward passes keep for backward, with each storage counted once."""
    decoder = Decoder(tiny_spec().model, VOCABULARY)
    initialise(decoder, 0)
    for layer in decoder.model.layers:
        recompute(layer, kind)  # type: ignore[arg-type]
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    sizes: dict[int, int] = {}

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = decoder.hidden(global_batch(0)[:, :-1] & ID).sum()
    loss.backward()
    return sum(sizes.values())


def test_a_layer_keeps_its_input_and_no_more() -> None:
    spec = tiny_spec().model
    stream = 8 * spec.context * spec.hidden * 4  # bytes of the residual stream
    assert kept("full") < kept("none") / 3
    assert kept("full") <= (spec.layers + 4) * stream  # the layers' inputs, the last norm, and tables


def test_another_kind_is_another_plan_and_no_other_run() -> None:
    from holdfast.spec import run_id

    ids = {run_id(tiny_spec(*recomputing(kind)), "d") for kind in KINDS}
    assert len(ids) == 1
