"""One rank of a replay: computes steps of a run again from a checkpoint, and records the results.

`audit.replay_job` starts as many ranks as the run had. A rank reads the run's store and writes only a reader's mark
there. It claims no attempt and saves no state. It runs the training loop, with a state digest after every step.
"""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from holdfast.audit.rank_arguments import replay_parser
from holdfast.audit.token_losses import TokenLosses
from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.reader import require_state
from holdfast.code.resolve import enter_code
from holdfast.collectives import Gang, noticing_lost_peers
from holdfast.dataset import Dataset, Prefetcher
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Scalars, build_engine
from holdfast.engines.weights import require_left_out_taken
from holdfast.launch.device import join_gang, local_device
from holdfast.launch.exits import RankRecord
from holdfast.launch.launches import read_launch
from holdfast.launch.processes import die_with_parent
from holdfast.rank.anomalies import Anomalies
from holdfast.rank.loop import train
from holdfast.rank.observers import BatchDigest, FinishedStep
from holdfast.rank.plan import plan_of, require_one_plan, require_recorded_plan
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.randomness import make_deterministic
from holdfast.rank.session import RankSession
from holdfast.rank.setup import batches
from holdfast.rank.state_loading import first_state
from holdfast.rank.step_evaluation import StepEvaluation, recorded_loss
from holdfast.rank.worker import speaks
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.exits import exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.script.replay import Replay
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.functions import require_functions
from holdfast.spec.plan import Plan
from holdfast.store import Store, open_store


def replay(
    store: Store,
    run_id: str,
    launch: int,
    steps: Replay,
    losses: Path | None = None,
) -> None:
    """Compute the steps as `launch` did, and write a row for each. Write the token losses of the last step
    into the folder `losses`, if given, whose objective is the next-token loss.

    Raises PlanChangedError if this machine computes differently from the plan of `steps`, and DataError if the
    checkpoint at its start does not have its state digest.
    """
    start, last = steps.start, steps.last
    assignment = Assignment.recorded(read_launch(store, run_id, launch).assignment, f"launch {launch} of run {run_id}")
    spec = assignment.model_copy(update={"checkpoint": assignment.checkpoint.model_copy(update={"digest_every": 1})})
    make_deterministic(spec.training.determinism, spec.parallel.threads)
    device = local_device(spec.accelerator)
    dataset = Dataset.open(store, spec.dataset_id, cache_dir())
    join_gang(device, always=spec.needs_group, timeout_minutes=spec.collective_timeout_minutes)
    leave, gang = PreemptionSignal(), Gang()
    leave.join()
    here = plan_of(spec, device)
    require_one_plan(gang.all_gather(here, Plan), spec.training.determinism)
    if steps.plan is not None:
        require_recorded_plan(steps.plan, here)
    token_losses = None if losses is None else TokenLosses()
    with closing(build_engine(spec, dataset.vocabulary, dataset.separator, token_losses)) as engine:
        first = cache(lambda: first_state(spec, dataset.vocabulary, store))
        for box in engine.frozen():
            first().fill([box])

        evaluation: StepEvaluation | None = None

        def go_back(step: int) -> Scalars:
            scalars: Scalars = {}
            with ExitStack() as reading:
                if step:
                    checkpoint = open_checkpoint(store, run_id, step)
                    reading.enter_context(checkpoint.marked())
                    if step == start:
                        require_state(checkpoint.manifest, steps.state_digest)
                    checkpoint.fill(boxes := engine.boxes())
                    require_left_out_taken(checkpoint.tensors, boxes)
                    scalars = checkpoint.manifest.scalars
                else:
                    first().fill(engine.boxes())
            engine.restored(step, scalars)
            if evaluation is not None:
                evaluation.restored(scalars)
            return scalars

        scalars_of_start = go_back(start)
        anomalies = Anomalies(spec.training.anomalies, device, scalars_of_start, go_back=go_back)
        if spec.evaluation is not None:
            evaluation = StepEvaluation(spec.evaluation, partial(recorded_loss, store, run_id), scalars_of_start)
        fed = BatchDigest(gang, speaks=speaks(spec, gang))
        training, rows = batches(spec, dataset, gang)
        nothing = _NoCheckpoints()
        with steps.results.open("a", encoding="utf-8") as file, Prefetcher(training, rows, start, stop=last) as ahead:
            rows_of = _Recorder(file if gang.rank == 0 else None, fed, BatchSizes.of(spec.training), spec.model.context)
            session = RankSession(spec, gang, engine, nothing, nothing, anomalies, [rows_of], leave, None, evaluation)
            train(session, fed.record(ahead), start)
        if token_losses is not None and losses is not None:
            token_losses.write(losses, spec, gang, training.sizes.size(last - 1))


class _NoCheckpoints:
    """A stand-in for the loop's checkpointer and checkpoint policy. It saves nothing."""

    def due(self, step: int) -> bool:  # noqa: ARG002
        """See CheckpointPolicy."""
        return False

    near_due = due

    def save(self, *_: object, **__: object) -> None:
        """See Checkpointer. A rewind loads the checkpoints of the run itself."""

    def wait_for_staging(self) -> None:
        """See Checkpointer."""

    wait = saved = wait_for_staging


class _Recorder:
    """Writes each step as the history has it, on rank 0."""

    def __init__(self, file: Any, fed: BatchDigest, sizes: BatchSizes, context: int) -> None:
        self._file, self._batch_digest, self._sizes, self._context = file, fed, sizes, context

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        samples = self._batch_digest.flush()[finished.step]
        if self._file is None:
            return
        row = {
            "step": finished.step,
            "loss": figure(finished.output.loss),
            "grad_norm": figure(finished.output.grad_norm),
            "learning_rate": finished.learning_rate,
            "tokens": self._sizes.before(finished.step) * self._context,
            "samples": samples,
            "state_digest": finished.digest,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}


def figure(value: torch.Tensor) -> float | None:
    """A number as the history has it: None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def main() -> None:
    """Entry point of a rank."""
    parser = replay_parser(__doc__)
    parser.add_argument("--code")
    parser.add_argument("--functions", default="")
    parser.add_argument("--losses", type=Path)
    options = parser.parse_args()
    die_with_parent()
    record = RankRecord()
    configure_logging()

    def body() -> None:
        plan = None if options.plan is None else Plan.model_validate_json(options.plan.read_bytes())
        with noticing_lost_peers():
            store = open_store(options.root)
            source = f"launch {options.launch} of run {options.of}"
            assignment = Assignment.recorded(read_launch(store, options.of, options.launch).assignment, source)
            require_functions(assignment, options.functions, source)
            enter_code(store, options.code)
            steps = Replay(options.from_step, options.to_step, options.results, options.state_digest, plan)
            replay(store, options.of, options.launch, steps, options.losses)

    record.exit(exit_code_of(body))


if __name__ == "__main__":
    main()
