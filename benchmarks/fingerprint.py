"""The cost of the state digest, compared with one copy of the same bytes and with an optimizer step.

`python -m benchmarks.fingerprint [--rounds N]` digests AdamW's state of the quickstart's model (weights and both
moments) and of one 64 Mi-element matrix. It uses one thread, and alternates with a copy of them (A B A B). It prints
the ratios of medians; then the digest of the whole state against a step of one micro-batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from holdfast.checkpoint import TensorBox, digest_of
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.spec import load_spec

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"


def seconds(work: Callable[[], object]) -> float:
    """The time that `work` takes, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternately(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each work, run one after another in every round."""
    for work in works.values():
        work()
    times = [{name: seconds(work) for name, work in works.items()} for _ in range(rounds)]
    return {name: statistics.median(round_times[name] for round_times in times) for name in works}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    spec = load_spec(SPEC)
    vocabulary = spec.data.tokenizer.vocabulary
    decoder = Decoder(spec.model, vocabulary)
    initialise(decoder, 0)
    state = [
        TensorBox.whole(prefix + name, parameter.detach().clone())
        for name, parameter in decoder.named_parameters()
        for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    ]
    for what, boxes in {"quickstart's state": state, "one matrix": [_matrix()]}.items():
        copies = [torch.empty_like(box.data) for box in boxes]
        times = alternately({"digest": partial(digest_of, boxes), "copy": partial(_copy, boxes, copies)}, rounds)
        size = sum(box.data.nbytes for box in boxes)
        print(
            f"{what}: {size / 2**20:.0f} MiB in {len(boxes)} tensors, digest {size / times['digest'] / 1e9:.1f} GB/s, "
            f"copy {size / times['copy'] / 1e9:.1f} GB/s: {times['digest'] / times['copy']:.1f} copies"
        )
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    rows = torch.randint(0, vocabulary, (spec.training.micro_batch, spec.model.context + 1))

    def step() -> None:
        decoder(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = alternately({"digest": lambda: digest_of(state), "step": step}, rounds)
    print(f"a digest of the whole state: {times['digest'] / times['step']:.4f} of a step of one micro-batch")


def _matrix() -> TensorBox:
    return TensorBox.whole("matrix", torch.randn(1 << 14, 1 << 12))


def _copy(boxes: list[TensorBox], copies: list[torch.Tensor]) -> None:
    for box, copy in zip(boxes, copies, strict=True):
        copy.copy_(box.data)


if __name__ == "__main__":
    main()
