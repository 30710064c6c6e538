"""Bar F5: the share of its pace that a run keeps with a kill per minute (97 %) and with one every 15 s (90 %).

`python -m benchmarks.goodput [--rounds N] [--minutes M] [--every S ...] [--ranks N] [--memory STEPS]` trains a small
model on two ranks (or N) of this machine, as a user does. A round is a window of M minutes without kills (the calm
window), and then one window for each S. In that window a rank is killed with SIGKILL every S seconds, the first time
S/2 after its beginning. A window takes whole intervals, so the time from each kill to the next one is inside it.
Goodput is the number of new steps per second of such a window, divided by that of the calm window of its round. It
includes every cost of a kill, from repeated steps to slower steps while a gang starts. The output has medians of the
rounds, and the ledger's seconds per rank for each kill.

The run saves to `checkpoint.memory` every few steps (0: not at all), as recommended for machines that fail this often.
The calm window has the same settings. To see their own cost, compare the seconds per step with those under `--memory
0`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recovery import WAIT_SECONDS, ranks_of, train_under

SPEC = """
name: goodput
data: {sources: [{uri: "%s"}], validation_fraction: 0.1, tokenizer: {vocabulary: 300}}
model: {layers: 4, hidden: 256, heads: 4, context: 256}
training: {steps: 1000000, global_batch: 8, micro_batch: %d, log_every: 1}
checkpoint: {every_steps: 5}
parallel: {processes: %d}
cluster: {restarts: {backoff_seconds: 0, budget: 10000}}
"""
BARS = {60.0: 0.97, 15.0: 0.90}  # seconds between two kills: the share to keep
SETTLE_STEPS = 50  # before the first window
LOOK_SECONDS = 0.02  # between two searches for a rank to kill; this process also starts the next gang
COSTS = (
    "lost",
    "detect",
    "schedule",
    "start",
    "compile",
    "restore",
    "save",
)  # classes of the ledger that a kill adds to


class Pace:
    """Follows the steps of this process's training."""

    def __init__(self, events: Path) -> None:
        from holdfast.telemetry.event_log import PipeEvents

        self._events, self._step, self.kills = PipeEvents(events), 0, 0

    def step(self) -> int:
        """The highest step so far."""
        from holdfast.telemetry.events import Progress

        reached = (event.step for event in self._events.new() if isinstance(event, Progress))
        self._step = max(self._step, *reached, 0)
        return self._step

    def of_window(self, seconds: float, every: float | None, ranks: int) -> float:
        """New steps per second in a window, with a kill every `every` seconds or none."""
        began, before = time.monotonic(), self.step()
        kill = began + (every / 2 if every else math.inf)
        while (now := time.monotonic()) < began + seconds:
            if now >= kill and (victim := ranks_of(os.getpid()).get(str(ranks - 1))):
                os.kill(victim.pid, signal.SIGKILL)
                self.kills += 1
                kill += every or 0.0
            time.sleep(min(max(LOOK_SECONDS, min(0.5, kill - now)), began + seconds - now))
        return (self.step() - before) / (time.monotonic() - began)


def main() -> None:
    """Entry point."""
    from holdfast.store import open_store
    from holdfast.telemetry import read_events
    from holdfast.telemetry.ledger import ledger

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, nargs="+", default=list(BARS), metavar="SECONDS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", type=int, default=2, metavar="STEPS")
    options = parser.parse_args()
    memory = [f"checkpoint.memory.every_steps={options.memory}"] if options.memory else []
    costs: dict[str, float] = {}
    shares_by_interval: dict[float, list[float]] = {interval: [] for interval in options.every}
    calm: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        os.environ["HOLDFAST_EVENTS"] = str(events)

        def windows(store_url: str, run_id: str) -> None:
            try:
                pace, deadline = Pace(events), time.monotonic() + WAIT_SECONDS
                while pace.step() < SETTLE_STEPS and time.monotonic() < deadline:
                    time.sleep(0.2)
                before = ledger(read_events(open_store(store_url), run_id)).seconds  # not due to a kill
                for _ in range(options.rounds):
                    calm.append(pace.of_window(60 * options.minutes, None, options.ranks))
                    print(f"calm: {calm[-1]:.2f} steps a second", file=sys.stderr, flush=True)
                    for interval, shares in shares_by_interval.items():
                        seconds = interval * max(1, math.ceil(60 * options.minutes / interval))
                        shares.append(pace.of_window(seconds, interval, options.ranks) / calm[-1])
                        print(f"a kill every {interval:g} s: {100 * shares[-1]:.1f} %", file=sys.stderr, flush=True)
                account = ledger(read_events(open_store(store_url), run_id)).seconds
                costs_of_kills = {name: account.get(name, 0.0) - before.get(name, 0.0) for name in COSTS}
                costs.update(
                    {name: seconds / options.ranks / max(1, pace.kills) for name, seconds in costs_of_kills.items()}
                )
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        train_under(SPEC, options.ranks, windows, *memory)
    if not all(len(shares) == options.rounds for shares in shares_by_interval.values()):
        sys.exit("goodput: the training ended before the last window did")
    figures = ", ".join(
        f"{100 * statistics.median(shares):.1f} % at a kill every {interval:g} s (worst {100 * min(shares):.1f}"
        + (f"; bar {100 * BARS[interval]:.0f})" if interval in BARS else ")")
        for interval, shares in shares_by_interval.items()
    )
    pace_seconds = 1 / statistics.median(calm)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in costs.items())
    print(
        f"goodput: {figures}; {options.rounds} rounds, {options.ranks} ranks, {pace_seconds:.3f} s a step without "
        f"a kill; by the ledger, a kill: {parts}"
    )


if __name__ == "__main__":
    main()
