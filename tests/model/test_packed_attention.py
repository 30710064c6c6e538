"""Packed attention: exact numbers, bits that depend only on the document, memory that grows with T."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.model.attention import flash, packed, tiles
from holdfast.model.attention.kernel import AttentionPattern, BackwardInputs
from holdfast.model.attention.packed import attention_backward, attention_forward, packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.model.layers import Attention
from holdfast.spec.errors import SpecError
from tests.model.tiny_model import decoder, shape

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = (1, 300, 17, 70, 256, 8)  # documents of one row: shorter and longer than a tile


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def of_lengths(*lengths: int) -> Segments:
    bounds = tuple(sum(lengths[:index]) for index in range(len(lengths) + 1))
    return Segments(bounds, bounds)


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor, scale: float | None = None) -> Tensor:
    """The reference: all scores, a softmax, and a sink as one more key without a value."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = (q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)
    return weights[..., : k.shape[2]] @ v


def visible(lengths: tuple[int, ...], window: int | None) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(document))[:, None] - torch.arange(len(document))
    return (document[:, None] == document) & (back >= 0) & (back < (window or len(document)))


def with_gradients(attention: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """The output of an attention, and the gradient of each input."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in leaves if tensor is not None and tensor.grad is not None)]


CASES: dict[str, dict[str, Any]] = {
    "documents": {},
    "one position": {"window": 1},
    "short window": {"window": 5},
    "window of a tile": {"window": 256},
    "long window": {"window": 5000},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 40},
    "heads not grouped": {"groups": 4},
    "one group": {"groups": 1, "sinks": True, "window": 40},
    "MLA": {"groups": 4, "value_width": 16},
    "wide values": {"value_width": 40, "window": 40, "sinks": True},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_dense_reference(name: str, device: str, dtype: torch.dtype) -> None:
    case: dict[str, Any] = {
        "window": None,
        "sinks": False,
        "groups": 2,
        "value_width": 24,
        "scale": None,
        **CASES[name],
    }
    length, window, scale = sum(LENGTHS), case["window"], case["scale"]
    q = random(1, 4, length, 24, dtype=dtype, device=device)
    k = random(1, case["groups"], length, 24, dtype=dtype, device=device, seed=1)
    v = random(1, case["groups"], length, case["value_width"], dtype=dtype, device=device, seed=2)
    sinks = torch.linspace(-1, 2, 4, dtype=dtype, device=device) if case["sinks"] else None
    gradient = random(1, 4, length, case["value_width"], dtype=dtype, device=device, seed=3)
    segments = of_lengths(*LENGTHS)
    results = with_gradients(
        lambda q, k, v, sinks: packed_attention(q, k, v, segments, window, sinks, scale), gradient, q, k, v, sinks
    )
    mask = visible(LENGTHS, window).to(device)
    exact = [None if tensor is None else tensor.double() for tensor in (q, k, v, sinks)]
    expected = with_gradients(lambda q, k, v, sinks: dense(q, k, v, sinks, mask, scale), gradient.double(), *exact)
    names = ["output", "q", "k", "v", *(["sinks"] if sinks is not None else [])]
    for tensor, actual, reference in zip(names, results, expected, strict=True):
        if window == 1 and tensor in ("q", "k") and sinks is None:
            assert actual.abs().max() < 0.05, "the only weight is 1, for any score"
            continue
        error = ((actual.double() - reference).norm() / reference.norm()).item()
        assert error < (2e-6 if dtype == torch.float32 else 8e-3), f"{tensor} differs by {error:.1e}"


@pytest.mark.parametrize("name", ["documents", "sinks and window"])
def test_a_device_without_a_fused_kernel_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    window = 40 if "window" in name else None
    q, k, v, gradient = (random(1, heads, sum(LENGTHS), 24, seed=heads) for heads in (4, 2, 2, 4))
    sinks = torch.linspace(-1, 2, 4) if "sinks" in name else None

    def results() -> list[Tensor]:
        return with_gradients(
            lambda q, k, v, sinks: packed_attention(q, k, v, of_lengths(*LENGTHS), window, sinks),
            gradient, q, k, v, sinks,
        )  # fmt: skip

    fused = results()
    monkeypatch.setattr(tiles, "_is_fused", lambda _: False)
    with Recorder() as recorder:
        plain = results()
    assert not recorder.squares(600), "blocks of queries bound the scores"
    for first, second in zip(fused, plain, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_those_of_finite_differences(window: int | None) -> None:
    segments = of_lengths(1, 4, 6)
    shapes = ((1, 2, 11, 4), (1, 1, 11, 4), (1, 1, 11, 2), (2,))
    inputs = [random(*shape, dtype=torch.float64, seed=at).requires_grad_() for at, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda q, k, v, sinks: packed_attention(q, k, v, segments, window, sinks), inputs)


def test_second_derivatives_are_refused() -> None:
    q = random(1, 2, 8, 4).requires_grad_()
    (first,) = torch.autograd.grad(packed_attention(q, q, q, of_lengths(8)).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


DOCUMENT = 300


def around(before: int, after: int, dtype: torch.dtype, window: int | None, device: str) -> list[Tensor]:
    """Output and gradients of one fixed document, between others with these numbers of tokens."""
    length = before + DOCUMENT + after
    own = [random(1, heads, DOCUMENT, 16, dtype=dtype, device=device, seed=9) for heads in (4, 2, 2, 4)]
    tensors = [random(1, heads, length, 16, dtype=dtype, device=device, seed=before) for heads in (4, 2, 2, 4)]
    for whole, part in zip(tensors, own, strict=True):
        whole[:, :, before : before + DOCUMENT] = part
    segments = of_lengths(*(length for length in (before, DOCUMENT, after) if length))
    q, k, v, gradient = tensors
    results = with_gradients(lambda q, k, v: packed_attention(q, k, v, segments, window), gradient, q, k, v)
    return [tensor[:, :, before : before + DOCUMENT] for tensor in results]


def equal(first: list[Tensor], second: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(first, second, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_bits_of_a_document_do_not_depend_on_its_neighbors(window: int | None, dtype: torch.dtype, device: str) -> None:
    alone = around(0, 0, dtype, window, device)
    for before, after in ((0, 400), (3, 0), (257, 1000)):
        assert all(equal(around(before, after, dtype, window, device), alone)), (before, after)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 100])
def test_bits_do_not_depend_on_the_batch_or_the_split_of_heads(window: int | None, device: str) -> None:
    q, k, v, gradient = (random(3, heads, 320, 16, device=device, seed=heads) for heads in (8, 4, 4, 8))

    def attend(rows: slice, heads: int) -> list[Tensor]:
        groups = heads // 2
        inputs = q[rows, :heads], k[rows, :groups], v[rows, :groups]
        segments = Segments.of_rows(len(inputs[0]), 320)
        return with_gradients(
            lambda q, k, v: packed_attention(q, k, v, segments, window), gradient[rows, :heads], *inputs
        )

    whole = attend(slice(None), 8)
    assert all(equal(attend(slice(1, 2), 8), [tensor[1:2] for tensor in whole])), "one row alone"
    half = [tensor[:, : tensor.shape[1] // 2] for tensor in whole]
    assert all(equal(attend(slice(None), 4), half)), "half of the heads"


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(around(10, 30, torch.float32, 100, "cpu"))
    finally:
        torch.set_num_threads(threads)
    assert all(equal(results[0], results[1]) + equal(results[0], results[2]))


@pytest.mark.parametrize("window", [None, 60])
def test_queries_may_be_the_last_positions_of_more_keys(window: int | None) -> None:
    """Context parallelism: the parts of a rank, with keys of a document that none of its queries sees."""
    segments = Segments((0, 100, 100, 400), (0, 350, 500, 1000))
    positions = torch.cat((torch.arange(250, 350), torch.arange(700, 1000)))
    q, k, v = (random(1, heads, 1000, 16, seed=heads) for heads in (4, 2, 2))
    gradient = random(1, 4, 400, 16)
    results = with_gradients(
        lambda q, k, v: packed_attention(q, k, v, segments, window), gradient, q[:, :, positions], k, v
    )
    mask = visible((350, 150, 500), window)[positions]
    exact = [tensor.double() for tensor in (q[:, :, positions], k, v)]
    expected = with_gradients(lambda q, k, v: dense(q, k, v, None, mask), gradient.double(), *exact)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-5)
    assert not results[2][:, :, 350:500].any(), "keys that nothing sees have no gradient"


def test_segments_are_the_documents_of_each_row_cut_into_chunks() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    assert Segments.of_documents(documents).queries == (0, 3, 5, 6, 10)
    assert Segments.of_documents(documents, chunk=2).keys == (0, 2, 3, 5, 6, 8, 10)
    assert Segments.of_rows(2, 5).queries == Segments.of_rows(2, 5).keys == (0, 5, 10)
    assert Segments.of_rows(2, 5) != Segments((0, 5, 10), (0, 5, 10)), "only whole rows have a mask in compiled layers"
    assert Segments.of_rows(2, 5, chunk=3).queries == (0, 3, 5, 8, 10)


class Recorder(TorchDispatchMode):
    """The shape and bytes of every tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.shapes.add(tuple(leaf.shape))
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result

    def squares(self, length: int) -> set[tuple[int, ...]]:
        """The shapes with two dimensions of at least this length."""
        return {shape for shape in self.shapes if sum(size >= length for size in shape) > 1}


def stepped(length: int, window: int | None, attend: Callable[..., Tensor] | None = None) -> Recorder:
    """A step of a decoder on documents of a tenth of the sequence, whose tensors are recorded."""
    tokens = torch.arange(length)[None] % 32
    model = shape(context=length, hidden=32, heads=4, kv_heads=2, ffn=32, family="mistral", sliding_window=window)
    built = decoder(model, vocabulary=32)
    for module in built.modules():
        if isinstance(module, Attention) and attend is not None:
            module.attend = attend  # type: ignore[method-assign]
    segments = of_lengths(*[length // 2, *[length // 8] * 4])
    with Recorder() as recorder:
        built(tokens, tokens.roll(-1, 1), segments, reduction="sum").backward()
    return recorder


@pytest.mark.parametrize("window", [None, 100])
def test_a_training_step_of_the_decoder_grows_with_the_sequence_and_not_with_its_square(window: int | None) -> None:
    records = {length: stepped(length, window) for length in (1024, 2048)}
    assert not [square for length, record in records.items() for square in record.squares(length // 2)]
    assert records[2048].largest <= 2 * records[1024].largest
    control = stepped(1024, window, lambda q, k, v, _: dense(q, k, v, None, visible((1024,), window)))
    assert control.squares(1024), "the recorder does not see the scores of dense attention"


def recorded(attention: Callable[..., Tensor], length: int) -> Recorder:
    q, k, v, gradient = (random(1, heads, length, 64, seed=heads) for heads in (4, 2, 2, 4))
    with Recorder() as recorder:
        with_gradients(attention, gradient, q, k, v)
    return recorder


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("documents", [1, 4])
def test_no_tensor_has_two_dimensions_of_the_sequence(documents: int, window: int | None) -> None:
    def attention(length: int) -> Callable[..., Tensor]:
        return lambda q, k, v: packed_attention(q, k, v, of_lengths(*[length // documents] * documents), window)

    records = {length: recorded(attention(length), length) for length in (1024, 2048)}
    assert not [square for length, record in records.items() for square in record.squares(length // 2)]
    assert records[2048].largest == 2 * records[1024].largest == 4 * 2048 * 64 * 4, "the largest tensor is q"
    control = recorded(lambda q, k, v: dense(q, k, v, None, visible((1024,), None)), 1024)
    assert control.squares(1024), "the recorder does not see the scores of dense attention"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"attention\.dropout: is not computed by packed attention \(value: 0\.1\)"),
        ({"softcap": 50.0}, r"attention\.softcap: is not computed by packed attention \(value: 50\.0\)"),
        ({"window": 0}, r"attention\.window: hides every position \(value: 0\)"),
    ],
)
def test_an_attention_option_without_a_kernel_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    q = random(1, 2, 8, 4)
    with pytest.raises(SpecError, match=message):
        packed_attention(q, q, q, of_lengths(8), **options)


def test_a_head_too_wide_for_the_flash_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "uses_flash", lambda _: True)  # as for bf16 on CUDA
    q = random(1, 2, 8, 264, dtype=torch.bfloat16)
    with pytest.raises(
        SpecError, match=r"attention\.head_width.*largest head \(256\) in torch.bfloat16 \(value: 264\)"
    ):
        packed_attention(q, q, q, of_lengths(8))


ROW, ROWS = random(1, 2, 8, 4), random(2, 2, 8, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: packed_attention(ROW, ROW, ROW, of_lengths(4)), "segments end at"),
        (lambda: packed_attention(ROWS, ROWS, ROWS, of_lengths(4, 8, 4)), "crosses rows"),
        (lambda: packed_attention(random(1, 3, 8, 4), ROW, ROW, of_lengths(8)), "fit together"),
        (lambda: packed_attention(ROW, ROW, ROW.double(), of_lengths(8)), "one dtype"),
        (lambda: packed_attention(ROW, ROW, ROW, of_lengths(8), None, torch.zeros(3)), "fit together"),
        (lambda: Segments((0, 8), (0, 4)), "at least as many keys"),
        (lambda: Segments((0, 4, 8), (0, 8)), "begin both at 0"),
        (lambda: Segments((2, 8), (2, 8)), "begin both at 0"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("keys", [1, 13, 16, 511])
def test_masks_have_the_layout_of_the_memory_efficient_kernel(keys: int) -> None:
    """On CUDA, the kernel refuses a bias whose shape is not [B, H, Q, K], or whose strides are not multiples of 8."""
    mask = tiles._tile_mask(1, keys, keys - 1, 7, random(1, 6, 1, 8))
    assert mask.shape == (1, 6, 1, keys)
    assert mask.stride(3) == 1
    assert not any(stride % 8 for stride in mask.stride()[:3])


@pytest.fixture
def promised_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "promises_bits", lambda: True)


def calls_of(segments: Segments, row: int = 99, heads: int = 16) -> list[tuple[tuple[int, ...], int, int, int]]:
    """Bounds, first and last query, and slots of each call on a device with 132 processors."""
    calls = flash._backward_calls(segments, row, heads, 132)
    return [(part.queries, own.start, own.stop, slots) for part, own, _, slots in calls]


@pytest.mark.usefixtures("promised_bits")
def test_long_documents_have_their_own_calls_of_the_flash_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "LONG_DOCUMENT", 10)
    assert calls_of(of_lengths(3, 4, 12, 2, 10, 11)) == [
        ((0, 3, 7), 0, 7, 9), ((0, 12), 7, 19, 1), ((0, 2), 19, 21, 9), ((0, 10), 21, 31, 1), ((0, 11), 31, 42, 1),
    ]  # fmt: skip
    assert calls_of(of_lengths(3, 4, 9)) == [((0, 3, 7, 16), 0, 16, 9)]


@pytest.mark.usefixtures("promised_bits")
@pytest.mark.parametrize("heads", [1, 7, 16, 40, 64, 131])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_a_document_that_fills_its_row_has_two_sums_whatever_else_is_in_the_batch(
    monkeypatch: pytest.MonkeyPatch, heads: int, rows: int
) -> None:
    monkeypatch.setattr(flash, "WHOLE_ROW", 8)
    calls = calls_of(of_lengths(*[8] * rows, 3, 5), 8, heads)
    *whole, (bounds, *_, slots) = calls
    assert (bounds, slots) == ((0, 3, 8), -(-132 // heads)), "the short ones have one sum"
    assert sum(len(bounds) - 1 for bounds, *_ in whole) == rows
    for bounds, *_, slots in whole:
        assert -(-132 // (max(len(bounds) - 1, slots) * heads)) == 2
    assert calls_of(of_lengths(*[8] * rows), 8, 132) == [((tuple(range(0, 8 * rows + 1, 8))), 0, 8 * rows, 1)]


def test_one_call_computes_the_backward_where_no_bits_are_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "promises_bits", lambda: False)
    monkeypatch.setattr(flash, "LONG_DOCUMENT", 10)
    assert calls_of(of_lengths(3, 12, 11)) == [((0, 3, 15, 26), 0, 26, 1)]


def test_bounds_on_a_device_have_empty_segments_up_to_the_slots() -> None:
    queries, keys = Segments((0, 2, 5), (0, 4, 9)).on(torch.device("cpu"), 4)
    assert queries.tolist() == [0, 2, 5, 5, 5]
    assert keys.tolist() == [0, 4, 9, 9, 9]
    assert queries.dtype == torch.int32


def test_the_gradient_of_a_sink_is_part_of_the_backward() -> None:
    """torch's variable-length attention drops the gradient of lse. Training with sinks would be silently wrong."""
    q, pattern = random(1, 1, 1, 2), AttentionPattern(of_lengths(1), None, 1.0)
    out, lse = attention_forward(q, q, q, torch.zeros(1), pattern)
    weight = torch.sigmoid((q * q).sum())  # of the only key next to a sink of 0
    torch.testing.assert_close(out, weight * q)
    *_, sink = attention_backward(BackwardInputs(torch.ones_like(q), q, q, q, out, lse, pattern), torch.zeros(1))
    assert sink is not None
    torch.testing.assert_close(sink, (-(1 - weight) * weight * q.sum())[None])
