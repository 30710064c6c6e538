"""The train step's process: a thin launcher around the gang.

It records launches, starts the gang, and restarts it within the budget. It forwards the ranks' events and mirrors
committed metrics to MLflow. After the last save it exports the model and writes the result. It touches no tensor while
the gang runs.
"""

import logging
import threading
import time

from pydantic import BaseModel

from holdfast.checkpoint import list_attempts, newest_segments, read_manifest
from holdfast.checkpoint.attempts import attempt_began
from holdfast.checkpoint.lineage import newest_step
from holdfast.components.train.auto_layout import ran_out_of_memory, recovery_advice, resolve_layout
from holdfast.components.train.export import export
from holdfast.components.train.following import STEP, recorded_training
from holdfast.components.train.result import TrainingResult, read_result
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.engines.groups import require_groups
from holdfast.launch import GangExit, Job, Launcher, Supervisor, choose_launcher
from holdfast.launch.emitters import training_job
from holdfast.launch.exits import LaunchExit
from holdfast.launch.interface import UNSAVED
from holdfast.launch.launches import (
    avoided_nodes,
    claim_launch,
    leaving_nodes,
    newest_launch,
    nodes_of_the_last_end,
    read_launch,
    record_exit,
    was_reclaimed,
)
from holdfast.launch.micro_batch import find_choice, with_recorded_micro_batch
from holdfast.model.exported import require_intact
from holdfast.model.hub import first_weights_digest
from holdfast.model.initialise import parameter_count
from holdfast.planning.auto import micro_batch_candidates, next_plan, with_micro_batch
from holdfast.rank.health_gate import health_check_request
from holdfast.runtime.environment import cache_dir, in_step_pod, log_dir
from holdfast.runtime.exits import request_shutdown
from holdfast.runtime.signals import stopping_on_signals
from holdfast.scoring import require_tasks
from holdfast.scoring.evaluations import StepScores, best_step, find_scores, scores_of_pause
from holdfast.script.assignment import ScriptAssignment
from holdfast.spec import ExitCode, HoldfastError, Spec, run_id
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import DivergedError, MissingError, PreemptedError, SpecError, TerminatedError
from holdfast.spec.plan import Plan, require_plan, settings_of
from holdfast.spec.tree import require_trackers
from holdfast.store import Store, layout
from holdfast.telemetry import emit, read_events, read_history, recorded_step
from holdfast.telemetry.events import LaunchBegan
from holdfast.telemetry.run_metadata import write_run_metadata
from holdfast.tracking import require_usable

log = logging.getLogger("holdfast.train")

_TORCHRUN = "torch/distributed/elastic/multiprocessing"  # its lines repeat the exit code of a rank


class GangError(HoldfastError):
    """The gang ended, and this process does not start it again."""

    tried_again = True  # within `cluster.restarts`

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        try:
            self.exit_code = ExitCode(code)
        except ValueError:  # another signal, or a code that torch chose
            self.exit_code = ExitCode.KILLED if code >= 128 else ExitCode.UNEXPECTED


def train(spec: Spec, dataset_id: str, store: Store, salt: str = "", *, replan: bool = False) -> TrainingResult:
    """Train the run of (spec, dataset_id, salt) to its last step, from its newest checkpoint.

    `replan` allows the run to continue under a different plan. `parallel: auto` uses the recorded layout, or plans one.
    `training.micro_batch: auto` uses the recorded choice, or begins with a trial.

    Raises:

    - PlanChangedError if the plan differs, determinism promises bits, and `replan` is false.
    - PreemptedError on SIGTERM or Ctrl-C. TerminatedError if the ranks exited without a save.
    - GangError with the exit code of the ranks, for a permanent failure or a used-up restart budget.

    A repeated call continues from the newest checkpoint.
    """
    weights = first_weights_digest(spec)
    identity = run_id(spec, dataset_id, salt, weights)
    launcher = choose_launcher(spec, log_dir(identity))
    with launcher.only_one(identity):
        finished = read_result(store, identity)
        if finished is not None:
            log.info("run %s: already trained, loss %.4f at step %d", identity, finished.loss, finished.step)
            return _with_export(spec, finished, store)
        planned, dataset = _planned(spec, dataset_id, store, identity, launcher, weights, salt=salt, replan=replan)
        with recorded_training(planned, identity, dataset_id, store) as ended:
            assignment = Assignment.of(planned, identity, dataset_id, weights)
            auto, vocabulary = spec.parallel.auto, dataset.vocabulary
            run_gang(planned, assignment, store, launcher, replan, auto=auto, vocabulary=vocabulary)
            result = _finish(planned, assignment, store)
            ended(f"loss {result.loss:.4f} at step {result.step}")
        log.info("run %s: trained, loss %.4f at step %d", identity, result.loss, result.step)
        return result


def train_until(
    spec: Spec, dataset_id: str, store: Store, salt: str = "", *, until: int, replan: bool = False
) -> StepScores:
    """Train the run of (spec, dataset_id, salt) up to step `until`, and measure the held-out loss there.

    The learning rate and the batches are those of the whole run, which `train` continues from this checkpoint. A run
    that has passed `until` without a score there is measured at its newest checkpoint. Raises what `train` raises.
    """
    weights = first_weights_digest(spec)
    identity = run_id(spec, dataset_id, salt, weights)
    launcher = choose_launcher(spec, log_dir(identity))
    with launcher.only_one(identity):
        reached = max(until, newest_step(store, identity) or 0)
        known = scores_of_pause(store, identity, (until, reached), spec.evaluation.max_tokens)
        if known is not None:
            log.info("run %s: already measured at step %d", identity, known.step)
            return known
        planned, dataset = _planned(spec, dataset_id, store, identity, launcher, weights, salt=salt, replan=replan)
        with recorded_training(planned, identity, dataset_id, store) as ended:
            assignment = Assignment.of(planned, identity, dataset_id, weights).paused(reached, planned.evaluation)
            auto, vocabulary = spec.parallel.auto, dataset.vocabulary
            run_gang(planned, assignment, store, launcher, replan, auto=auto, vocabulary=vocabulary)
            if (scores := find_scores(store, identity, reached)) is None:
                raise MissingError(f"run {identity}: step {reached} has no score; run the same command again")
            ended(f"paused at step {reached}")
        log.info("run %s: paused at step %d, held-out loss %s", identity, reached, scores.loss)
        return scores


def _planned(
    spec: Spec,
    dataset_id: str,
    store: Store,
    identity: str,
    launcher: Launcher,
    weights: str,
    *,
    salt: str,
    replan: bool,
) -> tuple[Spec, Dataset]:
    """The spec of a run with its layout and its micro-batch, checked before a gang starts, and the dataset."""
    dataset = Dataset.open(store, dataset_id, cache_dir())
    _require_evaluation(spec, dataset)
    require_groups(spec.model, dataset.vocabulary, spec.training)
    require_trackers(spec)
    require_usable(spec)  # fail here, before any cost, if registration would always be refused
    planned = resolve_layout(spec, identity, store, dataset.vocabulary, replan=replan)
    write_run_metadata(store, identity, spec, dataset_id, salt, weights)
    if (resolved := with_recorded_micro_batch(planned, identity, store, replan=replan)) is None:
        resolved = _try_micro_batches(planned, identity, dataset, store, launcher, replan=replan)
    _require_plan(resolved, identity, store, replan)
    return resolved, dataset


def _try_micro_batches(
    spec: Spec, identity: str, dataset: Dataset, store: Store, launcher: Launcher, *, replan: bool
) -> Spec:
    """Launch the gang for a trial of micro-batches. Returns the spec with the choice. Raises what `run_gang` raises."""
    candidates = micro_batch_candidates(spec, dataset.vocabulary, here=not in_step_pod())
    log.info("micro_batch: auto: a trial of %s", ", ".join(map(str, candidates)))
    smallest = with_micro_batch(spec, candidates[0])
    trial = Assignment.of(smallest, identity, dataset.dataset_id).model_copy(
        update={"micro_batch_candidates": candidates}
    )
    last = max((event.time for event in read_events(store, identity)), default=0.0)
    with recorded_step(store, identity, STEP, not_before=last) as ended:
        run_gang(smallest, trial, store, launcher, replan, vocabulary=dataset.vocabulary)
        choice = find_choice(store, identity, spec)
        if choice is None:
            raise MissingError(f"run {identity}: the trial of micro-batches left no choice; run the same command again")
        ended(f"micro-batch {choice.words}")
    return with_micro_batch(spec, choice.micro_batch)


def run_gang(
    spec: Spec,
    assignment: Assignment | ScriptAssignment,
    store: Store,
    launcher: Launcher,
    replan: bool = False,
    *,
    auto: bool = False,
    vocabulary: int | None = None,
) -> None:
    """Launch the gang until it has trained the run. Without a `vocabulary`, there is no advice after a lack of memory.
    Raises GangError, PreemptedError, TerminatedError."""
    identity, stopping, running = assignment.run_id, threading.Event(), threading.Event()
    was_running: list[bool] = []  # whether a launch ran, at each stop request
    advice = ""  # of the last launch, if it ran out of memory

    def next_job() -> Job:
        number = newest_launch(store, identity)
        if number and isinstance(assignment, Assignment) and not _has_same_end(store, number, assignment):
            number = 0
        if not (adopted := launcher.adopt(identity, number)):
            checked: BaseModel = assignment
            if isinstance(assignment, Assignment):
                health = health_check_request(spec, nodes_of_the_last_end(store, identity))
                checked = assignment.model_copy(update=health)
            number = claim_launch(store, identity, checked.model_dump(mode="json"), replan=replan)
        avoided = avoided_nodes(store, identity, spec.cluster)
        leaving = leaving_nodes(store, identity, spec.cluster)
        job = training_job(spec, identity, number, store.url, avoided, leaving)
        nodes = spec.cluster.nodes.max
        emit(LaunchBegan(launch=number, job=job.name, nodes=nodes, processes=job.processes, adopted=adopted))
        running.set()
        return job

    def on_gang_exit(job: Job, ending: GangExit) -> None:
        nonlocal advice
        running.clear()
        advice, ran_out, plan = "", False, None
        if vocabulary is not None and ran_out_of_memory(ending):
            try:
                proposal = next_plan(spec, vocabulary, here=not in_step_pod())
            except (SpecError, MissingError) as error:  # advice does not change how a launch ended
                log.warning("launch %d ran out of memory, and no next plan can be proposed: %s", job.launch, error)
            else:
                ran_out, plan = True, None if proposal is None else dict(proposal.fields)
                advice = recovery_advice(proposal, auto=auto, saved=saved_step() > 0)
                log.warning("launch %d ran out of memory: %s", job.launch, advice)
        ended = LaunchExit(
            code=ending.code,
            detail=ending.detail,
            blamed_nodes=tuple(sorted(ending.blamed_nodes)),
            ended=time.time(),
            ran_out=ran_out,
            next_plan=plan,
        )
        record_exit(store, identity, job.launch, ended)

    def saved_step() -> int:
        return newest_step(store, identity) or 0

    def reclaimed(job: Job) -> bool:
        return spec.cluster.spot is not None and was_reclaimed(store, identity, job.launch)

    def stop() -> None:
        stopping.set()
        was_running.append(running.is_set())
        launcher.stop()
        request_shutdown()

    with stopping_on_signals(stop):
        ending = Supervisor(
            launcher, next_job, spec.cluster.restarts, stopping, on_gang_exit, saved_step, reclaimed=reclaimed
        ).run()
    if ending.code == ExitCode.OK:
        return
    if stopping.is_set() and ending.retryable:
        stopped = PreemptedError if ending.code == ExitCode.PREEMPTED else TerminatedError
        detail = f"{ending.detail}{_unsaved(spec, ending, was_running)}"
        raise stopped(f"run {identity}: stopped ({ending.reason}). {detail}; run the same command again to resume")
    raise GangError(_describe(ending, identity, advice), ending.code)


def _unsaved(spec: Spec, ending: GangExit, was_running: list[bool]) -> str:
    """The setting that a stopped gang would have needed for its save; empty if it did not stop so."""
    needs_time = ending.code == ExitCode.KILLED and any(was_running)
    return f"; {UNSAVED} = {spec.checkpoint.grace_seconds:g}" if needs_time else ""


def _has_same_end(store: Store, launch: int, assignment: Assignment) -> bool:
    """Whether a launch ends where this assignment ends. A trial of micro-batches is not adopted as a training, nor a
    training up to one step as one up to another step."""
    other = read_launch(store, assignment.run_id, launch).assignment
    is_trial = bool(other.get("micro_batch_candidates"))
    return is_trial == bool(assignment.micro_batch_candidates) and other.get("pause_at") == assignment.pause_at


def _describe(ending: GangExit, identity: str, advice: str) -> str:
    lines = [line for line in ending.log_tail if _TORCHRUN not in line]
    tail = "\n".join(f"    {line}" for line in lines[-15:])
    detail = ". ".join(filter(None, (ending.detail, advice)))
    return f"run {identity}: training ended ({ending.reason}). {detail}; the end of the log:\n{tail}"


def _finish(spec: Spec, assignment: Assignment, store: Store) -> TrainingResult:
    """Export the final checkpoint and write the result. Every writer produces the same bytes."""
    identity, dataset_id = assignment.run_id, assignment.dataset_id
    manifest = read_manifest(store, identity, _final_step(spec, identity, store))
    dataset = Dataset.open(store, dataset_id, cache_dir())
    export_digest = export(spec, manifest, dataset, store)
    attempts = [number for number, _ in list_attempts(store, identity)]
    result = TrainingResult(
        run_id=identity,
        dataset_id=dataset_id,
        step=manifest.step,
        loss=_last_loss(store, identity, manifest.step),
        tokens=BatchSizes.of(spec.training).before(manifest.step) * spec.model.context,
        parameters=parameter_count(spec.model, dataset.vocabulary),
        checkpoint=layout.checkpoint(identity, manifest.step),
        export=layout.export(identity, manifest.step, manifest.state_digest),
        export_digest=export_digest,
        state_digest=manifest.state_digest,
        segments=manifest.segments,
        attempts=len(attempts),
        seconds=time.time() - attempt_began(store, identity, attempts[0]),
        first_weights=assignment.first_weights,
    )
    store.put_if_absent(layout.result(identity), result.model_dump_json(indent=2).encode())
    return result


def _final_step(spec: Spec, identity: str, store: Store) -> int:
    """The step of the checkpoint that a trained run results in: the last one, or the best one of its evaluations."""
    evaluation, last = spec.evaluation, spec.training.steps
    if evaluation.every_steps is None or not evaluation.decides:
        return last
    if evaluation.stop_after is not None:
        last = newest_step(store, identity) or last
    best = best_step(store, identity, evaluation.every_steps, last) if evaluation.keep_best else None
    return best or last


def _with_export(spec: Spec, finished: TrainingResult, store: Store) -> TrainingResult:
    """The result of a finished run, with its exported model. Deleted export files are written again. Raises DataError
    that names damaged files."""
    try:
        require_intact(store, finished.export, finished.export_digest, changed=True)
        return finished
    except MissingError as error:
        log.warning("%s: writing the export anew", error)
    manifest = read_manifest(store, finished.run_id, finished.step)
    digest = export(spec, manifest, Dataset.open(store, finished.dataset_id, cache_dir()), store)
    if digest != finished.export_digest:
        log.warning("run %s: the export is another one than before, and has to be judged anew", finished.run_id)
        finished = finished.model_copy(update={"export_digest": digest})
        store.put(layout.result(finished.run_id), finished.model_dump_json(indent=2).encode())
    return finished


def _last_loss(store: Store, identity: str, step: int) -> float:
    """The loss of the last step that has one. A step whose update was held back may have none. Raises DivergedError if
    no step has a finite loss."""
    for after in (step - 1, 0):
        for row in reversed(read_history(store, identity, after=after)):
            if row["loss"] is not None and row["step"] <= step:
                return float(row["loss"])
    raise DivergedError(f"run {identity}: no step had a finite loss. Lower training.optimizer.learning_rate")


def _require_evaluation(spec: Spec, dataset: Dataset) -> None:
    """Check before any cost that the model can be evaluated. Raises DataError or MissingError without enough validation
    text or without a task's file."""
    if spec.data.kind == "prompts":
        dataset.prompts("validation")
    else:
        dataset.validation(spec.model.context, spec.evaluation.max_tokens)
    require_tasks(spec.evaluation.tasks, spec.model.context)


def _require_plan(spec: Spec, identity: str, store: Store, replan: bool) -> None:
    """Raises PlanChangedError, before a gang starts, if the spec alone shows a plan that the run may not continue
    under. The ranks check the rest."""
    if not (segments := newest_segments(store, identity)):
        return
    before, nodes = segments[-1].plan, spec.cluster.nodes
    settings = settings_of(spec.training, spec.parallel, spec.cluster.accelerator, nodes.max)
    if nodes.min < nodes.max:  # the gang's size is not known yet
        settings["cluster.nodes"] = before.settings["cluster.nodes"]
    expected = Plan(settings=settings, surroundings=before.surroundings, free=before.free)
    require_plan(segments, expected, spec.training.determinism, replan)
