"""Tokens per second of generated answers: lots of our decoder against `transformers.generate`, the same weights.

`python -m benchmarks.generation [--rounds N] [--answers N] [--device cpu|cuda]` measures alternately (A B A B) for each
of SHAPES, and prints the median of each, the ratio, and that of the best rounds. Both sample answers of one length, in
fp32, with caches. On the CPU both use one thread, and time is the time of the processor, because another load would
change the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files
from holdfast.model.initialise import initialise
from holdfast.rollouts.generation import Sampling, generate_lot
from holdfast.spec.model import Model

VOCABULARY = 4096
SHAPES = ((4, 32, 64), (4, 128, 128), (2, 256, 256))  # prompts, and the tokens of each and of an answer
NEVER = -1  # an end token that no answer has, so that all have the same length
SHAPE = Model(layers=4, hidden=256, heads=8, kv_heads=4, context=512)


def peer_of(decoder: Decoder, device: str) -> Any:
    """The same model in `transformers`."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>")).to_str()
    weights = decoder.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        for file in export_files(
            SHAPE, VOCABULARY, lambda name: iter([weights[name]]), tokenizer_json=tokenizer, end_of_text="<end>"
        ):
            Path(folder, file.name).write_bytes(b"".join(file.content()))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def seconds(function: Callable[[], object], device: str) -> float:
    """The time of one call."""
    if device != "cpu":
        torch.cuda.synchronize()
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    decoder = Decoder.empty(SHAPE, VOCABULARY)
    initialise(decoder, seed=1)
    decoder = decoder.to(given.device).eval()
    peer = peer_of(decoder, given.device)
    for count, length, size in SHAPES:
        print(f"{count} prompts of {length} tokens, {given.answers} answers of {size} tokens each")
        prompts = torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
        compare(decoder, peer, prompts, Sampling(given.answers, size, 1.0, 1, NEVER), given)


def compare(decoder: Decoder, peer: Any, prompts: Tensor, sampling: Sampling, given: argparse.Namespace) -> None:
    """Print the figures of a shape."""
    with torch.no_grad():
        ours = decoder(prompts.to(given.device))
        theirs = peer(prompts.to(given.device)).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

    def own() -> None:
        generate_lot(decoder, prompts.tolist(), range(len(prompts)), sampling)

    def others() -> None:
        given_mask = torch.ones_like(prompts)
        peer.generate(
            prompts.to(given.device),
            attention_mask=given_mask.to(given.device),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            num_return_sequences=sampling.answers,
            min_new_tokens=sampling.most_tokens,
            max_new_tokens=sampling.most_tokens,
            pad_token_id=0,
        )

    times: dict[str, list[float]] = {"holdfast": [], "transformers": []}
    own(), others()
    for _ in range(given.rounds):
        times["holdfast"].append(seconds(own, given.device))
        times["transformers"].append(seconds(others, given.device))
    tokens = len(prompts) * sampling.answers * sampling.most_tokens
    rate = {name: tokens / statistics.median(each) for name, each in times.items()}
    for name, each in rate.items():
        print(f"{name:14s} {each:,.0f} tokens/s")
    pairs = sorted(b / a for a, b in zip(times["holdfast"], times["transformers"], strict=True))
    best = min(times["transformers"]) / min(times["holdfast"])
    ratio = rate["holdfast"] / rate["transformers"]
    print(
        f"ratio          {ratio:.2f}x (pairs {pairs[0]:.2f}-{pairs[-1]:.2f}), of the best rounds {best:.2f}x",
        flush=True,
    )


if __name__ == "__main__":
    main()
