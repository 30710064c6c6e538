"""Initial weights are pure functions of seed and name. Also, counts that need no weights."""

import hashlib
import math

import numpy as np
import pytest
import torch

from holdfast.model import initialise as module
from holdfast.model.initialise import (
    flops_per_token,
    initial_slice,
    initial_tensor,
    parameter_count,
    parameter_shapes,
)
from tests.model.tiny_model import decoder, shape

NAME = "model.layers.0.mlp.down_proj.weight"
ADAPTER = "model.layers.0.mlp.down_proj.lora_A.weight"


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    model = shape()
    first = initial_tensor(NAME, (32, 96), model, 7)
    torch.manual_seed(1)
    assert torch.equal(first, initial_tensor(NAME, (32, 96), model, 7))
    assert not torch.equal(first, initial_tensor(NAME, (32, 96), model, 8))
    assert not torch.equal(first, initial_tensor(NAME.replace("0", "1"), (32, 96), model, 7))


def test_these_bits_never_change_without_a_new_data_plane_version() -> None:
    digest = hashlib.sha256(initial_tensor(NAME, (32, 96), shape(), 7).numpy().tobytes()).hexdigest()
    assert digest[:16] == "c37133f8b0363462"


@pytest.mark.parametrize("block", [1 << 20, 64])
@pytest.mark.parametrize("name", [NAME, ADAPTER])
def test_any_slice_is_that_part_of_the_whole(block: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    whole = initial_tensor(name, (33, 9), shape(), 0).flatten()
    for start, stop in [(0, 297), (0, 64), (63, 65), (100, 100), (64, 192), (296, 297)]:
        assert torch.equal(initial_slice(name, (33, 9), shape(), 0, start=start, stop=stop), whole[start:stop])
    with pytest.raises(ValueError, match="not a range"):
        initial_slice(NAME, (33, 9), shape(), 0, start=0, stop=298)


def test_standard_deviations_are_those_of_the_spec_and_norms_are_one() -> None:
    model = shape(layers=8, init_std=0.02)
    wide = initial_tensor("model.layers.0.self_attn.q_proj.weight", (1000, 1000), model, 0)
    output = initial_tensor("model.layers.0.self_attn.o_proj.weight", (1000, 1000), model, 0)
    assert abs(wide.std().item() / 0.02 - 1) < 0.01
    assert abs(output.std().item() / (0.02 / math.sqrt(16)) - 1) < 0.01
    assert abs(wide.mean().item()) < 1e-4
    assert torch.equal(initial_tensor("model.norm.weight", (32,), model, 0), torch.ones(32))
    assert np.unique(wide.numpy()).size > 990_000, "blocks do not repeat"


def test_an_adapter_begins_as_nothing_with_a_first_matrix_as_peft_draws_it() -> None:
    first = initial_tensor(ADAPTER, (64, 400), shape(), 0)
    reference = torch.nn.init.kaiming_uniform_(torch.empty(64, 400), a=math.sqrt(5))
    assert 0.0499 < first.abs().max() <= 1 / math.sqrt(400)
    assert abs(first.std() / reference.std() - 1) < 0.02
    assert abs(first.mean()) < 1e-3
    assert not initial_tensor(ADAPTER.replace("lora_A", "lora_B"), (400, 64), shape(), 0).any()


@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_real_model(tied: bool) -> None:
    model = shape(tie_embeddings=tied, kv_heads=2)
    state = decoder(model).state_dict()
    assert parameter_shapes(model, 300) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert parameter_count(model, 300) == sum(tensor.numel() for tensor in state.values())


def test_flops_are_six_for_a_multiplied_parameter_and_the_attention() -> None:
    model = shape(kv_heads=2)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * model.ffn_width
    expected = 6 * (2 * layer + 300 * 32) + 12 * 2 * 32 * 32
    assert flops_per_token(model, 300) == expected
    assert flops_per_token(shape(kv_heads=2, tie_embeddings=False), 300) == expected
    assert flops_per_token(model, 300, 64) == expected + 12 * 2 * 32 * 32
