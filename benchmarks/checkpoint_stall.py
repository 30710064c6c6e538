"""Bar K1: the cost of saving for training. It compares the time of steps with saves every 10 steps with the same steps
without (bar: at most 1.05). It also compares the stall of a save with one copy of the state (bar: at most 0.1).

`python -m benchmarks.checkpoint_stall [--mib N] [--rounds N] [--store URL]` trains a decoder with FSDP on two real
ranks with one thread each, started by the node's wrapper as a launcher does. It trains in windows of 10 steps,
alternately (A B A B) with a save at the beginning and without. The time of a window is that of both ranks, from barrier
to barrier. It includes the wait for the rest of its saves. The copy is measured in the same processes, into allocated
memory, on both ranks concurrently.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.launch.processes import PARENT_VARIABLE as PARENT

STEPS = 10  # per window
LAYERS, HEAD = 8, 64
CONTEXT = 128


def hidden_for(mib: int) -> int:
    """The width at which one of two ranks holds about this many MiB: 12 bytes per parameter, about 13 x width^2 per
    layer."""
    parameters = mib * 2**20 * 2 / 12
    return max(HEAD, round((parameters / (LAYERS * 12.5)) ** 0.5 / HEAD) * HEAD)


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank: windows with and without a save, alternately."""
    import torch.distributed as dist

    from holdfast.checkpoint import Attempt, Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.collectives import Gang
    from holdfast.engines.assignment import Assignment
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState
    from holdfast.launch.device import join_gang
    from holdfast.spec import parse_spec
    from holdfast.store import open_store

    hidden = hidden_for(arguments.mib)
    spec = Assignment.of(
        parse_spec(
            f"{{name: stall, data: {{sources: [{{uri: none}}]}}, model: {{layers: {LAYERS}, hidden: {hidden}, heads: "
            f"{hidden // HEAD}, kv_heads: {hidden // HEAD}, context: {CONTEXT}}}, training: {{steps: 100, "
            f"global_batch: {2 * arguments.rows}, micro_batch: {arguments.rows}}}, parallel: {{processes: 2, strategy: "
            "fsdp}}",
            [],
        ),
        arguments.run_id,
        "none",
    )
    torch.set_num_threads(1)
    join_gang(torch.device("cpu"))
    gang, store = Gang(), open_store(arguments.store)
    attempt = gang.from_rank_0(lambda: claim_attempt(store, arguments.run_id, launch=arguments.launch), Attempt)
    engine = build_engine(spec, 2048, 0)
    saver = Checkpointer(
        store,
        attempt,
        Retention(2),
        describe={"dataset_id": "none", "layout": engine.layout, "random": {}},
        gang=gang,
        options=SaveOptions(max_lag_steps=3 * STEPS),
    )
    engine.restored(saver.restore(engine.boxes(), SeededState(spec.model, 0).fill))
    size = sum(box.data.numel() * box.data.element_size() for box in engine.saved())
    results: dict[str, Any] = {"bytes": size, "with": [], "without": [], "copies": []}
    done, begun, committed = 1, dict[int, float](), dict[int, float]()

    def on_commit(step: int) -> None:
        committed[step] = time.perf_counter()

    saver.on_commit = on_commit

    def window(saves: bool) -> float:
        nonlocal done
        dist.barrier()
        start = time.perf_counter()
        for step in range(STEPS):
            if saves and step == 0:
                begun[done] = time.perf_counter()
                saver.save(done, engine.saved(), {"optimizer.step": done})
            rows = torch.randint(0, 2048, (arguments.rows, CONTEXT + 1))
            engine.step(rows, 1e-4, saver.wait_for_staging)
            done += 1
        dist.barrier()
        return time.perf_counter() - start

    def with_saves() -> float:
        seconds = sum(window(saves=True) for _ in range(arguments.windows))
        start = time.perf_counter()
        saver.wait()
        dist.barrier()
        return seconds + time.perf_counter() - start

    window(saves=False)
    with_saves()
    boxes = engine.saved()
    targets = [torch.zeros_like(box.data) for box in boxes]
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        for box, target in zip(boxes, targets, strict=True):
            target.copy_(box.data)
        results["copies"].append(time.perf_counter() - start)
    del targets
    stalled = []
    for _ in range(arguments.rounds):
        results["without"].append(sum(window(saves=False) for _ in range(arguments.windows)))
        before = saver.stall_seconds
        results["with"].append(with_saves())
        stalled.append((saver.stall_seconds - before) / arguments.windows)
    results["stalls"] = stalled
    results["commits"] = [committed[step] - begun[step] for step in committed if step in begun]
    (arguments.out / f"{gang.rank}.json").write_text(json.dumps(results))
    saver.close()
    dist.destroy_process_group()


def main() -> None:
    """Entry point, of the benchmark and of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="state of a rank, in MiB")
    parser.add_argument("--rows", type=int, default=2, help=f"sequences of {CONTEXT} tokens a rank and step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=2, help="windows of 10 steps in a row of one kind")
    parser.add_argument("--store", default="", help="URL; default: a temporary folder")
    parser.add_argument("--run-id")
    parser.add_argument("--launch", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = arguments.store or f"file://{folder / 'store'}"
        command = [
            sys.executable,
            "-m",
            "holdfast.launch.torchrun",
            "--nnodes=1",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
            "-m",
            "benchmarks.checkpoint_stall",
            f"--run-id=stall-{time.time_ns()}",
            "--launch=1",
            f"--store={store}",
            f"--out={folder}",
            f"--mib={arguments.mib}",
            f"--rows={arguments.rows}",
            f"--rounds={arguments.rounds}",
            f"--windows={arguments.windows}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", PARENT: str(os.getpid())}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            sys.exit(process.stdout + process.stderr)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    with_saves, without = ranks[0]["with"], ranks[0]["without"]
    ratios = sorted(saving / other for saving, other in zip(with_saves, without, strict=True))
    steps = STEPS * arguments.windows
    copy = statistics.median(seconds for rank in ranks for seconds in rank["copies"])
    stalls = [max(pair) for pair in zip(*(rank["stalls"] for rank in ranks), strict=True)]
    stall, size = statistics.median(stalls), ranks[0]["bytes"] / 2**20
    print(
        f"checkpoint_stall: {size:.0f} MiB a rank, step {statistics.median(without) / steps:.3f} s; "
        f"with saves every {STEPS} steps {statistics.median(ratios):.3f}x (pairs {ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"{arguments.rounds} rounds of {steps} steps of each kind); exposed stall {stall * 1e3:.1f} ms a save (worst "
        f"{max(stalls) * 1e3:.1f}), {stall / copy:.2f} of one copy of the state ({copy * 1e3:.1f} ms); commit after "
        f"{statistics.median(ranks[0]['commits']):.2f} s (worst {max(ranks[0]['commits']):.2f})"
    )


if __name__ == "__main__":
    main()
