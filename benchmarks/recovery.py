"""Bar F1: the time from `kill -9` of a rank to the next optimizer step of the next gang, and where it is spent.

`python -m benchmarks.recovery [--rounds N] [--ranks N]` trains a small model on two ranks (or N) of this machine, as a
user does. It kills the last rank repeatedly in the middle of a step, and prints the median of each part. *detect* lasts
until the end of the launch is recorded, *launch* until the next one is recorded, and *fork* until torchrun has forked
rank 0. Rank 0 reports *start*, *meet*, *build* and *restore*; *first step* follows. No restart has a backoff, because
each is the first one in its row.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil

SPEC = """
name: recovery
data: {sources: [{uri: "%s"}], validation_fraction: 0.1, tokenizer: {vocabulary: 300}}
model: {layers: 2, hidden: 64, heads: 2, context: 64}
training: {steps: 100000, global_batch: 8, micro_batch: %d, log_every: 1}
checkpoint: {every_steps: 20}
parallel: {processes: %d}
cluster: {restarts: {backoff_seconds: 0, budget: 1000}}
"""
WAIT_SECONDS = 120.0  # seconds to wait for the next event of a run
PHASES = ("start", "meet", "build", "restore")
PARTS = ("detect", "launch", "fork", *PHASES, "first step")


def ranks_of(parent: int) -> dict[str, psutil.Process]:
    """The ranks that this process's gang has now."""
    ranks = {}
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if "holdfast.rank.worker" in process.cmdline()[1:4]:
                ranks[process.environ().get("RANK", "")] = process
        except psutil.Error:
            continue
    return ranks


def killed(rounds: int, ranks: int, timings: list[list[float]]) -> None:
    """Kill the last rank `rounds` times, each time after the gang has trained for a while, and note the events of each
    kill. Ends the training, also after a TimeoutError because no more events come."""
    from holdfast.telemetry.event_log import PipeEvents
    from holdfast.telemetry.events import AttemptBegan, LaunchBegan, LaunchEnded, Progress, TimeSpent

    pipe, events, since = PipeEvents(Path(os.environ["HOLDFAST_EVENTS"])), [], 0.0

    def wait_for(holds):  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            events.extend(pipe.new())
            matching = [event for event in events if event.time > since and holds(event)]
            if matching:
                return matching[0]
            time.sleep(0.2)
        raise TimeoutError(f"{WAIT_SECONDS:.0f} s were not enough; the last events: {events[-3:]}")

    try:
        for _ in range(rounds):
            began = wait_for(lambda event: isinstance(event, AttemptBegan))
            wait_for(lambda event, step=began.step + 30: isinstance(event, Progress) and event.step > step)
            time.sleep(0.5)  # a checkpoint was committed, and the next step is somewhere
            victim = ranks_of(os.getpid())[str(ranks - 1)]
            events.clear()
            since = time.time()
            os.kill(victim.pid, signal.SIGKILL)
            launch_end = wait_for(lambda event: isinstance(event, LaunchEnded))
            next_attempt = wait_for(lambda event: isinstance(event, AttemptBegan))
            step = wait_for(lambda event, then=next_attempt.time: isinstance(event, Progress) and event.time > then)
            launch_begin = wait_for(lambda event: isinstance(event, LaunchBegan))
            time_spent = wait_for(
                lambda event, launch=launch_begin.launch: (
                    isinstance(event, TimeSpent) and event.rank == 0 and event.launch == launch
                )
            )
            times = [since, launch_end.time, launch_begin.time, next_attempt.time, step.time]
            detect, launch, restart, first = (after - before for before, after in pairwise(times))
            phases = [time_spent.seconds.get(phase, 0.0) for phase in PHASES]
            timings.append([detect, launch, restart - sum(phases), *phases, first])
            print(f"recovery: {step.time - since:.3f} s", file=sys.stderr, flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    measure(arguments.rounds, arguments.ranks)


def measure(rounds: int, ranks: int) -> None:
    """Train and kill, and print the figures."""
    parts_of_rounds = recoveries(rounds, ranks)
    sums = [sum(parts) for parts in parts_of_rounds]
    parts = ", ".join(
        f"{name} {statistics.median(values):.3f}"
        for name, values in zip(PARTS, zip(*parts_of_rounds, strict=True), strict=True)
    )
    print(
        f"recovery: {statistics.median(sums):.3f} s from "
        f"kill -9 of a rank to the next optimizer step (worst {max(sums):.3f}, {len(sums)} kills, {ranks} ranks; bar "
        f"1 s): {parts}"
    )


def recoveries(rounds: int, ranks: int) -> list[list[float]]:
    """Train with `ranks` ranks and kill `rounds` times. Returns the seconds of each part of each recovery."""
    seconds: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOLDFAST_EVENTS"] = str(Path(folder) / "events")  # this process reads it while the launcher works
        train_under(
            SPEC,
            ranks,
            lambda *_: killed(rounds, ranks, seconds),
        )
    if len(seconds) < rounds:
        sys.exit(f"recovery: {len(seconds)} of {rounds} rounds")
    return seconds


def train_under(template: str, ranks: int, act: Callable[[str, str], None], *overrides: str) -> None:
    """Train a spec as a user does. The spec is a template for the text's pattern, the micro-batch and the ranks. A
    thread runs `act` with the store's URL and the run id, which then ends this process's training by SIGTERM."""
    from holdfast.components.preprocess import run as preprocess
    from holdfast.components.train import run
    from holdfast.spec import parse_spec, run_id
    from holdfast.spec.errors import HoldfastError
    from holdfast.store import open_store

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_HOME"] = str(folder / "home")
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        for file in range(40):  # documents
            lines = (f"{number} and {number * 7}" for number in range(500 * file, 500 * (file + 1)))
            (folder / f"{file}.txt").write_text("\n".join(lines))
        spec = parse_spec(template % (folder / "*.txt", 8 // ranks, ranks), overrides)
        store = open_store(f"file://{folder / 'store'}")
        dataset_id = preprocess(spec, store).dataset_id
        threading.Thread(target=act, args=(store.url, run_id(spec, dataset_id)), daemon=True).start()
        try:
            run(spec, dataset_id, store)
        except HoldfastError as error:  # SIGTERM ends it
            print(f"training: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
