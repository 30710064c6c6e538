"""One rank of the gang: it reads its launch, joins the gang, loads the newest state, and trains.

torchrun starts one on every accelerator. The launch's record in the store holds everything that a rank needs. A formed
gang claims an attempt. A gang that forms again under the same launch claims another one.
"""

import argparse
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy.ma  # noqa: F401 - numpy.median would, in each rank after it was forked
import torch
import torch._inductor.config  # use_deterministic_algorithms would import it in each rank after the fork

import holdfast.engines.torch.engine  # noqa: F401 - likewise build_engine
from holdfast.checkpoint import Attempt, Checkpointer, Retention, SaveOptions
from holdfast.code.resolve import enter_code
from holdfast.collectives import Gang, noticing_lost_peers
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.engines.mesh import Mesh
from holdfast.launch.device import device_name
from holdfast.launch.exits import RankRecord, reporting_end
from holdfast.launch.launches import LaunchRecord, read_launch
from holdfast.launch.processes import die_with_parent
from holdfast.rank.anomalies import Anomalies
from holdfast.rank.checkpoint_policy import CheckpointPolicy, failures_before, near_tiers, upload_rate
from holdfast.rank.hang_reporting import enable_watchdog
from holdfast.rank.health_gate import check_health
from holdfast.rank.loop import train
from holdfast.rank.measure.energy_meter import Meter
from holdfast.rank.measure.micro_batch import choose_micro_batch
from holdfast.rank.measure.phase_timer import PhaseTimeReporter
from holdfast.rank.measure.profile import Profiler
from holdfast.rank.measure.throughput import Throughput
from holdfast.rank.observers import BatchDigest, History, Observer, Progress, UserObserver
from holdfast.rank.plan import claim
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.randomness import make_deterministic
from holdfast.rank.row_source import row_source
from holdfast.rank.session import RankSession
from holdfast.rank.setup import (
    agree_on_plan,
    build,
    compare_stragglers,
    meet,
    throughput_of,
)
from holdfast.rank.shares import deal_by_speed
from holdfast.rank.state_loading import StateLoader
from holdfast.rank.step_evaluation import evaluation_of
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.exits import exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.spec import ExitCode
from holdfast.spec.errors import (
    BadReaderError,
    UnhealthyNodeError,
    WrongArithmeticError,
)
from holdfast.spec.functions import require_functions
from holdfast.store import Store, open_store
from holdfast.telemetry import emit, phases, recording
from holdfast.telemetry.channel import set_source
from holdfast.telemetry.events import AttemptBegan
from holdfast.telemetry.serving import showing_metrics
from holdfast.telemetry.trainer_status import reporting_trainer_status

log = logging.getLogger("holdfast.train")


def work(
    store: Store,
    run_id: str,
    launch: int,
    leave: PreemptionSignal,
    record: RankRecord | None = None,
    code: str | None = None,
    functions: str = "",
) -> None:
    """Run one rank of launch number `launch` until the run is trained, or until its trial of micro-batches is done.
    `record` receives the number of the attempt once the gang has formed. `code` and `functions` are those of the
    command line: user code that the rank may call."""
    phases.enter("start", 0)
    launched = read_launch(store, run_id, launch)
    spec = _assignment(launched, f"launch {launch} of run {run_id}", functions)
    enter_code(store, code)
    make_deterministic(spec.training.determinism, spec.parallel.threads)
    dataset = Dataset.open(store, spec.dataset_id, cache_dir())
    phases.enter("meet")
    if spec.micro_batch_candidates:
        _try_micro_batches(spec, dataset, store, launch, leave, record)
        return
    with ExitStack() as built:
        with leave.meeting():
            device, gang = meet(spec, leave)
            plan, spec = agree_on_plan(spec, device, gang), deal_by_speed(spec, device, gang)
            check_health(store, spec, device, gang, launch)
            claiming = partial(
                claim, store, spec.run_id, launch, gang.size, plan, spec.training.determinism, launched.replan
            )
            attempt = gang.from_rank_0(claiming, Attempt)
            engine = built.enter_context(closing(build(spec, dataset)))  # it may own files
        set_source(f"rank {gang.rank}", launch=launch, attempt=attempt.number, not_before=launched.claimed)
        if record is not None:
            record.formed(attempt.number)
        leave.raise_if_stopping("before the state was loaded")

        phases.enter("restore")
        loader = StateLoader(spec, dataset.vocabulary, engine, plan, launched.replan, store)
        frozen = loader.fill_frozen()
        checkpointer = Checkpointer(
            store,
            attempt,
            Retention.of(spec.checkpoint, spec.training.anomalies, spec.training.grpo),
            describe={
                "dataset_id": dataset.dataset_id,
                "layout": engine.layout,
                "base": _base(spec) if frozen else None,
                "random": {"scheme": "keyed by step", "seed": spec.training.seed},
            },
            plan=plan,
            options=SaveOptions(
                max_lag_steps=spec.checkpoint.lag_steps,
                same_bits=spec.training.determinism != "off",
                compress=spec.checkpoint.compression == "lossless",
                upload_rate=upload_rate(spec.checkpoint),
            ),
            gang=gang,
            near=near_tiers(store, attempt, gang, spec.checkpoint),
        )
        start = loader.restore(checkpointer)
        leave.raise_if_stopping(f"with the state of step {start} loaded")
        cadence = CheckpointPolicy(
            spec.checkpoint,
            start=start,
            steps=spec.last_step,
            gang=gang,
            failures=failures_before(store, attempt, gang.size) if gang.rank == 0 else None,
        )
        source = built.enter_context(row_source(spec, dataset, gang, engine, store))
        source.adopt(start, checkpointer.scalars)
        anomalies = Anomalies(
            spec.training.anomalies,
            device,
            checkpointer.scalars,
            go_back=partial(loader.rewind, checkpointer),
            where=source.where if gang.rank == 0 else None,
        )
        throughput = throughput_of(spec, dataset, device, gang) if gang.rank == 0 else None
        fed, meter = BatchDigest(gang, speaks=speaks(spec, gang)), Meter(device)
        history = History(
            spec,
            attempt,
            start,
            fed,
            keep=gang.rank == 0,
            throughput=throughput,
            on_anomaly=anomalies.report,
            meter=meter,
        )
        checkpointer.on_commit = history.committed
        observers: list[Observer] = [history, *compare_stragglers(spec, gang, source.rows)]
        observers += [] if throughput is None else [Progress(spec, history, start, throughput)]
        begun = (
            nullcontext()
            if throughput is None
            else _attempt_span(spec, attempt, gang.size, start, device, throughput, meter)
        )
        accounts, profiler = (
            PhaseTimeReporter(gang.rank, gang.size, start, device, meter),
            Profiler(store, attempt, active=gang.rank == 0),
        )
        observers += [accounts, profiler, *(map(UserObserver, spec.telemetry.observers) if gang.rank == 0 else ())]
        session = RankSession(
            spec,
            gang,
            engine,
            checkpointer,
            cadence,
            anomalies,
            observers,
            leave,
            source.answers,
            evaluation_of(
                spec, dataset, attempt, checkpointer, history.evaluated, gang=gang, store=store, loader=loader
            ),
        )
        # In-flight saves at the end hold a finite state that is equal on all replicas.
        with begun, accounts, profiler, closing(checkpointer), _leaving():
            if checkpointer.near_start is not None:  # no checkpoint yet
                checkpointer.save(start, engine.saved(), checkpointer.near_start.scalars)
            with source.steps(start, spec.last_step) as ahead:
                train(session, fed.record(ahead), start)
            if start == spec.last_step:  # an earlier attempt died between its last commit and the collection
                checkpointer.collect_garbage(start)
            checkpointer.drop_local_tiers()


def _try_micro_batches(
    spec: Assignment, dataset: Dataset, store: Store, launch: int, leave: PreemptionSignal, record: RankRecord | None
) -> None:
    """Try micro-batches in place of training. A stop request ends it immediately: there is nothing to save."""
    with leave.meeting():
        device, gang = meet(spec, leave)
        if record is not None:
            record.formed(0)
        choose_micro_batch(spec, dataset, device, gang, store, launch)


def _assignment(launched: LaunchRecord, source: str, functions: str) -> Assignment:
    """The assignment of a launch. Raises DataError if it names other `functions` of user code than the command line."""
    assignment = Assignment.recorded(launched.assignment, source)
    require_functions(assignment, functions, source)
    return assignment


@contextmanager
def _leaving() -> Iterator[None]:
    """Enter the `leave` phase when the context ends in any way. Staged copies are handed over next, and the process
    that ends this rank waits for that."""
    try:
        yield
    finally:
        phases.enter("leave")


@contextmanager
def _attempt_span(
    spec: Assignment,
    attempt: Attempt,
    world: int,
    start: int,
    device: torch.device,
    throughput: Throughput,
    meter: Meter,
) -> Iterator[None]:
    """Report that the attempt began, and serve its metrics where the spec enables that."""
    began = AttemptBegan(
        attempt=attempt.number,
        world=world,
        step=start,
        steps=spec.training.steps,
        host=socket.gethostname(),
        device=str(device),
        peak_flops=throughput.peak,
        mfu_unavailable=throughput.unknown,
        accelerator=device_name(device),
        energy_unavailable=meter.unknown,
        missing_metrics=meter.missing_metrics,
    )
    log.info("%s", began.text)
    if began.mfu_unavailable:
        log.info("no MFU: %s", began.mfu_unavailable)
    with showing_metrics(spec.telemetry, spec.run_id):
        emit(began)
        yield


def speaks(spec: Assignment, gang: Gang) -> bool:
    """Whether this rank reports its rows. Of ranks that receive the same rows, one does."""
    return spec.grid(gang.size) is not None or Mesh.of(spec.parallel, gang.size).counts(gang.rank)


@dataclass
class _RankProcess:
    """The process of a rank, and what it reports to its node when it ends."""

    store: str  # URL
    run_id: str
    launch: int
    leave: PreemptionSignal
    record: RankRecord
    code: str | None = None
    functions: str = ""
    blames_node: bool = False

    def run(self) -> None:
        """Train. Raises what `work` raises."""
        store = open_store(self.store)
        events = recording(store, self.run_id, f"rank {os.environ.get('RANK', '0')}", launch=self.launch)
        try:
            with events, reporting_trainer_status(), reporting_end(), noticing_lost_peers():  # of collectives
                work(store, self.run_id, self.launch, self.leave, self.record, self.code, self.functions)
        except (BadReaderError, WrongArithmeticError, UnhealthyNodeError) as error:
            self.blames_node = not isinstance(error, BadReaderError) or error.here
            raise


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--launch", required=True, type=int)
    parser.add_argument("--store", required=True)
    parser.add_argument("--code", help="digest of the bundle of user code")
    parser.add_argument("--functions", default="", metavar="JSON", help="functions of it that the rank may call")
    arguments = parser.parse_args()
    die_with_parent()
    configure_logging()
    leave = PreemptionSignal()
    record = RankRecord()
    enable_watchdog()
    leave.listen()
    process = _RankProcess(
        arguments.store,
        arguments.run_id,
        arguments.launch,
        leave,
        record,
        code=arguments.code,
        functions=arguments.functions,
    )
    code = exit_code_of(process.run)
    if leave.wanted and code == ExitCode.LOST_PEER:
        code = ExitCode.TERMINATED
    record.exit(code, process.blames_node)


if __name__ == "__main__":
    main()


def _base(spec: Assignment) -> dict[str, str] | None:
    """The place and digest of the weights that adapters belong to, for the manifest."""
    digest = spec.first_weights.partition("+")[0]
    return {"location": spec.model.init_from, "digest": digest} if spec.model.init_from else None
