"""The train step's own process: a thin launcher around the gang.

It records launches, starts the gang and restarts it within the budget, follows what the ranks tell, mirrors committed
metrics to MLflow, and when the last step is saved exports the model and writes the result. It never touches a tensor
while the gang runs.
"""

from __future__ import annotations

import json
import logging
import queue
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.components.checkpoint import Manifest, list_attempts, newest_segments, read_manifest, read_tensor
from holdfast.components.checkpoint.attempts import attempt_began
from holdfast.components.dataset import Dataset
from holdfast.components.launch import Ending, Job, Launcher, choose_launcher, supervise
from holdfast.components.launch.emitters import training_job
from holdfast.components.launch.launches import claim_launch, newest_launch, read_endings, record_ending
from holdfast.components.model.hugging_face import write_hugging_face
from holdfast.components.model.imported import weights_digest
from holdfast.components.model.initialise import parameter_count, parameter_shapes
from holdfast.components.runtime.environment import cache_dir, log_dir
from holdfast.components.spec import DATA_PLANE_VERSION, ExitCode, HoldfastError, Spec, run_id
from holdfast.components.spec.errors import PreemptedError, TerminatedError
from holdfast.components.spec.plan import Plan, require_plan, settings_of
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import emit, read_history, recorded_step
from holdfast.components.telemetry.event_log import StoreEvents
from holdfast.components.telemetry.events import LaunchBegan, PhaseProgress, SaveCommitted, show_in_argo
from holdfast.components.tracking import RunTracker
from holdfast.components.tracking.tracker import Status
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.result import TrainingResult, read_result

log = logging.getLogger("holdfast.train")

STEP = "train"
FOLLOW_SECONDS = 2.0  # between two looks at what the ranks tell
FAREWELL_SECONDS = 30.0  # to tell MLflow the end
BLAMES_TO_EXCLUDE = 2  # launches that a node may spoil before the next ones avoid it


class GangError(HoldfastError):
    """The gang ended and will not be started again by this process."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        try:
            self.exit_code = ExitCode(code)
        except ValueError:  # another signal, or a code that torch chose
            self.exit_code = ExitCode.KILLED if code >= 128 else ExitCode.UNEXPECTED


def train(spec: Spec, dataset_id: str, store: Store, salt: str = "", *, replan: bool = False) -> TrainingResult:
    """Bring the run that (spec, dataset_id, salt) names to its end, from wherever it is. With `replan` a person allows
    it to go on under another plan than before.

    Raises PlanChangedError when it would, and determinism promises bits; PreemptedError when asked to leave (SIGTERM,
    Ctrl-C), TerminatedError when the ranks left unsaved, and GangError, with the code of the ranks, when they fail for
    good or the restart budget is used up. Running it again goes on from the newest checkpoint.
    """
    weights = weights_digest(spec.model.init_from)
    identity = run_id(spec, dataset_id, salt, weights)
    launcher = choose_launcher(spec, log_dir(identity))
    with launcher.only_one(identity):
        finished = read_result(store, identity)
        if finished is not None:
            log.info("run %s: already trained, loss %.4f at step %d", identity, finished.loss, finished.step)
            return finished
        _require_held_out(spec, dataset_id, store)
        _require_plan(spec, identity, store, replan)
        _record_run(store, identity, spec, dataset_id, salt)
        tracker = RunTracker.open(spec, identity, dataset_id, store)
        events = StoreEvents(store, identity)
        last = max((event.time for event in events.new()), default=0.0)
        with _followed(events, tracker), recorded_step(store, identity, STEP, not_before=last) as ended:
            _run_gang(spec, Assignment.of(spec, identity, dataset_id, weights), store, launcher, replan)
            result = _finish(spec, identity, dataset_id, store)
            ended(f"loss {result.loss:.4f} at step {result.step}")
        log.info("run %s: trained, loss %.4f at step %d", identity, result.loss, result.step)
        return result


def _run_gang(spec: Spec, assignment: Assignment, store: Store, launcher: Launcher, replan: bool = False) -> None:
    identity, stopping = assignment.run_id, threading.Event()

    def next_job() -> Job:
        number = newest_launch(store, identity)
        if not (adopted := launcher.adopt(identity, number)):
            number = claim_launch(store, identity, assignment.model_dump(mode="json"), replan=replan)
        job = training_job(spec, identity, number, store.url, _bad_nodes(store, identity))
        nodes = spec.cluster.nodes.max
        emit(LaunchBegan(launch=number, job=job.name, nodes=nodes, processes=job.processes, adopted=adopted))
        return job

    def on_ending(job: Job, ending: Ending) -> None:
        blamed = sorted(ending.blamed_nodes)
        told = {"code": ending.code, "detail": ending.detail, "blamed_nodes": blamed, "ended": time.time()}
        record_ending(store, identity, job.launch, told)

    def stop() -> None:
        stopping.set()
        launcher.stop()

    with _signals(stop):
        ending = supervise(launcher, next_job, spec.cluster.restarts, stopping, on_ending)
    if ending.code == ExitCode.OK:
        return
    if stopping.is_set() and ending.retryable:
        stopped = PreemptedError if ending.code == ExitCode.PREEMPTED else TerminatedError
        raise stopped(
            f"run {identity}: stopped ({ending.reason}). {ending.detail}; run the same command again to go on"
        )
    raise GangError(_describe(ending, identity), ending.code)


def _bad_nodes(store: Store, identity: str) -> frozenset[str]:
    """The nodes that were blamed for the end of two launches."""
    blamed = Counter(node for ending in read_endings(store, identity).values() for node in ending["blamed_nodes"])
    return frozenset(node for node, times in blamed.items() if times >= BLAMES_TO_EXCLUDE)


def _describe(ending: Ending, identity: str) -> str:
    tail = "\n".join(f"    {line}" for line in ending.log_tail[-15:])
    return f"run {identity}: training ended ({ending.reason}). {ending.detail}; the end of the log:\n{tail}"


def _finish(spec: Spec, identity: str, dataset_id: str, store: Store) -> TrainingResult:
    """Export the final checkpoint and write the result: both are the same bytes whoever writes them."""
    manifest = read_manifest(store, identity, spec.training.steps)
    dataset = Dataset.open(store, dataset_id, cache_dir())
    _export(spec, manifest, dataset, store)
    attempts = [number for number, _ in list_attempts(store, identity)]
    result = TrainingResult(
        run_id=identity,
        dataset_id=dataset_id,
        step=manifest.step,
        loss=read_history(store, identity, after=manifest.step - 1)[-1]["loss"],
        tokens=manifest.step * spec.training.global_batch * spec.model.context,
        parameters=parameter_count(spec.model, dataset.vocabulary),
        checkpoint=layout.checkpoint(identity, manifest.step),
        export=layout.export(identity, manifest.step),
        state_digest=manifest.state_digest,
        segments=manifest.segments,
        attempts=len(attempts),
        seconds=time.time() - attempt_began(store, identity, attempts[0]),
    )
    store.put_if_absent(layout.result(identity), result.model_dump_json(indent=2).encode())
    return result


def _export(spec: Spec, manifest: Manifest, dataset: Dataset, store: Store) -> None:
    names = parameter_shapes(spec.model, dataset.vocabulary)
    tokenizer_json = dataset.tokenizer_json()
    with tempfile.TemporaryDirectory(prefix="holdfast-export-") as folder:
        files = write_hugging_face(
            Path(folder),
            spec.model,
            dataset.vocabulary,
            ((name, read_tensor(store, manifest, name)) for name in names),
            tokenizer_json=tokenizer_json,
            end_of_text=spec.data.tokenizer.end_of_text,
        )
        for count, name in enumerate(files):
            emit(PhaseProgress(phase="export", done=count, total=len(files)))
            store.upload(Path(folder) / name, layout.export(manifest.run_id, manifest.step, name))


def _require_held_out(spec: Spec, dataset_id: str, store: Store) -> None:
    """Raises DataError, before anything is spent, when there is too little text to evaluate the model on."""
    Dataset.open(store, dataset_id, cache_dir()).validation(spec.model.context, spec.evaluation.max_tokens)


def _require_plan(spec: Spec, identity: str, store: Store, replan: bool) -> None:
    """Raises PlanChangedError for what the spec alone shows of a plan that the run may not go on under, before a gang
    is started. The ranks look at the rest."""
    if not (segments := newest_segments(store, identity)):
        return
    before, nodes = segments[-1].plan, spec.cluster.nodes
    settings = settings_of(spec.training, spec.parallel, spec.cluster.accelerator, nodes.max)
    if nodes.min < nodes.max:  # as many as there will be
        settings["cluster.nodes"] = before.settings["cluster.nodes"]
    expected = Plan(settings=settings, surroundings=before.surroundings)
    require_plan(segments, expected, spec.training.determinism, replan)


def _record_run(store: Store, identity: str, spec: Spec, dataset_id: str, salt: str) -> None:
    record = {
        "run_id": identity,
        "name": spec.name,
        "dataset_id": dataset_id,
        "salt": salt,
        "data_plane_version": DATA_PLANE_VERSION,
        "created": time.time(),
        "spec": spec.model_dump(mode="json"),
    }
    store.put_if_absent(layout.run(identity, "run.json"), json.dumps(record, indent=2).encode())


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C stop the gang with a checkpoint, in the main thread; elsewhere they stay the caller's.

    `stop` runs in a thread of its own: a handler runs between any two bytecodes, so it must not take a lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def stop_when_asked() -> None:
        while arrived.get():
            stop()

    thread = threading.Thread(target=stop_when_asked, name="signals", daemon=True)
    thread.start()
    former = {number: signal.signal(number, lambda *_: arrived.put(True)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        arrived.put(False)
        thread.join()


@contextmanager
def _followed(events: StoreEvents, tracker: RunTracker) -> Iterator[None]:
    """Pass on what the ranks tell: to the log, to Argo, and at each checkpoint to MLflow, which hears how the run ended
    too."""
    done = threading.Event()
    status: Status = "FAILED"

    def follow() -> None:
        _try_to(tracker.begin)  # while the ranks start, so that no step shares its cores with the import of MLflow
        _try_to(tracker.sync)
        while True:
            last = done.wait(FOLLOW_SECONDS)
            if _pass_on(events):
                _try_to(tracker.sync)
            if last:
                break
        _try_to(lambda: tracker.finish(status))

    thread = threading.Thread(target=follow, name="events-of-ranks", daemon=True)
    thread.start()
    try:
        yield
        status = "FINISHED"
    except (PreemptedError, TerminatedError):
        status = "KILLED"
        raise
    finally:
        done.set()
        thread.join(FAREWELL_SECONDS)
        if thread.is_alive():
            log.warning("MLflow does not answer; what it misses is safe in the store, and the next step copies it")


def _pass_on(events: StoreEvents) -> bool:
    """Whether a checkpoint is among the new events of the ranks, of which the log and Argo are told."""
    saved = False
    try:
        for event in events.new():
            if event.source != STEP:
                log.log(logging.WARNING if event.is_news else logging.INFO, "%s", event.text)
                show_in_argo(event)
            saved |= isinstance(event, SaveCommitted)
    except HoldfastError as error:  # the next look finds what this one misses
        log.debug("the events of the ranks cannot be read: %s", error)
    return saved


def _try_to(mirror: Callable[[], object]) -> None:
    """A mirror that fails must not change how a run ends."""
    try:
        mirror()
    except Exception as error:  # noqa: BLE001 - said, and the store has the truth
        log.warning("metrics are not copied to MLflow: %s", error)
