"""Starts a training, kills a part of it at a chosen moment, and runs the same command until it succeeds."""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import psutil

from holdfast.checkpoint import open_checkpoint
from holdfast.components.train.result import TrainingResult, read_result
from holdfast.engines.assignment import Assignment
from holdfast.pipelines.chaos import processes
from holdfast.pipelines.chaos.processes import AGENT, TORCHRUN, ranks_of, running
from holdfast.spec import Spec, run_id
from holdfast.store import Store
from holdfast.telemetry import read_history
from holdfast.telemetry.event_log import PipeEvents, StoreEvents
from holdfast.telemetry.events import Progress
from holdfast.telemetry.history import PURE_FIELDS
from tests.faults.history import require_sound_history
from tests.faults.nodes import HELD, Held, kill_family
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, start_training

HELD_TRAINING = "tests.faults.held_training"
PATIENCE = 600.0  # seconds for one disturbed training; its test has the mark timeout(1000)


@dataclass
class Deed:
    """One kill: the victim and the moment (after `step` was printed, or `seconds` after the start if
    `step` is None).
    """

    victim: str  # "launcher", "torchrun", "agent", "rank0", "rank1"
    step: int | None
    seconds: float


def random_deeds(seed: int, steps: int, ranks: int) -> list[Deed]:
    """One to three kills of random victims at random moments, including startup. The first comes while the training
    certainly runs: a whole training takes three seconds on an idle machine.
    """
    rng = random.Random(seed)
    victims = ["launcher", "torchrun", *(f"rank{rank}" for rank in range(ranks))]
    deeds = []
    for _ in range(rng.randint(1, 3)):
        during = rng.random() < 0.7
        deeds.append(
            Deed(
                rng.choice(victims),
                rng.randrange(1, steps * 3 // 4) if during else None,
                rng.uniform(0, 0.05 if during else 1.5),
            )
        )
    return deeds


def find_victim(launcher: psutil.Process, name: str) -> psutil.Process | None:
    """The process called `name` among the launcher and its descendants."""
    if name == "launcher":
        return launcher
    if name in ("torchrun", "agent"):
        return running(launcher, {"torchrun": TORCHRUN, "agent": AGENT}[name])
    number = int(name.removeprefix("rank"))
    if (rank := ranks_of(launcher).get(number)) is not None:
        return rank
    with patch.object(processes, "WORKERS", (HELD,)):
        return ranks_of(launcher).get(number)


def wait_for_victim(launcher: psutil.Process, name: str) -> psutil.Process:
    """Wait until `find_victim` finds the process."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if (victim := find_victim(launcher, name)) is not None:
            return victim
        time.sleep(0.01)
    raise AssertionError(f"no {name} was started")


def wait_until_idle(process: psutil.Process) -> None:
    """Wait until a process that has used the CPU has been idle for a second."""
    deadline, cpu_seconds, since = time.monotonic() + 180, 0.0, time.monotonic()
    while time.monotonic() < deadline:
        times = process.cpu_times()
        if times.user + times.system != cpu_seconds:
            cpu_seconds, since = times.user + times.system, time.monotonic()
        if cpu_seconds > 0 and time.monotonic() - since >= 1:
            return
        time.sleep(0.1)
    raise AssertionError("it computes on and on")


@dataclass
class Output:
    """The lines that a training prints, and the steps that its events report."""

    events: PipeEvents | StoreEvents
    lines: list[str] = field(default_factory=list)
    step: int = 0
    closed: bool = False

    def follow(self, stream: object) -> None:
        """Read a stream to its end."""
        for line in stream:  # type: ignore[attr-defined]
            self.lines.append(line)
        self.closed = True

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        """Wait until `step` was reported, the stream ended, or the timeout passed."""
        deadline = time.monotonic() + seconds
        while not self.closed and self.step < step and time.monotonic() < deadline:
            for event in self.events.new():
                self.step = event.step if isinstance(event, Progress) else self.step
            time.sleep(0.005)


@contextmanager
def followed(process: subprocess.Popen[str], output: Output) -> Iterator[threading.Thread]:
    """Read the output of a training in a thread that ends with it. All processes of the training are killed afterwards,
    because a held one would wait forever.
    """
    reader = threading.Thread(target=output.follow, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield reader
    finally:
        kill_family(process)


def held_at(steps: int, spec: Spec, store: Store, home: Path) -> Held:
    """A training at `home`, of HELD_TRAINING, that computes up to this step and no further."""
    gate = Held(store, run_id(spec, DATASET_ID), home.with_name(f"{home.name}.holds"), lambda: True)
    gate.hold(steps)
    return gate


def train_through(
    spec: Spec, store: Store, home: Path, deeds: list[Deed], environment: dict[str, str] | None = None
) -> str:
    """Run the training, carry out every deed in order, and repeat the command whenever it ends early. Returns a diary.
    The last step is not computed before all deeds are done.
    """
    diary: list[str] = []
    waiting = list(deeds)
    gate = held_at(spec.training.steps - 1, spec, store, home)
    deadline = time.monotonic() + PATIENCE
    for _ in range(len(deeds) + 2):
        process = start_training(
            spec, store.url, home, environment={**gate.variables, **(environment or {})}, module=HELD_TRAINING
        )
        output = Output(PipeEvents(home / PIPE_FILE))
        with followed(process, output) as reader:
            tree = psutil.Process(process.pid)
            while waiting and process.poll() is None:
                assert time.monotonic() < deadline, f"{waiting} were not done\n" + "".join([*diary, *output.lines])
                deed = waiting[0]
                if deed.step is not None:
                    output.wait_for_step(deed.step, deadline - time.monotonic())
                time.sleep(deed.seconds)  # the test needs this moment
                victim = find_victim(tree, deed.victim) if process.poll() is None else None
                if victim is None:
                    if process.poll() is not None:
                        break
                    time.sleep(0.01)
                    continue
                diary.append(f"{deed} at step {output.step}: pid {victim.pid}")
                waiting.pop(0)
                if not waiting:
                    gate.hold(spec.training.steps)
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            reader.join()
        diary += output.lines
        if code == 0:
            assert not waiting, f"ended before {waiting}:\n" + "".join(diary)
            return "\n".join(diary)
        assert code == -signal.SIGKILL or code >= 128, f"ended permanently with {code}\n" + "".join(diary)
    raise AssertionError("never finished\n" + "".join(diary))


def outcome(store: Store, spec: Spec) -> tuple[TrainingResult, dict[str, object]]:
    """The result, and all values whose bits must be equal in a disturbed and an undisturbed run. The history must be
    sound.
    """
    identity = run_id(spec, DATASET_ID)
    result = read_result(store, identity)
    assert result is not None
    require_sound_history(store, Assignment.of(spec, identity, DATASET_ID))
    checkpoint = open_checkpoint(store, identity, spec.training.steps)
    digests = {name: [(piece.offset, piece.digest) for piece in checkpoint.pieces(name)] for name in checkpoint.tensors}
    history = [{name: row[name] for name in PURE_FIELDS} for row in read_history(store, identity)]
    export = {info.key: store.get(info.key) for info in store.list(result.export)}
    return result, {"state": checkpoint.manifest.state_digest, "tensors": digests, "history": history, "export": export}
