"""One rank of the gang: reads its launch, meets the others, loads the newest state, trains.

torchrun starts it on every accelerator. Everything it needs to know stands in the store under its launch. The gang that
has met claims an attempt, and whoever meets again under the same launch claims another.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from holdfast.components.checkpoint import Attempt, Checkpointer, Manifest, Retention, claim_attempt, newest_segments
from holdfast.components.dataset import Batches, Dataset, Prefetcher
from holdfast.components.launch.ending import RankRecord
from holdfast.components.launch.launches import read_launch
from holdfast.components.launch.orphan import die_with_parent
from holdfast.components.model.imported import require_weights
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.runtime.exits import code_of, exit_code_of
from holdfast.components.runtime.gang import Gang, noticing_lost_peers
from holdfast.components.runtime.logs import configure_logging
from holdfast.components.spec import ExitCode
from holdfast.components.spec.errors import (
    BadReaderError,
    DivergedError,
    HoldfastError,
    LostPeerError,
    PreemptedError,
    WrongArithmeticError,
)
from holdfast.components.spec.plan import Plan, require_plan
from holdfast.components.store import Store, open_store
from holdfast.components.telemetry import emit, recording
from holdfast.components.telemetry.events import AttemptBegan, RankEnded, set_source
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.device import join_gang, local_device
from holdfast.components.train.engine import build_engine
from holdfast.components.train.leave import LeaveSignal
from holdfast.components.train.loop import train
from holdfast.components.train.observers import History, Observer, Progress
from holdfast.components.train.plan import plan_of, require_one_plan
from holdfast.components.train.randomness import make_deterministic
from holdfast.components.train.weights import FirstState, ImportedState, SeededState

log = logging.getLogger("holdfast.train")


def work(
    store: Store, run_id: str, launch: int, leave: LeaveSignal, on_formed: Callable[[int], None] = lambda _: None
) -> None:
    """Be one rank of launch number `launch` of a run until the run is trained. `on_formed` is told the attempt that the
    gang is once it has met."""
    launched = read_launch(store, run_id, launch)
    spec, replan = Assignment.model_validate(launched["assignment"]), bool(launched["replan"])
    make_deterministic(spec.training.determinism, spec.parallel.threads)
    device = local_device(spec.accelerator)
    dataset = Dataset.open(store, spec.dataset_id, cache_dir())
    with leave.meeting():
        join_gang(device, always=spec.parallel.engine == "deepspeed")
        leave.join()
        gang, savers = Gang(), Gang()
        plan = plan_of(spec, device)
        require_one_plan(gang.all_gather(plan), spec.training.determinism)
        attempt = gang.from_rank_0(lambda: claim(store, spec, launch, gang.size, plan, replan))
        engine = build_engine(spec, dataset.vocabulary, dataset.end_of_text)  # makes groups of its own
    set_source(f"rank {gang.rank}", launch=launch, attempt=attempt.number, not_before=launched["claimed"])
    on_formed(attempt.number)
    leave.at_once("before the state was loaded")

    def accept(manifest: Manifest) -> None:
        require_plan(manifest.segments, plan, spec.training.determinism, replan)  # it may not be the newest one

    checkpointer = Checkpointer(
        store,
        attempt,
        Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_every),
        describe={
            "dataset_id": dataset.dataset_id,
            "layout": engine.layout,
            "random": {"scheme": "keyed by step", "seed": spec.training.seed},
        },
        plan=plan,
        max_lag_steps=spec.checkpoint.lag_steps,
        same_bits=spec.training.determinism != "off",
        gang=savers,
    )
    start = checkpointer.restore(
        engine.boxes(), lambda boxes: first_state(spec, dataset.vocabulary).fill(boxes), accept
    )
    engine.restored(start)
    leave.at_once(f"with the state of step {start} loaded")
    history = History(spec, start, keep=gang.rank == 0)
    checkpointer.on_commit = partial(history.commit, store, attempt)
    observers: list[Observer] = [history] + ([Progress(spec, history, start)] if gang.rank == 0 else [])
    if gang.rank == 0:
        world, steps, host = gang.size, spec.training.steps, socket.gethostname()
        began = AttemptBegan(
            attempt=attempt.number, world=world, step=start, steps=steps, host=host, device=str(device)
        )
        log.info("%s", began.text)
        emit(began)
    try:
        training, rows = batches(spec, dataset, gang)
        with Prefetcher(training, rows, start, stop=spec.training.steps) as ahead:
            train(spec, engine, ahead, checkpointer, observers, leave, gang)
        if start == spec.training.steps:  # an earlier attempt died between its last commit and the sweep after it
            checkpointer.sweep(start)
    except (DivergedError, WrongArithmeticError, LostPeerError):
        with suppress(HoldfastError):
            checkpointer.wait()  # the save in flight is of a state that was finite, and equal on all replicas
        raise


def claim(store: Store, spec: Assignment, launch: int, world_size: int, plan: Plan, replan: bool) -> Attempt:
    """Claim an attempt for this gang. Raises PlanChangedError, and claims none, when the run may not go on as this gang
    computes; the attempts before it are not fenced off then."""
    changes = require_plan(newest_segments(store, spec.run_id), plan, spec.training.determinism, replan)
    if changes:
        log.warning("the plan changes, and with it the last bits of what follows: %s", "; ".join(changes))
    return claim_attempt(
        store,
        spec.run_id,
        launch=launch,
        world_size=world_size,
        plan=plan.model_dump(mode="json"),
        fingerprint=plan.fingerprint,
    )


def batches(spec: Assignment, dataset: Dataset, gang: Gang) -> tuple[Batches, slice]:
    """The global batches, and which rows of each are this rank's."""
    training = dataset.training(
        spec.model.context, spec.training.global_batch, spec.training.seed, spec.source_weights, spec.shuffle
    )
    share = spec.training.global_batch // gang.size
    return training, slice(gang.rank * share, (gang.rank + 1) * share)


def first_state(spec: Assignment, vocabulary: int) -> FirstState:
    """The state before the first step, as the spec wants it. Raises DataError for weights that are not those the run
    was named after."""
    if spec.model.init_from is None:
        return SeededState(spec.model, spec.training.seed)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # one for all ranks that read the same disk
        require_weights(spec.model.init_from, spec.first_weights)
    return ImportedState(spec.model.init_from, spec.model, vocabulary)


@contextmanager
def _ending_told() -> Iterator[None]:
    """Tell how this rank ends: rank 0, and one that is the cause and no consequence."""
    rank, code, reason = int(os.environ.get("RANK", "0")), ExitCode.OK, ""
    try:
        yield
    except BaseException as error:
        code, reason = code_of(error), str(error) or type(error).__name__
        raise
    finally:
        if rank == 0 or code not in (ExitCode.OK, ExitCode.LOST_PEER, ExitCode.TERMINATED, ExitCode.PREEMPTED):
            emit(RankEnded(rank=rank, code=code, host=socket.gethostname(), reason=reason))


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--launch", required=True, type=int)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    die_with_parent()
    record = RankRecord()
    configure_logging()
    leave = LeaveSignal()
    leave.listen()

    blames_node = False

    def body() -> None:
        nonlocal blames_node
        store, run_id, launch = open_store(arguments.store), arguments.run_id, arguments.launch
        told = recording(store, run_id, f"rank {os.environ.get('RANK', '0')}", launch=launch)
        try:
            with told, _ending_told(), noticing_lost_peers():  # of the collectives of training
                work(store, run_id, launch, leave, record.formed)
        except (BadReaderError, WrongArithmeticError) as error:
            blames_node = isinstance(error, WrongArithmeticError) or error.here
            raise

    code = exit_code_of(body)
    if leave.wanted and code not in (ExitCode.OK, PreemptedError.exit_code):
        code = ExitCode.TERMINATED if code == ExitCode.LOST_PEER else code
    record.ended(code, blames_node)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # process groups with a lost peer can block the interpreter's own way out


if __name__ == "__main__":
    main()
