"""`training.precision: fp8`: products of manually quantized numbers, through torch's kernel for this CPU, which takes
the same arguments as an accelerator's kernel. Results of an accelerator are not tested here.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ID
from holdfast.engines.assignment import Assignment
from holdfast.engines.torch.fp8 import Fp8Linear, convert_to_fp8, quantised
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.model.layers import Linear
from holdfast.spec.errors import MissingError
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Steps, join_exactly, started, steps_of
from tests.train.test_reference import END, RATE, STEPS, check, global_batch
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = ("training.precision=fp8", "cluster.accelerator=nvidia")


def by_hand(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """A tensor's values in an fp8 format with one scale, in fp64. The scale is the smallest power of two that leaves
    the largest value below 2^8 (e4m3) or 2^15 (e5m2).
    """
    scale = 2.0 ** (math.frexp(float(tensor.abs().max()))[1] - {E4M3: 8, E5M2: 15}[kind])
    return (tensor.double() / scale).to(kind).double() * scale


class ByHand(torch.autograd.Function):
    """The intended product and its gradients, computed in fp64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (by_hand(x, E4M3) @ by_hand(weight, E4M3).t()).float().bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        upstream = by_hand(gradient, E5M2)
        of_x, of_weight = upstream @ by_hand(weight, E4M3), upstream.t() @ by_hand(x, E4M3)
        return of_x.float().bfloat16(), of_weight.float().bfloat16()


def hand_linear(self: Linear, x: Tensor) -> Tensor:
    """The result of `Fp8Linear`."""
    rows: Tensor = ByHand.apply(x.bfloat16().flatten(0, -2), self.weight.bfloat16())
    result = rows.unflatten(0, x.shape[:-1])
    return result if self.bias is None else result + self.bias.bfloat16()


def fp8_assignment(*overrides: str) -> Assignment:
    """The assignment of a spec for accelerators, given to ranks on this CPU."""
    return tiny_assignment(*FP8, *overrides).model_copy(update={"accelerator": "cpu"})


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1.0, 448.0, 3e-5, 1e25, 1e-25])
def test_a_tensor_comes_back_from_fp8_as_it_is_by_hand(kind: torch.dtype, size: float) -> None:
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * size
    narrow, scale = quantised(tensor, kind)
    assert math.frexp(float(scale))[0] == 0.5, "no power of two"
    assert torch.equal(narrow.double() * scale.double(), by_hand(tensor, kind))
    rounding, least = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}[kind]
    off = (narrow.double() * scale.double() - tensor).abs()
    assert bool((off <= torch.maximum(tensor.abs().double() * rounding, scale.double() * least)).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_fp8_products_propagate_non_finite_values_and_keep_zeros(bad: float) -> None:
    layer, x, gradient = Fp8Linear(Linear(16, 16, bias=False)), torch.zeros(16, 16), torch.ones(16, 16)
    torch.nn.init.ones_(layer.weight)
    assert not layer(x).any()
    x[3, 4] = bad
    assert layer(x).isnan().all()
    gradient[3, 4] = bad
    layer(x := torch.ones(16, 16, requires_grad=True)).backward(gradient)
    assert x.grad is not None and x.grad.isnan().all()
    assert layer.weight.grad is not None and layer.weight.grad.isnan().all()


@pytest.mark.parametrize("shape", [(16, 32, 48), (64, 128, 16), (96, 512, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_its_gradients_are_those_of_the_numbers_that_were_quantised(
    shape: tuple[int, int, int], bias: bool
) -> None:
    tokens, inner, outer = shape
    noise = torch.Generator().manual_seed(2)
    base = Linear(inner, outer, bias=bias)
    torch.nn.init.normal_(base.weight, std=0.02, generator=noise)
    if base.bias is not None:
        torch.nn.init.normal_(base.bias, generator=noise)
    x, gradient = (torch.randn(2, tokens // 2, width, generator=noise) for width in (inner, outer))
    results = []
    for compute in (Fp8Linear(base), lambda of: hand_linear(base, of)):
        base.zero_grad()
        inputs = x.clone().requires_grad_()
        result = compute(inputs)
        result.backward(gradient.bfloat16() * 1e-4)
        results.append([result, inputs.grad, base.weight.grad, *([] if base.bias is None else [base.bias.grad])])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_the_linear_layers_of_a_decoder_are_replaced_and_nothing_else() -> None:
    with torch.device("meta"):
        decoder = Decoder(tiny_spec("model.tie_embeddings=false").model, VOCABULARY)
        names = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        convert_to_fp8(decoder, "fp8")
    replaced = {name for name, module in decoder.named_modules() if isinstance(module, Fp8Linear)}
    linear = {name for name, module in decoder.named_modules() if isinstance(module, Linear)}
    assert linear - replaced == {"lm_head"}
    assert len(replaced) == 7 * len(decoder.model.layers)
    assert {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()} == names


def test_a_machine_without_fp8_is_refused_with_what_to_do() -> None:
    from holdfast.engines.interface import build_engine

    with pytest.raises(MissingError, match=r"8\.9.*this device is cpu.*training\.precision=bf16"):
        build_engine(fp8_assignment(), VOCABULARY, END)


def _engine_steps(rank: int, size: int, folder: Path, runs: list[tuple[str, ...]]) -> list[Steps]:
    from holdfast.engines.torch import fp8

    fp8.require_fp8 = lambda device: None  # a CPU's kernel is slow and exact
    join_exactly(folder, rank, size, always=False)
    specs = [fp8_assignment(*overrides, f"parallel.processes={size}") for overrides in runs]
    batches = [global_batch(step, False) for step in range(STEPS)]
    return [steps_of(started(spec, END), spec, rank, size, batches, RATE) for spec in specs]


def plain_loop(micro_batch: int = 2) -> list[Any]:
    """The losses, norms and weights of a loop in one process without an engine. It uses the layer whose products are
    tested against manual ones above: a kernel sums in fp32 in its CPU's order, and a manual sum may round differently.
    """
    spec = tiny_spec(*FP8)
    settings, decoder = spec.training.optimizer, Decoder(spec.model, VOCABULARY)
    initialise(decoder, spec.training.seed)
    convert_to_fp8(decoder, "fp8")
    norms = [parameter for name, parameter in decoder.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in decoder.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True,
    )  # fmt: skip
    curve = []
    for step in range(STEPS):
        rows = global_batch(step, False)
        count, total = rows[:, 1:].numel(), torch.zeros(())
        for part in rows.split(micro_batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = decoder(part[:, :-1] & ID, part[:, 1:], None, reduction="sum")
            (loss * (1 / torch.tensor(float(count)))).backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), spec.training.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(total / count), float(norm)))
    return [curve, {name: parameter.detach() for name, parameter in decoder.named_parameters()}]


def test_one_process_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    ((curve, boxes),) = in_ranks(1, _engine_steps, tmp_path / "r", [()], seconds=200)[0]
    losses, weights = plain_loop()
    assert curve == losses
    for name, _, array in boxes:
        assert torch.equal(torch.from_numpy(array), weights[name]), name


@pytest.mark.slow
def test_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    """The same bits with any recomputation, and under elastic determinism. The scale of activations depends on a rank's
    part of the batch. Therefore cut sequences and other orders of sums agree only approximately.
    """
    recomputed = [
        (f"parallel.strategy={strategy}", f"training.activation_checkpointing={kind}")
        for strategy in ("ddp", "fsdp")
        for kind in ("none", "selective", "full")
    ]
    elastic = [("training.determinism=elastic", f"parallel.strategy={strategy}") for strategy in ("ddp", "fsdp")]
    others = [
        ("parallel.pipeline=2", "model.tie_embeddings=false"), ("parallel.context=2", "parallel.strategy=fsdp"),
    ]  # fmt: skip
    ranks = in_ranks(2, _engine_steps, tmp_path / "2", [*recomputed, *elastic, *others], seconds=400)
    for rank in ranks:
        for first in (0, 3):
            for run in (first + 1, first + 2):
                same(rank[run], rank[first])
    (single,) = in_ranks(1, _engine_steps, tmp_path / "1", [*elastic, others[0][1:]], seconds=200)
    for run in range(2):
        assert ranks[0][len(recomputed) + run][0] == single[run][0]
    check(ranks, 0, plain_loop(), 1e-3)
    for run, (loss, norm) in ((3, ranks[0][0][0][0]), (-2, single[2][0][0]), (-1, ranks[0][0][0][0])):
        assert ranks[0][run][0][0] == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=5e-3))


def same(run: Any, other: Any) -> None:
    """Two runs of one rank have the same figures and bits."""
    assert run[0] == other[0]
    for (name, _, data), (_, _, expected) in zip(run[1], other[1], strict=True):
        assert data.tobytes() == expected.tobytes(), name
