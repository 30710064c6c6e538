"""Adapters of mixtures of experts: the model that they describe, every layout, and the bits after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.model import nf4
from holdfast.model.decoder import Decoder
from holdfast.model.export import published_rows
from holdfast.model.initialise import initialise
from holdfast.model.lora import (
    FrozenExperts,
    FrozenLinear,
    adapter_shapes,
    add_adapters,
    frozen_matrices,
    is_adapter,
    merging_rows,
    scale_of,
    stored_rows,
)
from holdfast.model.published import published
from holdfast.spec.training import Lora
from tests.model.exporting import write_hugging_face
from tests.train.ranks import train_in_ranks, trained
from tests.train.test_experts import column
from tests.train.test_mesh import overrides_of, require_close
from tests.train.test_reference import global_batch
from tests.train.tiny_run import DATASET_ID, END_OF_TEXT, VOCABULARY, new_store, tiny_spec

WIDE = ("model.hidden=64", "model.ffn=64", "model.experts=4")
MIXTRAL = (*WIDE, "model.family=mixtral")
SHARED = (*WIDE, "model.family=qwen2_moe", "model.routing.shared=1")
GPT_OSS = (*WIDE, "model.family=gpt_oss", "model.sliding_window=4")
DEEPSEEK = (
    *WIDE, "model.family=deepseek_v3", "model.routing.shared=1", "model.dense_layers=1", "model.dense_ffn=128",
    "model.latent={query: 64, key_value: 64, rope: 8, value: 16}", "model.head_dim=24", "model.kv_heads=4", "model.routing.balance=none",
)  # fmt: skip
RANK = 4


def random_adapters(overrides: tuple[str, ...], lora: Lora) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = adapter_shapes(tiny_spec(*overrides).model, VOCABULARY, lora)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def adapted(overrides: tuple[str, ...], lora: Lora, adapters: dict[str, Tensor]) -> Decoder:
    """A decoder with these adapters, and a base as it is stored."""
    decoder = Decoder.empty(tiny_spec(*overrides).model, VOCABULARY)
    initialise(decoder, 1)
    whole = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    add_adapters(decoder, lora)
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(adapters[name])
    for name, module in decoder.named_modules():
        if isinstance(module, FrozenLinear | FrozenExperts):
            for matrix, *packed in module.packed_matrices():
                for target, part in zip(packed, nf4.quantise(whole[f"{name}.{matrix}"]), strict=True):
                    target.copy_(part)
    return decoder


def merged(overrides: tuple[str, ...], lora: Lora, adapters: dict[str, Tensor]) -> Decoder:
    """The model that an export has: read from its published tensors."""
    model = tiny_spec(*overrides).model
    decoder = Decoder.empty(model, VOCABULARY)
    initialise(decoder, 1)
    whole = decoder.state_dict()

    def of(tensors: dict[str, Tensor], name: str, *bounds: int) -> Iterator[Tensor]:
        yield from tensors[name][slice(*bounds) if bounds else slice(None)].split(7)

    base = stored_rows(lambda *at: of(whole, *at), frozen_matrices(model, VOCABULARY, lora), lora.base)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapters.items()}
    rows = merging_rows(base, shapes, lambda *at: of(adapters, *at), lora)
    parts: dict[str, list[Tensor]] = {}
    for name, places in published(model, VOCABULARY).items():
        for place in places:
            tensor = torch.cat(list(published_rows(name, place, rows)))
            if place.experts:
                tensor = (tensor.transpose(1, 2) if tensor.dim() > 2 else tensor).flatten(0, 1)
            parts.setdefault(place.tensor, []).append(tensor)
    decoder.load_state_dict({name: torch.cat(tensors) for name, tensors in parts.items()})
    return decoder


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("overrides", [MIXTRAL, SHARED, GPT_OSS, DEEPSEEK], ids=["mixtral", "shared", "oss", "latent"])
def test_adapted_experts_compute_and_learn_what_their_merged_model_does(overrides: tuple[str, ...], base: str) -> None:
    lora = Lora(rank=RANK, alpha=12, base=base, targets=("o_proj", "gate_proj", "up_proj", "down_proj"))  # type: ignore[arg-type]
    adapters, rows = random_adapters(overrides, lora), global_batch(0, ignored=False)
    ours, whole = adapted(overrides, lora, adapters), merged(overrides, lora, adapters)
    losses = [decoder(rows[:, :-1], rows[:, 1:]) for decoder in (ours, whole)]
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-6, atol=0)
    for loss in losses:
        loss.backward()
    experts, gradients = tiny_spec(*overrides).model.experts, dict(whole.named_parameters())
    assert {name for name, each in ours.named_parameters() if each.grad is not None} == set(adapters)
    for name, parameter in ours.named_parameters():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            count = experts if ".mlp.experts." in name else 1
            weight = gradients[f"{stem}_proj" if count > 1 else f"{stem}.weight"].grad
            assert weight is not None
            other = f"{stem}.lora_B.weight"
            low, high, full = (each.unflatten(0, (count, -1)) for each in (adapters[name], adapters[other], weight))
            for actual, expected in (
                (parameter.grad, high.transpose(1, 2) @ full * scale_of(lora)),
                (ours.get_parameter(other).grad, full @ low.transpose(1, 2) * scale_of(lora)),
            ):
                assert actual is not None
                bound = 2e-5 * float(expected.abs().max())
                torch.testing.assert_close(actual, expected.flatten(0, 1), rtol=0, atol=bound, msg=name)
