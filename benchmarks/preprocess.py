"""Bar D2: tokenising a corpus, against Hugging Face `datasets.map` with the same tokenizer on the same cores.

    python -m benchmarks.preprocess [--megabytes 48] [--rounds 3] [--workers 2]

The corpus is the Python standard library as jsonl, repeated with small changes so that no document is a duplicate. Both
sides read it, tokenise with one tokenizer.json and leave uint16 tokens on disk; ours also cleans, deduplicates, splits
and checksums. Memory is the peak of the whole process tree at 1x and 4x the corpus. Shards have 2 Mi tokens; they are
the only buffer whose size is a setting.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil

from holdfast.corpus.tokenizer import train
from holdfast.spec.data import Tokenizer
from holdfast.store import open_store

PEER = """
import os, sys
corpus, tokenizer_file, out, workers = sys.argv[1:]
os.environ["HF_HOME"] = out; os.environ["HF_HUB_OFFLINE"] = "1"; os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets
import numpy as np
from tokenizers import Tokenizer
datasets.disable_progress_bars()
tokenizer = Tokenizer.from_file(tokenizer_file)
end = tokenizer.token_to_id("<|endoftext|>")
def encode(batch):
    encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [np.array([*one.ids, end], dtype=np.uint16) for one in encoded]}
features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"))})
raw = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=out)
raw.map(encode, batched=True, num_proc=int(workers), remove_columns=raw.column_names, features=features)
"""


def write_corpus(path: Path, size: int) -> int:
    """Write about `size` bytes of text as jsonl, and return how many."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(file.parts))
    texts = [text for file in files if (text := file.read_text("utf-8", errors="ignore"))]
    written = number = 0
    with path.open("w", encoding="utf-8") as out:
        while written < size:
            text = f"# copy {number // len(texts)}\n{texts[number % len(texts)]}"
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            number += 1
    return written


def measured(command: list[str]) -> tuple[float, int]:
    """Seconds that a command takes, and the peak memory of its whole process tree, in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        root = psutil.Process(process.pid)
        while not ended.wait(0.05):
            total = 0
            try:
                for member in [root, *root.children(recursive=True)]:
                    total += member.memory_full_info().uss
            except psutil.Error:
                continue
            peak = max(peak, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{errors[-2000:]}")
    return seconds, peak


class Bench:
    """One corpus, one tokenizer, a folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.tokenizer = folder / "tokenizer.json"

    def ours(self, corpus: Path, keep: bool = False) -> tuple[float, int]:
        """Run the step as a user would."""
        spec = self.folder / "spec.yaml"
        spec.write_text(
            f"name: bench\ndata:\n  sources: [{{uri: {corpus}}}]\n  workers: {self.workers}\n  shard_tokens: {2**21}\n"
            f"  tokenizer: {{kind: file, path: {self.tokenizer}}}\n"
        )
        store = self.folder / "store"
        if not keep:
            shutil.rmtree(store, ignore_errors=True)
        return measured(
            [
                sys.executable,
                "-m",
                "holdfast.components.preprocess",
                "--spec",
                str(spec),
                "--store",
                open_store(f"file://{store}").url,
            ]
        )

    def peer(self, corpus: Path) -> tuple[float, int]:
        """Run `datasets.map`."""
        out = self.folder / "peer"
        shutil.rmtree(out, ignore_errors=True)
        return measured([sys.executable, "-c", PEER, str(corpus), str(self.tokenizer), str(out), str(self.workers)])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), options.workers)
        small, large = Path(temporary) / "1x.jsonl", Path(temporary) / "4x.jsonl"
        size = write_corpus(small, options.megabytes * 10**6)
        write_corpus(large, 4 * options.megabytes * 10**6)
        with small.open(encoding="utf-8") as lines:
            text = (json.loads(line)["text"] for line, _ in zip(lines, range(800), strict=False))
            bench.tokenizer.write_text(train(Tokenizer(vocabulary=4096), text), encoding="utf-8")
        has_peer = importlib.util.find_spec("datasets") is not None
        ours: list[float] = []
        peers: list[float] = []
        memory = second_call = 0.0
        for _ in range(options.rounds):
            seconds, memory = bench.ours(small)
            ours.append(seconds)
            second_call = bench.ours(small, keep=True)[0]
            if has_peer:
                peers.append(bench.peer(small)[0])
        speed = size / statistics.median(ours) / 1e6
        print(f"ours: {speed:.1f} MB/s ({size / 1e6:.0f} MB, {options.workers} processes, start-up included)")
        if has_peer:
            speed = size / statistics.median(peers) / 1e6
            ratio = statistics.median(peers) / statistics.median(ours)
            print(f"datasets.map: {speed:.1f} MB/s; ratio {ratio:.2f} (bar 1.5)")
        else:
            print("datasets.map: left out: `datasets` is not installed: pip install .[bench]")
        peak = bench.ours(large)[1]
        print(f"peak memory: {memory / 2**20:.0f} MiB at 1x, {peak / 2**20:.0f} MiB at 4x: ratio {peak / memory:.2f}")
        print(f"second call: {second_call:.2f} s, start-up of Python included")


if __name__ == "__main__":
    main()
