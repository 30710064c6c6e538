"""Real training processes for many runs, one after another, because starting processes takes longer than these runs."""

import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine
from holdfast.launch.launches import claim_launch
from holdfast.model.hub import first_weights_digest
from holdfast.spec import Spec, run_id
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.train.tiny_run import DATASET_ID, VOCABULARY

Runs = list[tuple[tuple[str, ...], str, int | None]]  # overrides, salt, the step after which SIGTERM arrives
# (loss, gradient norm) of each step; (name, offset, array) of each saved box except the optimizer's
Steps = tuple[list[tuple[float, float]], list[tuple[str, tuple[int, ...], Any]]]


def train_in_ranks(
    size: int,
    url: str,
    folder: Path,
    runs: Runs,
    *,
    replan: bool = False,
    number: int = signal.SIGTERM,
    pause_at: int | None = None,
) -> list[str] | None:
    """Train each of the runs with `size` ranks, to the step `pause_at` or the last one. Returns how each ended on rank
    0 ("" or the name of the error), or None if rank 0 was killed. `number` is the signal to send instead of SIGTERM.
    """
    endings: list[str] | None = in_ranks(size, _train_all, url, folder, runs, replan, number, pause_at, seconds=400)[0]
    return endings


def join(folder: Path, rank: int, size: int, always: bool) -> None:
    """Join one process group for all runs of this process, as torchrun's ranks do for one run."""
    import torch.distributed as dist

    from holdfast.rank import setup as rank_setup

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo", HOLDFAST_HOME=str(folder / "home"),
    )  # fmt: skip
    if size > 1 or always:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    rank_setup.join_gang = lambda *_, **__: None


def started(spec: Assignment, end: int = 0) -> Engine:
    """An engine with the state before the first step. `end` is the end-of-text token. All ranks must call this."""
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState

    engine = build_engine(spec, VOCABULARY, end)
    SeededState(spec.model, spec.training.seed).fill(engine.boxes())
    engine.restored(0)
    return engine


def join_exactly(folder: Path, rank: int, size: int, always: bool) -> None:
    """Join a process group whose ranks compute like those of a run that promises bits."""
    from holdfast.rank.randomness import make_deterministic

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always)
    make_deterministic("exact", 1)


def steps_of(engine: Engine, spec: Assignment, rank: int, size: int, batches: Iterable[Tensor], rate: float) -> Steps:
    """The engine's results for this rank's rows of some global batches."""
    from holdfast.engines.mesh import Mesh

    mesh, grid, curve = Mesh.of(spec.parallel, size), spec.grid(size), []
    for rows in batches:
        place, rows_of_rank = mesh.data_rank(rank), len(rows) // mesh.data
        own_rows: Any = slice(place * rows_of_rank, (place + 1) * rows_of_rank)
        if grid is not None:
            own_rows = grid.rows(rank, spec.training.micro_batch, spec.parallel.strategy == "fsdp")
        output = engine.step(rows[own_rows], rate)
        curve.append((float(output.loss), float(output.grad_norm)))
    saved = [(box.name, box.offset, box.data.numpy().copy()) for box in engine.saved()]
    return curve, [tensor for tensor in saved if not tensor[0].startswith("optimizer")]


def _train_all(
    rank: int, size: int, url: str, folder: Path, runs: Runs, replan: bool, number: int, pause_at: int | None = None
) -> list[str]:
    from holdfast.collectives import Gang
    from holdfast.rank.preemption import PreemptionSignal
    from holdfast.rank.worker import work
    from holdfast.spec.errors import HoldfastError
    from tests.train.tiny_run import tiny_spec

    folder.mkdir(exist_ok=True)
    specs = [tiny_spec(*overrides) for overrides, _, _ in runs]
    join(folder, rank, size, any(needs_group(spec) for spec in specs))
    gang, store, endings = Gang(), open_store(url), []
    for spec, (_, salt, stop_after) in zip(specs, runs, strict=True):
        identity = identity_of(spec, salt)
        launched = launch(store, spec, salt, replan=replan, pause_at=pause_at) if rank == 0 else None
        launch_number = gang.broadcast(launched, int | None)
        assert launch_number is not None
        leave = PreemptionSignal()
        leave.listen()
        stopper = Stopper(stop_after if rank == 0 else None, number)
        logging.getLogger("holdfast.train").addHandler(stopper)
        logging.getLogger("holdfast.train").setLevel(logging.INFO)
        try:
            work(store, identity, launch_number, leave)
            endings.append("")
        except HoldfastError as error:
            endings.append(type(error).__name__)
        logging.getLogger("holdfast.train").removeHandler(stopper)
    return endings


def needs_group(spec: Spec) -> bool:
    """Whether even a single rank needs a process group."""
    return Assignment.of(spec, "", DATASET_ID).needs_group


def launch(store: Store, spec: Spec, salt: str = "", *, replan: bool = False, pause_at: int | None = None) -> int:
    """Record a launch as the launcher does."""
    weights = first_weights_digest(spec)
    assignment = Assignment.of(spec, identity_of(spec, salt), DATASET_ID, weights)
    if pause_at is not None:
        assignment = assignment.paused(pause_at, spec.evaluation)
    return claim_launch(store, assignment.run_id, assignment.model_dump(mode="json"), replan=replan)


def identity_of(spec: Spec, salt: str = "") -> str:
    """The run id, as the launcher computes it."""
    return run_id(spec, DATASET_ID, salt, first_weights_digest(spec))


class Stopper(logging.Handler):
    """Sends a signal to this process when the progress line of a step appears."""

    def __init__(self, step: int | None, number: int) -> None:
        super().__init__()
        self._step, self._number = step, number

    def emit(self, record: logging.LogRecord) -> None:
        if self._step is not None and record.getMessage().startswith(f"step {self._step}/"):
            os.kill(os.getpid(), self._number)


def trained(store: Store, spec: Spec, salt: str = "") -> dict[str, Any]:
    """The values that must not depend on interruptions of the run."""
    from holdfast.checkpoint import read_manifest
    from holdfast.telemetry import read_history
    from holdfast.telemetry.history import PURE_FIELDS

    identity = identity_of(spec, salt)
    rows = read_history(store, identity)
    return {
        "digest": read_manifest(store, identity, spec.training.steps).state_digest,
        "history": [[row[field] for field in PURE_FIELDS] for row in rows],
    }
