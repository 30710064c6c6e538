"""Packed attention against dense masks, and token_logprobs against cross-entropy, forward and backward.

`python -m benchmarks.attention [--device cpu|cuda] [--rounds N]` measures alternately (A B A B) and prints the ratio of
medians. On the CPU one core computes 4,096 tokens of 20 documents in fp32. On CUDA one device computes 32,768 tokens in
bf16, also with SDPA's flash kernel and with compiled flex_attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.model.token_logprobs import token_logprobs

DOCUMENTS = 20
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement on one kind of device."""

    tokens: int
    heads: int
    groups: int
    head_width: int
    loss_tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype


SHAPES = {
    "cpu": Shape(4096, 8, 2, 64, 1024, 256, 8192, torch.float32),
    "cuda": Shape(32768, 32, 8, 128, 8192, 4096, 131072, torch.bfloat16),
}


def packed_documents(tokens: int) -> Segments:
    """Bounds of documents of equal length; the last one has the rest."""
    bounds = (*(at * (tokens // DOCUMENTS) for at in range(DOCUMENTS)), tokens)
    return Segments(bounds, bounds)


def document_numbers(segments: Segments, device: str) -> Tensor:
    """The number of the document of each token."""
    bounds = torch.tensor(segments.queries, device=device)
    return torch.repeat_interleave(torch.arange(len(bounds) - 1, device=device), bounds.diff())


def dense_mask(document: Tensor, window: int | None) -> Tensor:
    """The T x T mask of documents."""
    at = torch.arange(len(document), device=document.device)
    back = at[:, None] - at
    return (document[:, None] == document) & (back >= 0) & (back < (window or len(document)))


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA with a mask. Keys and values are repeated: with a mask, torch's CUDA kernels take no groups of heads."""
    group_size = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1), attn_mask=mask
    )


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA over one document, without a mask."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def document_loop(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """SDPA for one document after another."""
    return torch.cat([causal(*(x[:, :, a:b] for x in (q, k, v))) for a, b in pairwise(segments.queries)], 2)


def flex(segments: Segments) -> Attention:
    """flex_attention, compiled, with a block mask of documents."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document, tokens = document_numbers(segments, "cuda"), segments.queries[-1]
    mask = torch.compile(create_block_mask)(
        lambda _b, _h, i, j: (i >= j) & (document[i] == document[j]), None, None, tokens, tokens, device="cuda"
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


@contextmanager
def flash(strict: bool) -> Iterator[None]:
    """Only SDPA's flash kernel, deterministic if `strict`."""
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def under(attention: Attention, strict: bool) -> Attention:
    """Attention with SDPA's flash kernel only. Its backward has the setting of `strict`, too."""

    def attend(*inputs: Tensor) -> Tensor:
        with flash(strict):
            return attention(*inputs)

    return attend


def step(attention: Attention, inputs: list[Tensor], gradient: Tensor, strict: bool = False) -> Callable[[], None]:
    """One forward and backward pass."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = attention(*leaves)
        if strict:
            with flash(strict):
                out.backward(gradient)
        else:
            out.backward(gradient)

    return run


def measure(rows: dict[str, Callable[[], None]], rounds: int, device: str) -> None:
    """Run each row once to warm up, then all rows alternately. Print medians, and ratios to the first row."""
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, run in rows.items():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.process_time() if device == "cpu" else time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated() - before
            end = time.process_time() if device == "cpu" else time.perf_counter()
            if turn:
                seconds.setdefault(name, []).append(end - start)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        median = statistics.median(times)
        memory = f", peak {peaks[name] / 2**20:7.0f} MiB" if name in peaks else ""
        print(f"  {name:48} {median * 1e3:8.1f} ms, {median / first:6.2f}x the time of the first{memory}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SHAPES[device]

    def normal(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    heads = shape.heads, shape.groups, shape.groups, shape.heads
    q, k, v, gradient = (normal(1, number, shape.tokens, shape.head_width) for number in heads)
    segments = packed_documents(shape.tokens)
    document = document_numbers(segments, device)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'one CPU core'}, "
        f"{shape.dtype}, {shape.tokens} tokens, {shape.heads} heads in {shape.groups} groups, width {shape.head_width}"
    )
    for window in (None, 512):
        mask = dense_mask(document, window)
        print(f"{DOCUMENTS} documents, window {window}:")
        rows = {
            "packed_attention": step(partial(packed_attention, segments=segments, window=window), [q, k, v], gradient),
            "dense mask": step(partial(dense, mask=mask), [q, k, v], gradient),
        }
        if device == "cuda" and window is None:
            loop = under(partial(document_loop, segments=segments), False)
            rows["SDPA flash, one document after another"] = step(loop, [q, k, v], gradient)
            rows["flex_attention, compiled"] = step(flex(segments), [q, k, v], gradient)
        measure(rows, rounds, device)
        del mask
    print("1 document:")
    single = Segments.of_rows(1, shape.tokens)
    rows = {"packed_attention": step(partial(packed_attention, segments=single), [q, k, v], gradient)}
    if device == "cuda":
        rows["SDPA flash, deterministic"] = step(under(causal, True), [q, k, v], gradient, True)
        rows["SDPA flash, not deterministic"] = step(under(causal, False), [q, k, v], gradient)
    else:
        rows["SDPA, causal"] = step(causal, [q, k, v], gradient)
    measure(rows, rounds, device)

    hidden, head = normal(1, shape.loss_tokens, shape.hidden), normal(shape.vocabulary, shape.hidden)
    targets = torch.randint(0, shape.vocabulary, (1, shape.loss_tokens), device=device)
    share = torch.full((1, shape.loss_tokens), 1 / shape.loss_tokens, device=device)

    def cross_entropy(x: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(x, w).float().flatten(0, 1)
        return -F.cross_entropy(logits, targets.flatten(), reduction="none")[None]

    print(f"log-probabilities of {shape.loss_tokens} tokens, vocabulary {shape.vocabulary}, width {shape.hidden}:")
    rows = {
        f"token_logprobs, chunk {chunk}": step(partial(_logprobs, targets=targets, chunk=chunk), [hidden, head], share)
        for chunk in (1024, 256)
    }
    rows["cross_entropy of all logits"] = step(cross_entropy, [hidden, head], share)
    measure(rows, rounds, device)


def _logprobs(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
    return token_logprobs(hidden, head, targets, chunk=chunk)


if __name__ == "__main__":
    main()
