"""A run in a store: its status, records, logs and evaluation, and how to stop and resume it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.submission import Location, Stopped, find_backend, open_store_at, resume, stop
from holdfast.spec import Spec
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout

if TYPE_CHECKING:
    from holdfast.components.train.result import TrainingResult
    from holdfast.corpus.batch import Batch
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.fork import ForkedRun
    from holdfast.pipelines.view.rollouts import Rollouts
    from holdfast.pipelines.view.run_record import RunRecord
    from holdfast.scoring.verdict import Verdict
    from holdfast.telemetry.cost import Cost
    from holdfast.telemetry.events import Event
    from holdfast.telemetry.ledger import Ledger


Progress = Callable[[int, int], None]  # receives the bytes read so far and their total


def silent(_done: int, _total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of a run."""

    step: int  # optimizer steps done
    attempt: int  # the attempt that committed it
    created: float  # unix seconds
    state_digest: str  # over all weights and optimizer state; equal for equal bits in any layout
    key: str  # key of its manifest in the store


@dataclass(frozen=True)
class Report:
    """The report of an evaluation. `html` is the page, and a notebook displays it."""

    html: str

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{_quoted(self.html)}" width="100%" height="640" style="border:0"></iframe>'


class Run:
    """A run in a store, submitted to any backend. It caches nothing: every call reads the current state."""

    def __init__(self, run_id: str, store: str | Store = "") -> None:
        """Find the run whose id begins with `run_id`, or the newest run with that name.

        `store` is a URL or a folder; empty: the default store. Raises MissingError.
        """
        from holdfast.pipelines.view.catalog import find_run

        self._store = open_store_at(store)
        record = find_run(self._store, run_id)
        self.id, self.name = record.run_id, record.name

    @classmethod
    def _of(cls, store: Store, record: RunRecord) -> Run:
        """Wrap a record that is already read."""
        run = cls.__new__(cls)
        run._store, run.id, run.name = store, record.run_id, record.name
        return run

    def __repr__(self) -> str:
        return f"Run({self.id!r}, name={self.name!r}, store={self._store.url!r})"

    @property
    def store(self) -> Store:
        """The store that holds the run."""
        return self._store

    def status(self) -> RunStatus:
        """The status from its backend: state, steps and a link."""
        backend, backend_id = self._backend()
        return backend.status(backend_id)

    def wait(self, poll_seconds: float = 5.0) -> RunStatus:
        """Wait until the run has ended. Polls every `poll_seconds`."""
        while (status := self.status()).unfinished:
            time.sleep(poll_seconds)
        return status

    def logs(
        self,
        step: str = "",
        *,
        rank: int | None = None,
        attempt: int | None = None,
        launch: int | None = None,
        follow: bool = False,
        raw: bool = False,
    ) -> Iterator[str]:
        """Yield the log lines of its steps, or only those of `step`.

        `follow` continues until the run has ended. `raw` yields everything that the backend has. `rank` selects the
        output of one training rank, live or after its end: in `attempt`, in `launch`, or in the rank's newest process.
        """
        if rank is not None or attempt is not None or launch is not None:
            from holdfast.pipelines.backends.step_logs import is_active, rank_lines

            running = (lambda: is_active(*self._backend())) if follow else None
            return rank_lines(self._store, self.id, rank or 0, attempt=attempt, launch=launch, running=running)
        if raw:
            backend, backend_id = self._backend()
            return (line for _, line in backend.logs(backend_id, step, follow=follow))
        from functools import cache

        from holdfast.pipelines.backends.record import find_record
        from holdfast.pipelines.backends.step_logs import step_lines

        record = find_record(self._store, self.id)
        return (line for _, line in step_lines(self._store, record, cache(self._backend), step, follow=follow))

    def stop(self) -> Stopped:
        """Ask the run to save and stop. Of an ended run, end the jobs that it left on its cluster."""
        return stop(self.id, at=self._location)

    def resume(self, *, replan: bool = False, backend: str = "") -> RunStatus:
        """Resume the run from its newest checkpoint, where it was submitted or on another backend.

        On this machine, run it to the end.
        """
        return resume(self.id, at=replace(self._location, backend=backend), replan=replan).run

    def history(self) -> list[dict[str, Any]]:
        """One row for each committed step: step, loss [nats per token], grad_norm, learning_rate, tokens and more.

        `pandas.DataFrame` accepts the rows.
        """
        from holdfast.telemetry import read_history

        return read_history(self._store, self.id)

    def events(self) -> list[Event]:
        """Its events, oldest first: launches, attempts, saves, endings."""
        from holdfast.telemetry import read_events

        return read_events(self._store, self.id)

    def checkpoints(self) -> list[Checkpoint]:
        """The retained checkpoints, oldest first."""
        from holdfast.checkpoint import read_manifest
        from holdfast.checkpoint.retention import checkpoint_steps

        manifests = [read_manifest(self._store, self.id, step) for step in checkpoint_steps(self._store, self.id)]
        return [
            Checkpoint(
                manifest.step,
                manifest.attempt,
                manifest.created,
                manifest.state_digest,
                layout.checkpoint(self.id, manifest.step),
            )
            for manifest in manifests
        ]

    def result(self) -> TrainingResult | None:
        """The final checkpoint and export; None while the run trains."""
        from holdfast.components.train.result import read_result

        return read_result(self._store, self.id)

    def verdict(self) -> Verdict | None:
        """The newest verdict on its model; None without an evaluation."""
        from holdfast.pipelines.view.run_record import read_run
        from holdfast.scoring.verdict import Verdict

        record = read_run(self._store, self.id)
        return Verdict.model_validate(record.verdict) if record and record.verdict else None

    def report(self) -> Report:
        """The report of its newest evaluation. Raises MissingError without one."""
        from holdfast.pipelines.view.run_record import read_run

        record = read_run(self._store, self.id)
        if record is None or not record.verdict_key:
            raise MissingError(f"run {self.id}: is not evaluated yet; see run.status()")
        return Report(self._store.get(layout.verdict(self.id, record.verdict_key, "html")).decode())

    def generate(self, prompt: str, *, tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
        """Generate a continuation of `prompt`; temperature 0 picks the most likely token each time.

        Raises MissingError before the training has ended.
        """
        from holdfast.model.generate import generate
        from holdfast.model.hugging_face import load_exported
        from holdfast.pipelines.view.models import locate

        decoder, tokenizer = load_exported(locate(self.id, self._store))
        return generate(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)

    def record(self) -> RunRecord:
        """Everything that the store has about the run, as one record."""
        from holdfast.pipelines.view.catalog import find_run

        return find_run(self._store, self.id)

    def ledger(self) -> Ledger:
        """How every rank spent every second, up to now: the goodput, and the classes of lost time."""
        return ledger_of(self.events())

    def cost(self, prices: Mapping[str, float] | None = None) -> Cost:
        """Accelerator-hours, energy and cost up to now.

        `prices` override those of the spec (`cluster.prices`): accelerator_hour, kilowatt_hour,
        carbon_per_kilowatt_hour. Raises MissingError without a spec in the store.
        """
        from holdfast.telemetry.cost import cost

        events = self.events()
        spent = cost(self.record().known_spec(self._store), events, ledger_of(events))
        return replace(spent, prices=spent.prices.model_copy(update=dict(prices or {})))

    def batch(self, step: int, micro_batch: int | None = None) -> Batch:
        """The data that a step was trained on. Raises MissingError for a run that was never trained."""
        from holdfast.corpus.batch import batch_of

        record = self.record()
        spec = trained_spec(self._store, record)
        if spec.training.auto_micro_batch or spec.parallel.auto:  # the plan has the number
            from holdfast.checkpoint import newest_segments
            from holdfast.planning.auto import with_micro_batch

            if segments := newest_segments(self._store, record.run_id):
                spec = with_micro_batch(spec, int(segments[-1].plan.settings["training.micro_batch"] or 1))
        return batch_of(self._store, spec, record.dataset_id, step, micro_batch)

    def rollouts(self, step: int | None = None) -> Rollouts:
        """The answers that a step learned from, of `training.objective: grpo`. Default: the newest ones. Raises
        MissingError if there are none."""
        from holdfast.pipelines.view.rollouts import rollouts_of

        record = self.record()
        return rollouts_of(self._store, trained_spec(self._store, record), record.run_id, record.dataset_id, step)

    def fork(self, step: int, overrides: Sequence[str] = ()) -> ForkedRun:
        """Create a new run that starts from a checkpoint of this one."""
        from holdfast.pipelines.fork import fork_run

        return fork_run(self._store, self.record(), step, overrides)

    def write_page(self, path: Path) -> Path:
        """Write the HTML page of the training up to now."""
        from holdfast.pipelines.view.page import TrainingPage

        page = TrainingPage(self.record().known_spec(self._store), self.id, self._store, path)
        page.write(follow=False)
        return page.path

    def write_tensorboard(self, folder: Path | None = None) -> Path:
        """Write an event file for TensorBoard: every step, the evaluation and the spec. Returns its path."""
        from holdfast.runtime.environment import home
        from holdfast.tracking.tensorboard import write

        record = self.record()
        verdicts = [] if record.verdict is None else [record.verdict]
        target = folder or home() / "tensorboard" / f"{record.name}-{record.run_id}"
        return write(target, record.known_spec(self._store), self.history(), verdicts)

    def profile(self, steps: str = "10", *, wait: bool = False) -> str:
        """Have rank 0 record some steps with torch's profiler: `100-110`, or `10` for the next ten.

        Returns the key of the trace in the store, with `wait` as soon as it exists; otherwise empty.
        """
        from holdfast.pipelines.view.profiles import wait_for_trace
        from holdfast.telemetry.profiles import Window, ask

        start = time.time()
        ask(self._store, self.id, Window.of(steps))
        return wait_for_trace(self._store, self.id, start) if wait else ""

    @property
    def _location(self) -> Location:
        return Location(store=self._store.url)

    def _backend(self) -> tuple[Backend, str]:
        return find_backend(self.id, self._location)


def ledger_of(events: Sequence[Event]) -> Ledger:
    """The ledger of a run's events, up to now if it is running."""
    from holdfast.telemetry.ledger import is_active, ledger

    return ledger(events, time.time() if is_active(events) else None)


def trained_spec(store: Store, record: RunRecord) -> Spec:
    """The spec of a run. Raises MissingError for one that was never trained."""
    if not record.spec:
        raise MissingError(f"run {record.run_id}: {store.url} has no spec of it, because it was never trained")
    return Spec.model_validate(record.spec)


def replayable_spec(store: Store, record: RunRecord) -> Spec:
    """The spec of a run, to compute its steps again. Raises MissingError also for a training script whose spec was not
    submitted from this machine: a store is not trusted with the arguments of code."""
    from holdfast.code.resolve import require_submitted
    from holdfast.pipelines.backends.record import find_submission

    spec = trained_spec(store, record)
    if spec.train.script is not None:
        submitted = find_submission(store, record.run_id, spec)
        require_submitted("none" if submitted is None else submitted.request.executed, f"run {record.run_id}")
    return spec


def _quoted(text: str) -> str:
    from html import escape

    return escape(text, quote=True)
