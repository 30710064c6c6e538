"""One rank of the gang: reads its attempt, loads the newest state, trains.

torchrun starts it on every accelerator. Everything it needs to know stands in the store under its attempt.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from holdfast.components.checkpoint import Attempt, Checkpointer, Retention, TensorBox, load_newest
from holdfast.components.checkpoint.attempts import read_attempt
from holdfast.components.checkpoint.gang import Gang
from holdfast.components.dataset import Batches, Dataset, Prefetcher
from holdfast.components.launch.ending import expect_ending, record_ending
from holdfast.components.launch.orphan import die_with_parent
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.runtime.exits import exit_code_of
from holdfast.components.runtime.logs import configure_logging
from holdfast.components.spec import ExitCode, Spec, parse_spec
from holdfast.components.spec.errors import DivergedError, HoldfastError, LostPeerError, PreemptedError
from holdfast.components.store import Store, open_store
from holdfast.components.train.device import join_gang, local_device
from holdfast.components.train.engine import build_engine
from holdfast.components.train.leave import LeaveSignal
from holdfast.components.train.loop import train
from holdfast.components.train.observers import History, Observer, Progress
from holdfast.components.train.randomness import make_deterministic
from holdfast.components.train.weights import FirstState, ImportedState, SeededState

log = logging.getLogger("holdfast.train")

_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|peer|timed out|NCCL|remote process exited",
    re.I,
)


def work(store: Store, run_id: str, number: int, leave: LeaveSignal) -> None:
    """Be one rank of attempt `number` of a run until the run is trained."""
    details = read_attempt(store, run_id, number)
    spec, attempt = parse_spec(details["spec"], source="attempt"), Attempt(run_id, number)
    make_deterministic(spec.training.determinism, spec.parallel.threads)
    device = local_device(spec)
    dataset = Dataset.open(store, details["dataset_id"], cache_dir())
    with leave.meeting():
        join_gang(device, always=spec.parallel.engine == "deepspeed")
        leave.join()
        gang, savers = Gang(), Gang()
        engine = build_engine(spec, dataset.vocabulary, dataset.end_of_text)  # makes groups of its own
    expect_ending()
    start = 0

    def fill(boxes: Sequence[TensorBox]) -> int:
        nonlocal start
        manifest = load_newest(store, run_id, boxes, gang)
        if manifest is None:
            first_state(spec, dataset.vocabulary).fill(boxes)
            return 0
        checkpointer.adopt(manifest)
        start = manifest.step
        return start

    def on_commit(step: int) -> None:
        history.commit(store, run_id, step)

    checkpointer = Checkpointer(
        store,
        attempt,
        Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_every),
        describe={
            "dataset_id": dataset.dataset_id,
            "layout": engine.layout,
            "random": {"scheme": "keyed by step", "seed": spec.training.seed},
        },
        on_commit=on_commit,
        gang=savers,
    )
    engine.load(fill)
    history = History(spec, start, keep=gang.rank == 0)
    observers: list[Observer] = [history] + ([Progress(spec, history, start)] if gang.rank == 0 else [])
    if gang.rank == 0:
        log.info("attempt %d: %s from step %d of %d on %s x %d", number,
                 "starting" if start == 0 else "resuming", start, spec.training.steps, device, gang.size)  # fmt: skip
    try:
        training, rows = batches(spec, dataset, gang)
        with Prefetcher(training, rows, start, stop=spec.training.steps) as ahead:
            train(spec, engine, ahead, checkpointer, observers, leave)
        if start == spec.training.steps:  # an earlier attempt died between its last commit and the sweep after it
            checkpointer.sweep(start)
    except DivergedError:
        with suppress(HoldfastError):
            checkpointer.wait()  # the save in flight is of a state that was finite
        raise


def batches(spec: Spec, dataset: Dataset, gang: Gang) -> tuple[Batches, slice]:
    """The global batches, and which rows of each are this rank's."""
    weights = [source.weight for source in spec.data.sources]
    training = dataset.training(
        spec.model.context,
        spec.training.global_batch,
        spec.training.seed,
        weights=None if None in weights else [weight for weight in weights if weight is not None],
    )
    share = spec.training.global_batch // gang.size
    return training, slice(gang.rank * share, (gang.rank + 1) * share)


def first_state(spec: Spec, vocabulary: int) -> FirstState:
    """The state before the first step, as the spec wants it."""
    if spec.model.init_from is None:
        return SeededState(spec.model, spec.training.seed)
    return ImportedState(spec.model.init_from, spec.model, vocabulary)


def _explained(body: Callable[[], None]) -> None:
    """Run `body`; a collective that failed because another rank went away is raised as LostPeerError."""
    try:
        body()
    except HoldfastError:
        raise
    except (RuntimeError, torch.distributed.DistError) as error:
        network = isinstance(error, torch.distributed.DistError)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and (network or _PEER_LOST.search(str(error))):
            raise LostPeerError(f"another rank went away: {str(error).splitlines()[0][:300]}") from error
        raise


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    die_with_parent()
    configure_logging()
    leave = LeaveSignal()
    leave.listen()
    code = exit_code_of(
        lambda: _explained(lambda: work(open_store(arguments.store), arguments.run_id, arguments.attempt, leave))
    )
    if leave.wanted and code not in (ExitCode.OK, PreemptedError.exit_code):
        code = ExitCode.TERMINATED if code == ExitCode.LOST_PEER else code
    record_ending(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # process groups with a lost peer can block the interpreter's own way out


if __name__ == "__main__":
    main()
