"""A training that is killed, frozen, replaced and thawed, over the production code of the checkpoint protocol.

A supervisor starts gangs one after another, even while older gangs are alive. Each rank claims, restores, saves every
step and collects, as the trainer does. The seed determines its faults.
"""

from dataclasses import dataclass, field
from functools import partial

from holdfast.checkpoint import (
    attempts,
    box,
    claim_attempt,
    commit,
    damage_reports,
    fetch,
    gc,
    lineage,
    load,
    load_newest,
    packing,
    pieces,
    reader,
    shard_writer,
    tiles,
    tree,
)
from holdfast.checkpoint.agent import store_writer
from holdfast.checkpoint.agent.protocol import SaveRequest, Writer
from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.retention import Retention
from holdfast.spec.errors import (
    FencedError,
    HoldfastError,
    NoCheckpointVerifiesError,
    StoreUnreachableError,
)
from holdfast.store import layout, sequence
from tests.protocol.bucket import Bucket
from tests.protocol.gang import Meeting, SimulatedGang
from tests.protocol.machine import Thread, simulated
from tests.protocol.network import Connection, Network, Weather
from tests.protocol.oracle import RUN, Oracle, ViolationError, attachment
from tests.protocol.states import blank, cut, state
from tests.protocol.world import START, Process, World

MODULES = (
    attempts, box, gc, commit, damage_reports, fetch, gc, lineage, load, packing, pieces, reader, sequence,
    shard_writer,
    tiles, tree, store_writer,
)  # fmt: skip
CONSTANTS = {
    "PIECE_BYTES": 64, "WIDE_BYTES": 8, "RUN_BYTES": 96, "PACK_BYTES": 128, "READ_BYTES": 100, "BATCH": 2, "FANOUT": 2,
    "PATIENCE_SECONDS": 60.0,
}  # fmt: skip


@dataclass
class Plan:
    """The settings and faults of a simulated run."""

    steps: int = 6
    keep_last: int = 1
    keep_every: int | None = None
    sizes: tuple[int, ...] = (2,)  # the number of ranks of each attempt, in order
    columns: tuple[bool, ...] = (False,)
    nodes: int = 2
    max_lag: int = 2
    chaos: int = 0  # number of faults
    weather: Weather = field(default_factory=Weather)
    lies: float = 0.0
    damage: bool = False


@dataclass(eq=False)
class GangRun:
    """A gang that was started."""

    number: int
    processes: list[Process]
    meeting: Meeting
    behind: Meeting
    columns: bool
    done: set[int] = field(default_factory=set)  # ranks that finished

    @property
    def finished(self) -> bool:
        """Whether every rank finished."""
        return len(self.done) == len(self.processes)


class Saver:
    """A rank and its agent during saves. Every rank writes. The leader also commits and collects, concurrently with the
    next steps.
    """

    def __init__(
        self, world: World, plan: Plan, store: Connection, number: int, rank: int, size: int, begun: Manifest | None
    ) -> None:
        self._world, self._plan, self._number, self._rank = world, plan, number, rank
        self._committed = begun.step if begun else 0
        self._work = store_writer.StoreWriter(
            Writer(
                store=store.url,
                run_id=RUN,
                attempt=number,
                launch=0,
                rank=rank,
                world=size,
                describe={"dataset_id": "d", "layout": {}, "random": {}},
                plan=None,
                segments=(),
                history=begun.history if begun else (),
                start=self._committed,
                same_bits=True,
                retention=Retention(plan.keep_last, plan.keep_every),
                compress=False,
                upload_rate=None,
            ),
            store,
        )
        self._behind: Thread | None = None
        self._failure: HoldfastError | None = None

    def save(self, step: int, boxes: list[TensorBox]) -> None:
        """Write this rank's part, and commit it in the background. Raises the permanent failure of an earlier save."""
        try:
            self._work.write(SaveRequest(step=step), boxes)
        except HoldfastError as error:
            self._work.give_up(step, error)
            self._hear(step, error)
        else:
            if self._work.leads:
                self._join()
                self._behind = Thread(self._commit, (step,), name="commit")
                self._behind.start()

    def finish(self) -> None:
        """Wait for the last commit, then collect."""
        self._join()
        if self._rank == 0:
            if self._committed < self._plan.steps:
                raise StoreUnreachableError(f"the last commit is that of step {self._committed}")
            self._collect(self._plan.steps)

    def _commit(self, step: int) -> None:
        try:
            attachments = {attachment(self._number, step): "measured"}
            self._work.commit(SaveRequest(step=step, scalars={"step": step}, attachments=attachments))
            if self._rank == 0:
                self._committed = step
                self._collect(step)
        except HoldfastError as error:
            self._failure = error

    def _collect(self, step: int) -> None:
        try:
            self._work.after_commit(step)
        except FencedError:
            raise
        except HoldfastError as error:
            self._world.note(f"{self._world.process.name} leaves what is not needed: {error}")

    def _join(self) -> None:
        if self._behind is not None:
            self._behind.join()
            self._behind = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self._hear(self._committed + 1, failure)

    def _hear(self, step: int, failure: HoldfastError) -> None:
        """Continue after a store fault that is within the allowed number of steps."""
        if not isinstance(failure, StoreUnreachableError) or step - self._committed > self._plan.max_lag:
            raise failure


class Run:
    """One simulated run."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.bucket = Bucket(lambda: world.now)
        self.network = Network(world, self.bucket, plan.weather)
        self.oracle = Oracle(world, self.bucket)
        self.network.looked = self.oracle.looked
        self.gangs: list[GangRun] = []
        self.calm = plan.chaos == 0
        self.refused = False  # because no checkpoint can be verified
        self.disturbed = 0  # how many of the last gangs may still fail
        self._outside = Process("supervisor")

    def gang_of(self, process: Process) -> GangRun:
        """The gang of a process."""
        return next(gang for gang in self.gangs if process in gang.processes)

    def execute(self) -> None:
        """Run from the first start to the last collection."""
        with simulated(self.world, MODULES, CONSTANTS):
            self.world.spawn("supervisor", self._supervise, self._outside)
            if self.plan.chaos:
                self.world.spawn("chaos", self._chaos, Process("chaos"))
            self.world.run()
        if not self.refused:
            self.oracle.finished(self.plan.steps)

    def _supervise(self) -> None:
        world = self.world
        while True:
            gang = self._start()
            patience = float("inf") if self.calm else world.random.choice((5.0, 60.0, 600.0))
            world.wait(partial(self._ended, gang), patience)
            if gang.finished or self.refused:
                break
            world.sleep(world.random.choice((0.0, 1.0, 20.0)))
            if world.random.random() < 0.5:
                for process in gang.processes:
                    if not process.frozen:
                        world.kill(process)
        self.calm = True
        self.network.weather = self.network.weather.calmed()
        for _ in range(1 + self.disturbed + 2 * len(self.oracle.damaged)):  # two readers must agree on damage
            self._thaw()
            world.wait(lambda: not self.network.under_way and not any(map(world.alive, self._processes())))
            last = self._start()
            world.wait(partial(self._ended, last))
            if last.finished or self.refused:
                return
        raise ViolationError("an undisturbed gang does not finish")

    def _ended(self, gang: GangRun) -> bool:
        given_up = self.disturbed and any(process.frozen for process in gang.processes)
        return (
            bool(given_up)
            or gang.finished
            or any(
                not self.world.alive(process) and rank not in gang.done for rank, process in enumerate(gang.processes)
            )
        )

    def _thaw(self) -> None:
        for process in self._processes():
            process.frozen, process.lies = False, 0.0

    def _processes(self) -> list[Process]:
        return [process for gang in self.gangs for process in gang.processes]

    def _start(self) -> GangRun:
        plan, number = self.plan, len(self.gangs)
        size = plan.sizes[number % len(plan.sizes)]
        first = self.world.random.randrange(plan.nodes)
        processes = [
            Process(f"gang {number + 1} rank {rank}", f"node {(first + rank) % plan.nodes}") for rank in range(size)
        ]
        for process in processes:
            process.lies = plan.lies if process.node == "node 0" and not self.calm else 0.0
        meeting, behind = Meeting(self.world, processes), Meeting(self.world, processes)
        gang = GangRun(number + 1, processes, meeting, behind, plan.columns[number % len(plan.columns)])
        self.gangs.append(gang)
        self.world.note(f"gang {gang.number} of {size} starts")
        for rank, process in enumerate(processes):
            self.world.spawn(process.name, partial(self._rank, gang, rank), process)
        return gang

    def _rank(self, gang: GangRun, rank: int) -> None:
        try:
            self._train(gang, rank)
            self.world.note(f"{self.world.process.name} is done")
        except ViolationError:
            raise
        except NoCheckpointVerifiesError as error:
            if self.oracle.intact():
                raise ViolationError(f"{error}, and {self.oracle.intact()} are intact") from error
            self.refused = True  # every later gang would do the same, until a person decides
        except HoldfastError as error:
            self.world.note(f"{self.world.process.name} ends: {type(error).__name__} {error}")
        for meeting in (gang.meeting, gang.behind):
            meeting.left.add(rank)
        self.world.process.dead = True

    def _train(self, gang: GangRun, rank: int) -> None:
        world, plan, size = self.world, self.plan, len(gang.processes)
        store = self.network.connect(world.process)
        ranks = SimulatedGang(gang.meeting, rank)
        number, committed = ranks.from_rank_0(
            lambda: (claim_attempt(store, RUN).number, self.oracle.newest()), tuple[int, int | None]
        )
        boxes = blank(cut(state(0), rank, size, gang.columns))
        fence = partial(Attempt(RUN, number).check, store)
        manifest = load_newest(store, RUN, boxes, SimulatedGang(gang.behind, rank), number, fence)
        step = manifest.step if manifest else 0
        if manifest:
            expected = cut(state(step), rank, size, gang.columns)
            self.oracle.require_bits(boxes, expected, f"what rank {rank} loaded of {step}")
        if rank == 0:
            self.oracle.restored(number, step, committed)
        saver = Saver(self.world, plan, store, number, rank, size, manifest.manifest if manifest else None)
        for following in range(step + 1, plan.steps + 1):
            world.sleep(1.0)
            ranks.barrier()
            saver.save(following, cut(state(following), rank, size, gang.columns))
        saver.finish()
        gang.done.add(rank)

    def _chaos(self) -> None:
        world = self.world
        for _ in range(self.plan.chaos):
            world.sleep(world.random.choice((0.3, 1.0, 3.0, 10.0)) * world.random.random())
            processes = [process for process in self._processes() if world.alive(process)]
            if self.calm or not processes:
                break
            victim = world.random.choice(processes)
            match world.random.choice(("kill", "freeze", "freeze gang", "thaw", "clock", "damage")):
                case "kill":
                    world.note(f"{victim.name} is killed")
                    world.kill(victim)
                case "freeze":
                    world.note(f"{victim.name} is frozen")
                    victim.frozen = True
                case "freeze gang":
                    gang = self.gang_of(victim)
                    world.note(f"gang {gang.number} is frozen")
                    for process in gang.processes:
                        process.frozen = not process.dead
                case "thaw":
                    for process in processes:
                        process.frozen = False
                    world.note("all thaw")
                case "damage":
                    self._damage()
                case "clock":
                    victim.skew = world.random.choice((-86400.0, -60.0, 60.0, 86400.0))
        self.calm = True

    def _damage(self) -> None:
        """Flip a bit of a checkpoint or truncate it, while another one is whole."""
        random, oracle = self.world.random, self.oracle
        steps = oracle.intact()
        if len(steps) < 2 or not self.plan.damage:
            return
        root = layout.checkpoint(RUN, random.choice(steps))
        key = random.choice(sorted(oracle.needs[root] | {root}))
        data = bytearray(self.bucket.objects[key].data)
        place = random.randrange(len(data))
        if random.random() < 0.7:
            data[place] ^= 1 << random.randrange(8)
        else:
            del data[place:]
        self.world.note(f"{key} is damaged at {place}")
        oracle.damage(root, key, bytes(data))


def plan_of(world: World) -> Plan:
    """The plan of a seed."""
    random = world.random
    faults = random.random() < 0.7
    rate = random.choice((0.002, 0.01, 0.05)) if faults else 0.0
    weather = Weather(
        lost_request=rate * random.random(),
        lost_reply=rate * random.random(),
        late=rate * random.random(),
        refused=rate,
        latency=random.choice(((0.002, 0.05), (0.001, 1.0))),
        stall=random.choice((0.0, 0.005)),
        deadline=random.choice((8.0, 30.0)),
    )
    if random.random() < 0.2:
        begin = START + random.uniform(0, 20)
        weather.outages = [(begin, begin + random.choice((5.0, 60.0)))]
    return Plan(
        steps=random.randint(3, 7),
        keep_last=random.randint(1, 3),
        keep_every=random.choice((None, None, 2, 3)),
        sizes=tuple(random.randint(1, 4) for _ in range(4)),
        columns=tuple(random.random() < 0.4 for _ in range(3)),
        nodes=random.randint(2, 3),
        max_lag=random.choice((0, 2, 100)),
        chaos=random.choice((0, 2, 5, 10)),
        weather=weather,
        lies=random.choice((0.0, 0.0, 0.0, 0.02, 0.3)),
        damage=random.random() < 0.3,
    )


def simulate(seed: int, trace: list[str] | None = None) -> World:
    """Run one simulation. Raises ViolationError, or an unexpected error of the production code."""
    world = World(seed)
    world.trace = trace
    Run(world, plan_of(world)).execute()
    return world
