"""Starting a training, killing a part of it at a chosen moment, and running the same command until it is done."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.components.checkpoint import read_manifest
from holdfast.components.spec import Spec, run_id
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import read_history
from holdfast.components.telemetry.event_log import PipeEvents, StoreEvents
from holdfast.components.telemetry.events import Progress
from holdfast.components.telemetry.history import PURE_FIELDS
from holdfast.components.train.result import TrainingResult, read_result
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, start_training


@dataclass
class Deed:
    """One kill: who, and when (after `step` was printed, or `seconds` after the start when `step` is None)."""

    victim: str  # "launcher", "torchrun", "rank0", "rank1"
    step: int | None
    seconds: float


def random_deeds(seed: int, steps: int, ranks: int) -> list[Deed]:
    """One to three kills of random victims at random moments, startup included."""
    rng = random.Random(seed)
    victims = ["launcher", "torchrun", *(f"rank{rank}" for rank in range(ranks))]
    deeds = []
    for _ in range(rng.randint(1, 3)):
        during = rng.random() < 0.7
        deeds.append(
            Deed(
                rng.choice(victims), rng.randrange(1, steps) if during else None, rng.uniform(0, 0.05 if during else 4)
            )
        )
    return deeds


def find_victim(launcher: psutil.Process, name: str) -> psutil.Process | None:
    """The process that `name` stands for, among the launcher and what it has started."""
    if name == "launcher":
        return launcher
    for process in launcher.children(recursive=True):
        try:
            command = process.cmdline()
            if name == "torchrun" and "holdfast.components.launch.torchrun" in command:
                return process
            worker = (
                "holdfast.components.train.worker" in command and "holdfast.components.launch.torchrun" not in command
            )
            if worker and f"rank{process.environ().get('RANK')}" == name:
                return process
        except psutil.Error:
            continue
    return None


def wait_for_victim(launcher: psutil.Process, name: str) -> psutil.Process:
    """`find_victim`, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (victim := find_victim(launcher, name)) is not None:
            return victim
        time.sleep(0.01)
    raise AssertionError(f"no {name} was started")


def wait_until_idle(process: psutil.Process) -> None:
    """Wait until a process that has computed has computed nothing for a second."""
    deadline, used, since = time.monotonic() + 60, 0.0, time.monotonic()
    while time.monotonic() < deadline:
        times = process.cpu_times()
        if times.user + times.system != used:
            used, since = times.user + times.system, time.monotonic()
        if used > 0 and time.monotonic() - since >= 1:
            return
        time.sleep(0.1)
    raise AssertionError("it computes on and on")


@dataclass
class Output:
    """What a training prints, line by line, and the steps that its events report."""

    events: PipeEvents | StoreEvents
    lines: list[str] = field(default_factory=list)
    step: int = 0
    closed: bool = False

    def follow(self, stream: object) -> None:
        """Read a stream to its end."""
        for line in stream:  # type: ignore[attr-defined]
            self.lines.append(line)
        self.closed = True

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` was reported, or the stream ended."""
        deadline = time.monotonic() + 120
        while not self.closed and self.step < step and time.monotonic() < deadline:
            for event in self.events.new():
                self.step = event.step if isinstance(event, Progress) else self.step
            time.sleep(0.005)


def train_through(
    spec: Spec, store: Store, home: Path, deeds: list[Deed], environment: dict[str, str] | None = None
) -> str:
    """Run the training, do every deed in turn, run the same command again whenever it ended early. Returns a diary."""
    diary: list[str] = []
    waiting = list(deeds)
    for _ in range(len(deeds) + 2):
        process = start_training(spec, store.url, home, environment=environment)
        output = Output(PipeEvents(home / PIPE_FILE))
        reader = threading.Thread(target=output.follow, args=(process.stdout,))
        reader.start()
        tree = psutil.Process(process.pid)
        while waiting and process.poll() is None:
            deed = waiting[0]
            if deed.step is not None:
                output.wait_for_step(deed.step)
            time.sleep(deed.seconds)  # the moment is the point of the test
            victim = find_victim(tree, deed.victim) if process.poll() is None else None
            if victim is None:
                if process.poll() is not None:
                    break
                time.sleep(0.01)
                continue
            diary.append(f"{deed} at step {output.step}: pid {victim.pid}")
            waiting.pop(0)
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        code = process.wait(timeout=300)
        reader.join()
        diary += output.lines
        if code == 0:
            assert len(waiting) < len(deeds), "nothing was killed:\n" + "".join(diary)
            return "\n".join(diary)
        assert code == -signal.SIGKILL or code >= 128, f"ended for good with {code}\n" + "".join(diary)
    raise AssertionError("never finished\n" + "".join(diary))


def outcome(store: Store, spec: Spec) -> tuple[TrainingResult, dict[str, object]]:
    """The result, and everything that must be the same bits in a disturbed and an undisturbed run."""
    identity = run_id(spec, DATASET_ID)
    result = read_result(store, identity)
    assert result is not None
    manifest = read_manifest(store, identity, spec.training.steps)
    digests = {
        name: [(piece.offset, piece.digest) for piece in record.pieces] for name, record in manifest.tensors.items()
    }
    history = [{name: row[name] for name in PURE_FIELDS} for row in read_history(store, identity)]
    export = {info.key: store.get(info.key) for info in store.list(layout.export(identity, spec.training.steps))}
    return result, {"state": manifest.state_digest, "tensors": digests, "history": history, "export": export}
