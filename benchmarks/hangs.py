"""Bars F3 and F4: the time until a hung rank and a slow rank are named, and the number of wrong names.

`python -m benchmarks.hangs [--rounds N] [--steps N] [--ranks N]` trains a small model on two ranks (or N) of this
machine, as a user does. First it trains N short steps without interference. A hang that is named then is a false alarm,
and so is a straggler if the machine is otherwise idle. Then it stops ranks alternately (SIGSTOP), and compares the time
until each is named with three usual steps and a second (F3). Last, in a training with longer steps, a rank gets 10 of
13 parts of its time, which makes it 1.3 times as slow. The steps until it is named are counted (F4: 20).
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recovery import SPEC, WAIT_SECONDS, ranks_of, train_under

LONGER = """
name: stragglers
data: {sources: [{uri: "%s"}], validation_fraction: 0.1, tokenizer: {vocabulary: 300}}
model: {layers: 4, hidden: 128, heads: 4, context: 128}
training: {steps: 100000, global_batch: 8, micro_batch: %d, log_every: 1}
parallel: {processes: %d}
"""
PERIOD, STOPPED = 0.026, 0.006  # seconds: a slow rank runs for 20 ms of each period
SETTLE_STEPS = 50


class Events:
    """The events of this process's training, as they arrive."""

    def __init__(self, path: Path) -> None:
        from holdfast.telemetry.event_log import PipeEvents
        from holdfast.telemetry.events import Progress

        self._new, self._progress = PipeEvents(path).new, Progress
        self.seen: list[Any] = []
        self.step = 0  # the newest one

    def look(self) -> None:
        """Read the new events."""
        for event in self._new():
            self.seen.append(event)
            if isinstance(event, self._progress):
                self.step = event.step

    def until(self, holds: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
        """Wait until a condition is true. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not (result := holds()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{seconds:.0f} s were not enough; the last events: {self.seen[-3:]}")
            time.sleep(0.02)
            self.look()
        return result

    def first(self, kind: type, since: float) -> Any:
        """The first event of a kind after a moment, or None."""
        return next((event for event in self.seen if isinstance(event, kind) and event.time > since), None)

    def step_seconds(self, since: float) -> float:
        """The usual seconds per step since a moment."""
        progress = [event for event in self.seen if isinstance(event, self._progress) and event.time > since]
        further = [(previous, other) for previous, other in pairwise(progress) if other.step > previous.step]
        return statistics.median(
            (other.time - previous.time) / (other.step - previous.step) for previous, other in further
        )


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Give the process 10 of 13 parts of its time."""
    over = threading.Event()

    def slow() -> None:
        with suppress(ProcessLookupError):
            while not over.wait(PERIOD - STOPPED):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def trained(template: str, ranks: int, act: Callable[[Events], None]) -> None:
    """Train a spec while `act` runs in a thread; then end the training."""
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        os.environ["HOLDFAST_EVENTS"] = str(path)

        def body(_store_url: str, _run_id: str) -> None:
            try:
                act(Events(path))
            except BaseException as error:  # noqa: BLE001 - reported below: this is a thread
                failed.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        train_under(template, ranks, body)
    if failed:
        sys.exit(f"hangs: {failed[0]}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    from holdfast.telemetry.events import AttemptBegan, HangDetected, StragglerDetected

    false: list[str] = []  # names without interference, as text
    beyond: list[float] = []  # seconds after three usual steps
    wrong: list[int] = []  # ranks that were named instead of another one
    slow: list[int] = []  # steps

    def alarms_and_hangs(events: Events) -> None:
        events.until(lambda: events.step >= arguments.steps, 3600.0)
        hangs, slower = (
            sum(isinstance(event, kind) for event in events.seen) for kind in (HangDetected, StragglerDetected)
        )
        false.append(f"{hangs} hangs and {slower} stragglers named wrongly in {events.step} steps")
        print(false[0], file=sys.stderr, flush=True)
        since = 0.0
        for number in range(arguments.rounds):
            began = events.until(lambda: events.first(AttemptBegan, since))  # noqa: B023
            events.until(lambda: events.step >= began.step + SETTLE_STEPS)  # noqa: B023
            usual_seconds, victim = events.step_seconds(began.time), number % arguments.ranks
            since = time.time()
            os.kill(ranks_of(os.getpid())[str(victim)].pid, signal.SIGSTOP)
            hang = events.until(lambda: events.first(HangDetected, since))  # noqa: B023
            beyond.append(hang.time - since - 3 * usual_seconds)
            wrong.extend([hang.rank] if hang.rank != victim else [])
            print(f"rank {victim} named after {hang.time - since:.2f} s", file=sys.stderr, flush=True)

    def stragglers(events: Events) -> None:
        events.until(lambda: events.step >= SETTLE_STEPS)
        for number in range(arguments.rounds):
            victim, since, step = number % arguments.ranks, time.time(), events.step
            with slowed(ranks_of(os.getpid())[str(victim)].pid):
                event = events.until(lambda: events.first(StragglerDetected, since))  # noqa: B023
            slow.append(event.step - step)
            wrong.extend([event.rank] if event.rank != victim else [])
            print(f"{event.text}: {slow[-1]} steps", file=sys.stderr, flush=True)
            events.until(lambda: events.step >= event.step + SETTLE_STEPS)  # noqa: B023

    trained(SPEC, arguments.ranks, alarms_and_hangs)
    trained(LONGER, arguments.ranks, stragglers)
    print(
        f"hangs: {false[0]}; a stopped rank named {statistics.median(beyond):.2f} s after three usual steps "
        f"(worst {max(beyond):.2f}; bar 1); a rank 1.3 times as slow named after {statistics.median(slow):.0f} steps "
        f"(worst {max(slow)}; bar 20); {len(wrong)} of {len(beyond) + len(slow)} named wrongly; {arguments.ranks} ranks"
    )


if __name__ == "__main__":
    main()
