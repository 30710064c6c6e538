"""Python interface of Holdfast: load a spec, run or submit it, and query its runs.

    import holdfast

    run = holdfast.run("examples/quickstart.yaml", overrides={"training.steps": 50})
    run.history()[-1]["loss"]
    run.generate("def main(")

The functions match the command `holdfast` and return values instead of text. Errors are those of
`holdfast.spec.errors`: each has a message with a remedy and an `exit_code`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.pipelines.paths import store_root
from holdfast.runtime.environment import store_url
from holdfast.spec import ExitCode, HoldfastError, Spec
from holdfast.spec import load_spec as _load_spec
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout, open_store

if TYPE_CHECKING:
    from holdfast.components.train.result import TrainingResult
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.record import Record
    from holdfast.pipelines.view.catalog import RunRecord
    from holdfast.scoring.verdict import Verdict
    from holdfast.telemetry.events import Event

Overrides = Mapping[str, object] | Sequence[str]


class RunFailedError(HoldfastError):
    """A local run stopped before it finished. `exit_code` gives the cause; from 128 on, the same call may succeed."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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

    def __init__(self, run_id: str, store: str = "") -> None:
        """Find the run whose id begins with `run_id`, or the newest run with that name.

        `store` is a URL or a folder; empty: the default store. Raises MissingError.
        """
        from holdfast.pipelines.view.catalog import find_run

        self._store = _opened(store)
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
        backend, there = self._backend()
        return backend.status(there)

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
            from holdfast.pipelines.backends.step_logs import goes_on, rank_lines

            running = (lambda: goes_on(*self._backend())) if follow else None
            return rank_lines(self._store, self.id, rank or 0, attempt=attempt, launch=launch, running=running)
        if raw:
            backend, there = self._backend()
            return (line for _, line in backend.logs(there, step, follow=follow))
        from functools import cache

        from holdfast.pipelines.backends.record import find_record
        from holdfast.pipelines.backends.step_logs import step_lines

        record = find_record(self._store, self.id)
        return (line for _, line in step_lines(self._store, record, cache(self._backend), step, follow=follow))

    def cancel(self) -> bool:
        """Ask the run to save and stop. Returns whether it was running."""
        backend, there = self._backend()
        return backend.cancel(there)[1]

    def resume(self, *, replan: bool = False) -> RunStatus:
        """Resume the run where it was submitted, from its newest checkpoint. On this machine, run it to the end."""
        from dataclasses import replace

        record = self._record()
        request = replace(record.request, replan=replan, store=record.store or self._store.url)
        return self._backend()[0].resume(request)[0]

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

        found = [read_manifest(self._store, self.id, step) for step in checkpoint_steps(self._store, self.id)]
        return [
            Checkpoint(one.step, one.attempt, one.created, one.state_digest, layout.checkpoint(self.id, one.step))
            for one in found
        ]

    def result(self) -> TrainingResult | None:
        """The final checkpoint and export; None while the run trains."""
        from holdfast.components.train.result import read_result

        return read_result(self._store, self.id)

    def verdict(self) -> Verdict | None:
        """The newest verdict on its model; None without an evaluation."""
        from holdfast.pipelines.view.catalog import read_run
        from holdfast.scoring.verdict import Verdict

        record = read_run(self._store, self.id)
        return Verdict.model_validate(record.verdict) if record and record.verdict else None

    def report(self) -> Report:
        """The report of its newest evaluation. Raises MissingError without one."""
        from holdfast.pipelines.view.catalog import read_run

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

    def _record(self) -> Record:
        from holdfast.pipelines.backends.record import find_record

        record = find_record(self._store, self.id)
        if record is None:
            raise MissingError(
                f"run {self.id}: {self._store.url} does not say how it was submitted; submit its spec again, "
                "which goes on with it"
            )
        return record

    def _backend(self) -> tuple[Backend, str]:
        from holdfast.pipelines.backends import open_backend

        record = self._record()
        backend = open_backend(
            record.backend, store=self._store.url, endpoint=record.endpoint, namespace=record.namespace
        )
        return backend, record.id


def load_spec(path: str | Path, overrides: Overrides = ()) -> Spec:
    """Read and check a spec. `overrides`: `{"training.steps": 50}` or `["training.steps=50"]`.

    Raises MissingError, or SpecError with every problem.
    """
    return _load_spec(path, _listed(overrides))


def run(
    spec: Spec | str | Path,
    *,
    overrides: Overrides = (),
    store: str = "",
    salt: str = "",
    fresh: bool = False,
    replan: bool = False,
) -> Run:
    """Run a spec on this machine to its end, show its progress, and return the run.

    Finished work is not repeated: the same call resumes the run, or returns immediately. `salt` separates runs of the
    same inputs, `fresh` draws a new salt, and `replan` lets an unfinished run continue under another plan. A model that
    is not blessed is no failure: see `Run.verdict`. Raises RunFailedError.
    """
    from holdfast.pipelines.backends.local.backend import Local
    from holdfast.pipelines.backends.request import RunRequest

    request = RunRequest(_spec(spec, overrides), store, secrets.token_hex(4) if fresh else salt, replan=replan)
    status, _ = Local(store).submit(request)
    code = ExitCode(status.exit_code or 0)
    if code not in (ExitCode.OK, ExitCode.NOT_BLESSED):
        reason = status.message or code.name.lower().replace("_", " ")
        raise RunFailedError(f"run {status.id}: {reason}. The log: {status.link}", code)
    return Run(status.id, request.store or (request.spec.store or ""))


def submit(
    spec: Spec | str | Path,
    *,
    backend: str = "kubeflow",
    overrides: Overrides = (),
    store: str = "",
    salt: str = "",
    replan: bool = False,
    image: str = "",
    service_account: str = "",
    endpoint: str = "",
    namespace: str = "",
) -> RunStatus:
    """Submit a spec to a backend and return the status of the run.

    Submitting the same spec again returns the existing run. `Run(...)` finds the run once its first step has begun. See
    `holdfast run --help`.
    """
    from holdfast.pipelines.backends import SHARED_FOLDERS, SHARED_VOLUMES, open_backend
    from holdfast.pipelines.backends.record import keep_submission
    from holdfast.pipelines.backends.request import RunRequest, identify_request

    checked = _spec(spec, overrides)
    target = open_backend(backend, store=store, endpoint=endpoint, namespace=namespace)
    request = RunRequest(checked, store, salt, service_account=service_account, image=image, replan=replan)
    request = identify_request(
        request, shared_folders=backend in SHARED_FOLDERS, shared_volumes=backend in SHARED_VOLUMES,
    )  # fmt: skip
    status, _ = target.submit(request)
    keep_submission(status, request, endpoint, namespace, store or checked.store or store_url())
    return status


def runs(store: str = "") -> list[Run]:
    """The runs in a store, newest first."""
    from holdfast.pipelines.view.catalog import all_runs

    opened = _opened(store)
    return [Run._of(opened, record) for record in all_runs(opened)]


def _spec(spec: Spec | str | Path, overrides: Overrides) -> Spec:
    from holdfast.pipelines.paths import with_absolute_paths

    if isinstance(spec, Spec):
        if overrides:
            raise TypeError("overrides go with a file; change a Spec when you load it: load_spec(path, overrides)")
        return with_absolute_paths(spec)
    return with_absolute_paths(load_spec(spec, overrides))


def _listed(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    import json

    return [f"{field}={json.dumps(value)}" for field, value in overrides.items()]


def _opened(store: str) -> Store:
    return open_store(store_root(store) if store else store_url())


def _quoted(text: str) -> str:
    from html import escape

    return escape(text, quote=True)
