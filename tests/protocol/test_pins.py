"""Competing attempts, collections, pins and forks in any order: pinned and borrowed checkpoints stay whole."""

from contextlib import suppress

import pytest

from holdfast.checkpoint import Manifest, claim_attempt, fork, open_checkpoint, pin, retention, unpin
from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.reader import Checkpoint
from holdfast.checkpoint.retention import PinRecord, Retention, checkpoint_steps
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.checkpoint.tools import collect_now
from holdfast.spec.errors import HoldfastError
from holdfast.store import layout
from tests.protocol.bucket import Bucket, MemoryStore
from tests.protocol.machine import simulated
from tests.protocol.network import Connection, Network, Weather
from tests.protocol.scenario import CONSTANTS, MODULES
from tests.protocol.states import blank, same, state, whole
from tests.protocol.world import Process, World

RUN, STEPS = "run", 6


class Scene:
    """Attempts of one run, and users who pin, fork and collect concurrently."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.bucket = Bucket(lambda: self.world.now)
        weather = Weather(latency=(0.001, 1.0), stall=0.05, timeout=1e6, deadline=1e9)
        self.network = Network(self.world, self.bucket, weather)
        self.borrowed: set[tuple[str, int]] = set()  # forks of a step of RUN
        self.pins: dict[tuple[int, str], str] = {}  # the state digest of each pin

    def play(self) -> None:
        """Let all actors run, then check the invariants."""
        with simulated(self.world, (*MODULES, retention, fork), CONSTANTS):
            for number in range(3):
                self._spawn(f"attempt {number}", self._train)
            for number in range(4):
                self._spawn(f"person {number}", lambda store, number=number: self._decide(store, number))
            self.world.run()
        store = MemoryStore(self.bucket)
        for run_id, step in self.borrowed:
            require(open_checkpoint(store, run_id, step), run_id)
        for (step, name), digest in self.pins.items():
            key = layout.pin(RUN, step, name)
            record = PinRecord.from_bytes(store.get(key), key)
            roots = [Manifest.from_bytes(root.encode(), key) for root in record.roots]
            assert digest in [root.state_digest for root in roots]
            for root in roots:
                require(Checkpoint(store, root), key)

    def _spawn(self, name: str, act: object) -> None:
        process = Process(name)
        self.world.spawn(name, lambda: act(self.network.connect(process)), process)  # type: ignore[operator]

    def _train(self, store: Connection) -> None:
        self.world.sleep(self.world.random.uniform(0, 60))
        attempt = claim_attempt(store, RUN)
        with suppress(HoldfastError):
            start = newest_step(store, RUN, attempt.number) or 0
            root = open_checkpoint(store, RUN, start).manifest if start else None
            history = (*(root.history if root else ()), (start, attempt.number))
            for step in range(start + 1, STEPS + 1):
                if step % 2 or self.world.random.random() < 0.7:
                    self._save(store, attempt, step, history)
                    Collector(store, attempt, Retention(1)).collect(step)

    def _save(self, store: Connection, attempt: Attempt, step: int, history: tuple[tuple[int, int], ...]) -> None:
        fields = {"dataset_id": "d", "layout": {}, "random": {}, "history": history}
        ShardWriter(store, attempt, 0).write(step, whole(state(step)))

        def pause() -> None:  # between the two checks of the fence
            self.world.sleep(self.world.random.choice((0.0, 5.0, 50.0)))

        Committer(store, attempt, 1).commit(step, fields, {"optimizer.step": step}, pause)

    def _decide(self, store: Connection, number: int) -> None:
        random = self.world.random
        for turn in range(4):
            self.world.sleep(random.uniform(0, 40))
            with suppress(HoldfastError):
                steps = checkpoint_steps(store, RUN)
                step = random.choice(steps or [1])
                match random.choice(("pin", "fork", "fork", "collect", "unpin")):
                    case "pin":
                        name = f"pin-{number}-{turn}"
                        self.pins[step, name] = pin(store, RUN, step, name).state_digest
                    case "fork":
                        child = f"child-{number}-{turn}"
                        fork.fork_checkpoint(store, RUN, step, child)
                        self.borrowed.add((child, step))
                    case "unpin" if self.pins:
                        pinned_name = random.choice(sorted(self.pins))
                        del self.pins[pinned_name]
                        unpin(store, RUN, *pinned_name)
                    case "collect":
                        collect_now(store, RUN, Retention(1))


def require(checkpoint: Checkpoint, what: str) -> None:
    """Require the whole checkpoint, bit for bit."""
    boxes = blank(whole(state(checkpoint.step)))
    checkpoint.fill(boxes)
    assert same(boxes, whole(state(checkpoint.step))), what


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 200, 50))
def test_pinned_and_borrowed_checkpoints_stay_complete_in_any_order_of_actions(first: int) -> None:
    actions = 0
    for seed in range(first, first + 50):
        scene = Scene(seed)
        try:
            scene.play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        actions += len(scene.borrowed) + len(scene.pins)
    assert actions >= 50
