"""Attention of whole rows inside compiled layers: the positions that are seen, and on a CUDA device the numbers."""

import shutil
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.profiler import ProfilerActivity, profile

from holdfast.engines.recompute import recompute
from holdfast.model import decoder
from holdfast.model.attention import packed, rows
from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.rows import BLOCK, prepare_rows, row_attention, row_mask
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.rank.randomness import make_deterministic
from holdfast.spec.model import Model
from tests.model.test_packed_attention import Recorder, of_lengths, random, visible, with_gradients

ROW, VOCABULARY = 1024, 512
Kind = Literal["none", "selective", "full"]
KINDS: tuple[Kind, ...] = ("none", "selective", "full")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
with_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.fixture
def exact() -> Iterator[None]:
    make_deterministic("exact", 1)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_mask_is_the_one_that_torch_finds_with_all_scores() -> None:
    mask = row_mask(ROW, CPU)
    blocks = visible((ROW,), None).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
    found = create_block_mask(mask.mask_mod, None, None, ROW, ROW, device="cpu", BLOCK_SIZE=BLOCK)
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
        assert torch.equal(counts, getattr(found, f"{kind}_num_blocks")), kind
        for block, count in enumerate(counts[0, 0]):  # what comes after them is not read
            expected = getattr(found, f"{kind}_indices")[0, 0, block, :count]
            assert torch.equal(indices[0, 0, block, :count], expected), (kind, block)


def test_a_mask_needs_no_tensor_of_all_scores() -> None:
    row_mask.cache_clear()
    with Recorder() as record:
        row_mask(16 * ROW, CPU)
    assert record.largest <= 8 * (16 * ROW // BLOCK) ** 2  # bytes of all pairs of blocks


@pytest.mark.parametrize(
    ("capability", "amd", "expected"), [((8, 0), None, False), ((9, 0), None, True), ((9, 4), "7.0", False)]
)
def test_long_whole_rows_have_a_mask_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], amd: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", amd)
    monkeypatch.setattr(rows, "row_mask", lambda *about: about)
    segments = Segments.of_rows(2, ROW)
    prepare_rows(segments, CUDA)
    assert segments.row_mask == ((ROW, CUDA) if expected else None)


def test_only_long_whole_rows_on_cuda_have_masks() -> None:
    documents = torch.zeros(2, ROW, dtype=torch.int64)
    others = Segments.of_documents(documents), Segments.of_rows(2, ROW, chunk=ROW), of_lengths(ROW, ROW)
    for segments in (*others, Segments.of_rows(2, BLOCK), Segments.of_rows(2, ROW + 1)):
        prepare_rows(segments, CUDA)
        assert not segments.row_mask, segments
    whole = Segments.of_rows(2, ROW)
    prepare_rows(whole, CPU)  # where the compiler has no backward
    assert whole.row == ROW
    assert not whole.row_mask


@pytest.mark.slow
@with_compiler
def test_a_compiled_row_is_that_of_packed_attention() -> None:
    q, k, v = random(2, 4, ROW, 64), random(2, 2, ROW, 64, seed=1), random(2, 2, ROW, 64, seed=2)
    mask = row_mask(ROW, CPU)
    with torch.no_grad():
        found = torch.compile(lambda q, k, v: row_attention(q, k, v, mask, 0.2))(q, k, v)
    expected = packed_attention(q, k, v, Segments.of_rows(2, ROW), scale=0.2)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-6


@pytest.mark.slow
def test_layers_are_traced_with_the_mask_and_keep_less_if_they_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no compiled kernel of this backward for CPUs, and refuses it. The backend that runs the traced
    operations has one."""
    eager, _ = gradients("none")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(packed, "uses_flash", lambda _: True)
    monkeypatch.setattr(decoder, "prepare_rows", with_mask)
    saved: dict[str, int] = {}
    for kept in KINDS:
        torch._dynamo.reset()
        found, saved[kept] = gradients(kept, "aot_eager")
        for name, gradient in found.items():
            assert ((gradient - eager[name]).norm() / eager[name].norm()).item() < 2e-6, (kept, name)
    assert 0.68 < saved["selective"] / saved["none"] < 0.8  # 0.65 without the output of attention
    assert saved["full"] < 0.3 * saved["none"]


def with_mask(segments: Segments, device: torch.device) -> None:
    assert segments.row == ROW
    segments.row_mask = row_mask(ROW, device)


def gradients(kept: Kind, backend: str = "") -> tuple[dict[str, Tensor], int]:
    """The gradients of a batch on the CPU, and the bytes that the forward pass keeps for them."""
    model = Decoder.empty(Model(layers=2, hidden=128, heads=2, kv_heads=1, context=ROW), VOCABULARY)
    initialise(model, seed=1)
    for layer in model.model.layers:
        recompute(layer, kept)
        if backend:
            layer.compile(backend=backend)
    tokens = torch.randint(VOCABULARY, (2, ROW + 1), generator=torch.Generator().manual_seed(1))
    sizes: list[int] = []

    def kept_for_backward(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept_for_backward, lambda tensor: tensor):
        model.compiled = bool(backend)
        hidden = model.hidden(tokens[:, :-1])
    model.compiled = False  # the loss has tests of its own
    model.loss(hidden, tokens[:, 1:]).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, sum(sizes)


@on_cuda
@pytest.mark.usefixtures("exact")
def test_bits_of_a_row_do_not_depend_on_other_rows_or_the_run() -> None:
    shapes = ((3, 4, ROW, 64), (3, 2, ROW, 64), (3, 2, ROW, 64), (3, 4, ROW, 64))
    q, k, v, gradient = (random(*shape, dtype=torch.bfloat16, device="cuda", seed=n) for n, shape in enumerate(shapes))
    mask = row_mask(ROW, q.device)
    attention = torch.compile(lambda q, k, v: row_attention(q, k, v, mask, 0.2))
    together, again = (with_gradients(attention, gradient, q, k, v) for _ in range(2))
    assert all(map(torch.equal, together, again))
    for row in range(3):
        here = slice(row, row + 1)
        alone = with_gradients(attention, gradient[here], q[here], k[here], v[here])
        assert all(torch.equal(a[here], b) for a, b in zip(together, alone, strict=True))
    segments = Segments.of_rows(3, ROW)
    expected = with_gradients(lambda q, k, v: packed_attention(q, k, v, segments, scale=0.2), gradient, q, k, v)
    for actual, reference in zip(together, expected, strict=True):
        assert ((actual - reference).float().norm() / reference.float().norm()).item() < 1e-2


@on_cuda
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kept", KINDS)
def test_a_compiled_model_takes_them_and_has_the_losses_of_an_eager_one(
    kept: Kind,
) -> None:
    eager, compiled, again = (trained(how, kept) for how in (False, True, True))
    assert "flex" not in eager[1]
    assert "flex" in compiled[1]
    assert torch.equal(compiled[0], again[0])
    torch.testing.assert_close(compiled[0], eager[0], rtol=2e-3, atol=2e-3)


def trained(compiled: bool, kept: Kind) -> tuple[Tensor, str]:
    """The losses of a batch after a step of gradient descent, and the names of the kernels of that step."""
    shape = Model(layers=2, hidden=256, heads=4, kv_heads=2, context=ROW)
    model = Decoder.empty(shape, VOCABULARY)
    initialise(model, seed=1)
    model = model.cuda()
    model.compiled = compiled
    for layer in model.model.layers:
        recompute(layer, kept)
        if compiled:
            layer.compile()
    tokens = torch.randint(VOCABULARY, (2, ROW + 1), generator=torch.Generator().manual_seed(1)).cuda()
    segments = Segments.of_rows(2, ROW)

    def losses() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            found = model(tokens[:, :-1], tokens[:, 1:], segments, reduction="none")
        assert isinstance(found, Tensor)
        return found

    losses().mean().backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        losses().mean().backward()
        torch.cuda.synchronize()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight.sub_(weight.grad, alpha=0.1)
    return losses().detach(), " ".join(event.name for event in profiler.events())
