"""Bar D1: reading batches, alternately with mosaicml-streaming, litdata and a plain memory-map copy in one run.

    python -m benchmarks.loader [--tokens 33554432] [--context 2048] [--batch 64] [--rounds 7]

Every contender returns the same: int64 arrays [batch, context + 1] of shuffled samples in memory (the floor copies them
in file order). A peer that is not installed is skipped, and the output says so: `pip install .[bench]`.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from blake3 import blake3

from holdfast.corpus.assemble import TokenShardWriter
from holdfast.corpus.units import INDEX
from holdfast.dataset import Dataset, Manifest, manifest
from holdfast.dataset.shards import Tokens
from holdfast.store import layout, open_store

DATASET_ID = "0" * 16
TOKENIZER = b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}'
VOCABULARY = 50_000

Draw = Callable[[], np.ndarray]  # the next batch


def holdfast_dataset(folder: Path, tokens: Tokens) -> Dataset:
    """A dataset of the tokens, in shards of the default size."""
    store = open_store(f"file://{folder}")
    writer = TokenShardWriter(store, DATASET_ID, 0, "train", 16 * 2**20, "uint16")
    for start in range(0, len(tokens), 2**20):
        part = tokens[start : start + 2**20]
        index = np.array([(bytes(16), len(part), len(part))], dtype=INDEX)
        writer.add(part, index, np.ones(1, dtype=bool))
    store.put(layout.dataset(DATASET_ID, "tokenizer.json"), TOKENIZER)
    source = manifest.Source(
        name="000",
        uri="synthetic",
        lineage=manifest.Lineage(kind="files", files=1, bytes=1, digest="0" * 64),
        splits={"train": writer.finish()},
        dropped={},
    )
    entry = manifest.Tokenizer(
        file="tokenizer.json",
        digest=blake3(TOKENIZER).hexdigest(),
        vocabulary=VOCABULARY,
        end_of_text="a",
        end_of_text_id=0,
    )
    store.put(
        layout.dataset(DATASET_ID),
        Manifest(dataset_id=DATASET_ID, tokenizer=entry, sources=(source,), settings={}).dump(),
    )
    return Dataset.open(store, DATASET_ID, folder)


def ours(folder: Path, tokens: Tokens, context: int, batch: int) -> Draw:
    """Holdfast. It verifies each block on first use."""
    batches = holdfast_dataset(folder, tokens).training(context, batch, seed=0)
    steps = iter(range(10**9))
    return lambda: batches.batch(next(steps))


def floor(folder: Path, tokens: Tokens, context: int, batch: int) -> Draw:
    """The minimum of work: a sequential copy out of a memory map, widened to int64."""
    folder.mkdir()
    tokens.tofile(folder / "tokens")
    mapped = np.asarray(np.memmap(folder / "tokens", dtype=np.uint16, mode="r"))
    size = batch * (context + 1)
    starts = iter(np.arange(10**7) * size % (len(mapped) - size))
    return lambda: mapped[(start := next(starts)) : start + size].astype(np.int64).reshape(batch, context + 1)


def mosaicml(folder: Path, tokens: Tokens, context: int, batch: int) -> Draw:
    """mosaicml-streaming: MDS shards of samples, its default shuffle."""
    streaming = importlib.import_module("streaming")
    samples = (len(tokens) - 1) // context
    columns = {"tokens": f"ndarray:uint16:{context + 1}"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for number in range(samples):
            writer.write({"tokens": tokens[number * context : number * context + context + 1]})
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=batch)
    return stacked((sample["tokens"] for sample in forever(dataset)), batch)


def litdata(folder: Path, tokens: Tokens, context: int, batch: int) -> Draw:
    """litdata: token chunks, its own shuffle."""
    module = importlib.import_module("litdata")
    torch = importlib.import_module("torch")
    loader = importlib.import_module("litdata.streaming.item_loader").TokensLoader
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter
    folder.mkdir()
    out = writer(str(folder), chunk_bytes="64MB", item_loader=loader())
    for number, start in enumerate(range(0, len(tokens), 2**18)):
        out.add_item(number, torch.from_numpy(tokens[start : start + 2**18].astype(np.int32)))
    out.done()
    out.merge()
    dataset = module.StreamingDataset(str(folder), item_loader=loader(block_size=context + 1), shuffle=True)
    return stacked((sample.numpy() for sample in forever(dataset)), batch)


def forever(dataset: object) -> Iterator:
    """Epoch after epoch."""
    while True:
        yield from dataset  # type: ignore[attr-defined]


def stacked(samples: Iterator[np.ndarray], batch: int) -> Draw:
    """Batches of samples, as a collate function makes them."""
    return lambda: np.stack([next(samples) for _ in range(batch)]).astype(np.int64)


def contend(make: Callable[..., Draw], folder: Path, size: int, context: int, batch: int, pipe: Connection) -> None:
    """A contender in a separate process, where no thread of another one disturbs it. It draws batches on request."""
    try:
        draw = make(folder, corpus(size), context, batch)
        assert draw().shape == (batch, context + 1)
    except Exception as error:  # noqa: BLE001 - a peer that cannot run is reported, never hidden
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    while count := pipe.recv():
        began = time.perf_counter()
        for _ in range(count):
            draw()
        pipe.send(time.perf_counter() - began)


def corpus(size: int) -> Tokens:
    """Random tokens, the same in each run."""
    return np.random.default_rng(0).integers(0, VOCABULARY, size).astype(np.uint16)


def start_seconds(folder: Path, tokens: Tokens, context: int, batch: int) -> tuple[float, float]:
    """Seconds to open a dataset, and then to read the first batch; medians of 9, warm page cache. For each of its rows,
    the first batch maps at most one shard and checks one or two blocks. The size of the corpus does not matter."""
    holdfast_dataset(folder, tokens)
    store = open_store(f"file://{folder}")
    opening, reading = [], []
    for _ in range(9):
        began = time.perf_counter()
        batches = Dataset.open(store, DATASET_ID, folder).training(context, batch, 0)
        opened = time.perf_counter()
        batches.batch(12345)
        opening.append(opened - began)
        reading.append(time.perf_counter() - opened)
    return statistics.median(opening), statistics.median(reading)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32 * 2**20)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    context, batch = options.context, options.batch
    tokens = corpus(options.tokens)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        contenders: dict[str, Connection] = {}
        processes = []
        for make in (ours, floor, mosaicml, litdata):
            own_end, child_end = spawn.Pipe()
            arguments = (make, folder / make.__name__, options.tokens, context, batch, child_end)
            processes.append(spawn.Process(target=contend, args=arguments))
            processes[-1].start()
            if problem := own_end.recv():
                print(f"{make.__name__}: left out: {problem}")
            else:
                contenders[make.__name__] = own_end
        steps = max(20, options.tokens // (batch * context))  # about one epoch
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(options.rounds + 1):
            for name, pipe in contenders.items():
                count = steps if name in ("ours", "floor") else max(5, steps // 4)
                pipe.send(count)
                seconds = pipe.recv()
                if number:  # the first round warms caches, and Holdfast checks every block
                    speeds[name].append(count * batch * context / seconds)
        for pipe in contenders.values():
            pipe.send(0)
        for process in processes:
            process.join(10)
            process.kill()
        median = {name: statistics.median(values) for name, values in speeds.items()}
        for name, value in median.items():
            print(f"{name}: {value / 1e6:,.1f} M tokens/s (median of {options.rounds})")
        peers = [value for name, value in median.items() if name not in ("ours", "floor")]
        peer = f"{median['ours'] / max(peers):.1f}x the best peer (bar 2)" if peers else "no peer ran"
        print(f"throughput ratio: {peer}, {median['ours'] / median['floor']:.2f}x the copy (bar 0.5)")

        batches = holdfast_dataset(folder / "seek", tokens).training(context, batch, seed=0)
        for step in range(200):
            batches.batch(step)
        timings = []
        for step in np.random.default_rng(1).integers(0, 10**12, 500).tolist():
            began = time.perf_counter()
            batches.batch(step)
            timings.append(time.perf_counter() - began)
        timings.sort()
        print(
            f"seek to any step and read it: {timings[250] * 1e3:.3f} ms median, {timings[495] * 1e3:.3f} ms p99 (bar 1)"
        )
        small = start_seconds(folder / "small", tokens[: len(tokens) // 16], context, batch)
        large = start_seconds(folder / "large", np.tile(tokens, 4), context, batch)
        (open_1, read_1), (open_64, read_64) = small, large
        print(f"open: {open_1 * 1e3:.2f} ms at 1x, {open_64 * 1e3:.2f} ms at 64x the corpus")
        print(f"first batch: {read_1 * 1e3:.2f} ms at 1x, {read_64 * 1e3:.2f} ms at 64x the corpus")
        print("state: the step, 8 bytes (bar 1024)")


if __name__ == "__main__":
    main()
