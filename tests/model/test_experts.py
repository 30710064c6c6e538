"""A mixture of experts: each token passes through exactly its experts, and none is dropped at any load."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from holdfast.model.decoder import Decoder
from holdfast.model.experts import CORRECTION, Load, in_order
from holdfast.model.hugging_face import read_hugging_face, require_fit
from holdfast.model.initialise import flops_per_token, initial_slice, parameter_count, parameter_shapes
from holdfast.model.layers import Mixture
from holdfast.model.published import published, rows_of
from holdfast.model.token_logprobs import IGNORED
from holdfast.planning.shape import Architecture
from holdfast.spec.errors import DataError, SpecError
from holdfast.spec.families import MIXTURES, PRESETS
from holdfast.spec.model import Model
from tests.model.tiny_model import decoder, export, shape

TOKENS = torch.randint(0, 300, (3, 33), generator=torch.Generator().manual_seed(1))


def mixture(family: str = "mixtral", **routing: object) -> Model:
    shared = {"shared": 2} if PRESETS[family].shared != "none" else {}
    window: dict[str, Any] = {"sliding_window": 9} if family == "gpt_oss" else {}
    if family == "deepseek_v3":
        window = {"head_dim": 12, "latent": {"query": 10, "key_value": 14, "rope": 8, "value": 6}}
    return shape(family=family, experts=5, ffn=24, routing={"top_k": 3, **shared, **routing}, **window)


def one_layer(model: Model) -> Mixture:
    layer = decoder(model).model.layers[1].mlp
    assert isinstance(layer, Mixture)
    return layer


def near(found: torch.Tensor, expected: torch.Tensor, summands: int, atol: float = 1e-8) -> bool:
    """Whether two sums of the same terms in different order differ only by rounding. Each addition has an error of
    2^-24 of its operands; the largest element is the measure. The difference is also at most `atol` and 1e-5 of the
    value. (Few are equal bit for bit here. Differences up to 16 units of 2^-24 of the largest element were measured.)
    """
    rounding = torch.full_like(expected, summands * 2**-24 * float(expected.detach().abs().max()))
    return bool(((found - expected).abs() <= torch.minimum(rounding, atol + 1e-5 * expected.abs())).all())


def test_choices_are_in_the_order_of_their_scores_where_the_device_leaves_them_in_none() -> None:
    for device in ("cuda", "hpu"):
        assert in_order(torch.device(device), biased=True) and in_order(torch.device(device), biased=False)
    assert not in_order(torch.device("cpu"), biased=True)  # like transformers, with other bits


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_token_has_its_best_experts_and_weights_that_sum_to_one_where_they_are_to(
    family: str, normalise: bool
) -> None:
    router = one_layer(mixture(family, normalise=normalise)).gate
    x = torch.randn(2, 7, 32)
    chosen, weight, load = router(x)
    assert chosen.shape == weight.shape == (14, 3)
    assert all(len(set(experts)) == 3 for experts in chosen.tolist())
    scores = F.linear(x.flatten(0, 1), router.weight)
    scores = scores.sigmoid() if router.biased else scores.softmax(-1)
    assert [set(experts) for experts in chosen.tolist()] == [
        set(experts) for experts in scores.topk(3).indices.tolist()
    ]
    assert (weight > 0).all()
    if normalise or family in ("mixtral", "gpt_oss"):
        assert near(weight.sum(1), torch.ones(14), 5)  # two additions twice, and a division
    else:
        assert torch.equal(weight, scores.gather(1, chosen))
    assert load.tokens_E.sum() == 14 * 3


@pytest.mark.parametrize("everyone", [True, False], ids=["one expert has all", "as it comes"])
def test_no_token_is_dropped_and_its_gradient_is_that_of_each_token_by_itself(everyone: bool) -> None:
    layer = one_layer(mixture())
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    if everyone:  # all tokens prefer the first expert, and none prefers the last two
        with torch.no_grad():
            x.abs_()
            layer.gate.weight.copy_(torch.tensor([3.0, 2.0, 1.0, -1.0, -2.0])[:, None].expand(5, 32))
    output, load = layer(x)
    if everyone:
        assert load.tokens_E.tolist() == [18, 18, 18, 0, 0]
    chosen, weight, _ = layer.gate(x)
    wide, down = layer.experts.gate_up_proj.view(5, 2, 24, 32), layer.experts.down_proj.view(5, 32, 24)
    expected = torch.stack(
        [
            sum(
                w * (F.silu(token @ wide[e, 0].T) * (token @ wide[e, 1].T)) @ down[e].T
                for e, w in zip(experts, weights, strict=True)
            )
            for token, experts, weights in zip(x.flatten(0, 1), chosen.tolist(), weight, strict=True)
        ]
    )
    assert near(output.flatten(0, 1), expected, 24, atol=1e-5)  # the expert's width
    inputs = [x, *layer.parameters()]
    for actual, reference in zip(
        *(torch.autograd.grad(y.sin().sum(), inputs) for y in (output, expected)), strict=True
    ):
        assert near(actual, reference, 18 * 3, atol=1e-4)  # tokens times choices


def test_balancing_adds_a_gradient_and_nothing_to_the_loss_in_training_alone_and_each_sequence_by_itself() -> None:
    plain, balanced = (decoder(mixture("qwen3_moe", balance=kind)) for kind in ("none", "auxiliary"))
    tokens, targets = TOKENS[:, :-1], TOKENS[:, 1:].clone()
    targets[1, 5:] = IGNORED

    def gradients(made: Decoder, rows: slice) -> list[torch.Tensor]:
        loss = made(tokens[rows], targets[rows], reduction="sum")
        return [loss.detach(), *torch.autograd.grad(loss, list(made.parameters()))]

    whole, without = gradients(balanced, slice(None)), gradients(plain, slice(None))
    assert torch.equal(whole[0], without[0])
    # Switch Transformer's loss per sequence, over choices, times the counted tokens of the sequence
    charge = torch.zeros(())
    loads: list[Load] = []
    gates = [module.gate for module in plain.modules() if isinstance(module, Mixture)]
    hooks = [gate.register_forward_hook(lambda *each: loads.append(each[2][2])) for gate in gates]
    plain(tokens)
    for hook in hooks:
        hook.remove()
    assert len(loads) == len(plain.model.layers)
    for load in loads:
        charge = charge + 0.01 * (load.unevenness_B * torch.tensor([32, 5, 32])).sum()
    added = torch.autograd.grad(charge, list(plain.parameters()), allow_unused=True)
    for actual, plain_gradient, more in zip(whole[1:], without[1:], added, strict=True):
        assert near(actual, plain_gradient + (0 if more is None else more), 32 + 5 + 32, atol=1e-5)  # counted tokens
    parts = zip(*(gradients(balanced, slice(at, at + 1)) for at in range(3)), strict=True)
    for actual, gradient_parts in zip(whole, parts, strict=True):
        assert near(actual, sum(gradient_parts), 32 + 5 + 32, atol=1e-4), "however the batch is cut into micro-batches"
    assert torch.equal(plain.eval()(tokens, targets), balanced.eval()(tokens, targets))


@pytest.mark.parametrize("family", MIXTURES)
def test_every_row_is_published_once_and_read_back_in_any_part(tmp_path: Path, family: str) -> None:
    model = mixture(family)
    shapes = parameter_shapes(model, 300)
    for name, parts in rows_of(published(model, 300)).items():
        ends = [rows.first + rows.shape[0] for _, rows in parts]
        assert [rows.first for _, rows in parts] == [0, *ends[:-1]]
        assert ends[-1] == shapes[name][0]
    built = decoder(model)
    export(tmp_path, built, max_shard_bytes=20_000)
    weights = read_hugging_face(tmp_path)
    require_fit(weights, model, 300)
    for name, tensor in built.state_dict().items():
        assert torch.equal(weights.tensor(name), tensor)
        columns = (slice(3, 11),) * (tensor.dim() - 1)
        for rows in (slice(0, 1), slice(20, 53), slice(4, 4)):
            assert torch.equal(weights.part(name, (rows, *columns)), tensor[(rows, *columns)])


def test_other_experts_than_the_weights_have_are_refused_by_field(tmp_path: Path) -> None:
    export(tmp_path, decoder(mixture("qwen3_moe")))
    with pytest.raises(SpecError) as error:
        require_fit(read_hugging_face(tmp_path), mixture("qwen3_moe", top_k=2, normalise=False), 300)
    assert {problem.field: problem.remedy for problem in error.value.problems} == {
        "model.routing.top_k": "write top_k: 3",
        "model.routing.normalise": "write normalise: True",
    }
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"decoder_sparse_step": 1', '"decoder_sparse_step": 2'))
    with pytest.raises(DataError, match="decoder_sparse_step is 2"):
        read_hugging_face(tmp_path)


@pytest.mark.parametrize("family", MIXTURES)
def test_all_experts_are_counted_as_weights_and_a_tokens_as_work(family: str) -> None:
    model = mixture(family)
    shapes = parameter_shapes(model, 300)
    assert parameter_count(model, 300) == sum(
        prod(shape) for name, shape in shapes.items() if not name.endswith(CORRECTION)
    )
    planned = Architecture.of(model, 300)
    assert planned.parameters == parameter_count(model, 300)
    idle = 2 * 2 * 3 * 32 * 24  # two experts in each of two layers, with three matrices each
    biases = 2 * 2 * (2 * 24 + 32) if family == "gpt_oss" else 0
    assert planned.parameters - planned.active_parameters == idle + biases
    every = model.model_copy(update={"routing": model.routing.model_copy(update={"top_k": 5})})
    assert flops_per_token(every, 300) - flops_per_token(model, 300) == 6 * idle


def test_experts_begin_as_matrices_do_and_biases_of_routers_at_zero() -> None:
    model = mixture("dots1")
    shapes = parameter_shapes(model, 300)
    down = "model.layers.0.mlp.experts.down_proj"
    values = initial_slice(down, shapes[down], model, 0, start=0, stop=prod(shapes[down]))
    assert values.std() == pytest.approx(0.3 / 2, rel=0.1), "two layers write to the residual stream twice each"
    bias = f"model.layers.0.mlp.gate.{CORRECTION}"
    assert not initial_slice(bias, shapes[bias], model, 0, start=0, stop=5).any()
