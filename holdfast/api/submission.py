"""Start, resume and stop runs and sweeps on any backend."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.code.resolve import (
    keep_submitted,
    publish_code,
    require_known_code,
    require_submitted,
    resolve_code,
)
from holdfast.pipelines.backends import (
    DEFAULT,
    VARIABLE,
    WITH_ENDPOINT,
    backends_with,
    capabilities_of,
    open_backend,
)
from holdfast.pipelines.paths import load_spec as _load_spec
from holdfast.pipelines.paths import store_root
from holdfast.runtime.environment import store_url
from holdfast.search.method import Search
from holdfast.spec import ExitCode, HoldfastError, Spec
from holdfast.spec.errors import MissingError, Problem, SpecError, StoreUnreachableError, UsageError
from holdfast.store import Store, open_store

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.record import Record
    from holdfast.pipelines.backends.request import RunRequest
    from holdfast.pipelines.backends.validate import Validated
    from holdfast.telemetry.run_metadata import Maker

log = logging.getLogger("holdfast")

Overrides = Mapping[str, object] | Sequence[str]


class RunFailedError(HoldfastError):
    """A run stopped before it finished. `exit_code` gives the cause; from 128 on, the same call may succeed."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a submission that only a cluster has. Empty: the default of the installation."""

    image: str = ""  # container image of every step
    service_account: str = ""  # of the pipeline's pods
    endpoint: str = ""  # address of KFP's API, or of Ray's Jobs API
    namespace: str = ""  # of Kubeflow's users, or of Kubernetes
    concurrent_trials: int = 0  # of a sweep; 0: all


@dataclass(frozen=True)
class Location:
    """Location of a run. For an empty field, the record of the run in the store has the value."""

    backend: str = ""
    store: str = ""
    endpoint: str = ""
    namespace: str = ""


NO_OPTIONS, AS_RECORDED = ClusterOptions(), Location()


@dataclass(frozen=True)
class Submission:
    """The result of a submission."""

    run: RunStatus
    created: bool  # whether this call started something
    request: RunRequest
    record_error: str = ""  # why the store has no record of where it runs; empty if it has
    store: str = ""  # URL of the store with the record; empty if unknown here
    maker: Maker | None = None  # the Holdfast that made the resumed run
    skipped_last: bool = False  # the last submission was refused for its plan; this resumes the one before it

    @property
    def run_id(self) -> str:
        """The id of the run or the sweep; empty until the steps have read the sources."""
        local = capabilities_of(self.run.backend).foreground
        return self.request.run_id or (self.run.id if local else "")


@dataclass(frozen=True)
class Stopped:
    """The result of `stop`."""

    run: RunStatus
    ended: bool  # whether it was still running
    jobs: tuple[str, ...] = ()  # training jobs left by an ended run, which this call ends
    unknown: str = ""  # why it is unknown whether jobs are left


def load_spec(path: str | Path, overrides: Overrides = ()) -> Spec:
    """Read and check a spec. `overrides`: `{"training.steps": 50}` or `["training.steps=50"]`.

    The fields of `model.from` are filled in. Raises MissingError, DataError for a model that cannot be read, or
    SpecError with every problem.
    """
    return _load_spec(path, _listed(overrides))


def spec_of(spec: Spec | str | Path, overrides: Overrides = ()) -> Spec:
    """A loaded spec, or the spec in a file, with absolute paths. Raises what `load_spec` raises."""
    from holdfast.pipelines.paths import with_absolute_paths

    if isinstance(spec, Spec):
        if overrides:
            raise TypeError("overrides go with a file; change a Spec when you load it: load_spec(path, overrides)")
        return with_absolute_paths(spec)
    return with_absolute_paths(load_spec(spec, overrides))


def open_store_at(store: str | Store = "") -> Store:
    """The store at a URL or in a folder; empty: the default one."""
    if not isinstance(store, str):
        return store
    return open_store(store_root(store) if store else store_url())


def request(
    spec: Spec | str | Path,
    *,
    backend: str = "",
    overrides: Overrides = (),
    store: str = "",
    salt: str = "",
    replan: bool = False,
    over: Sequence[str] | Search = (),
    options: ClusterOptions = NO_OPTIONS,
) -> RunRequest:
    """A checked request to run a spec, or with `over` a sweep, on a backend. Sends nothing.

    `over`: a grid such as `["training.optimizer.learning_rate=1e-3,3e-3"]`, or a `Search`. `salt` separates runs of the
    same inputs. `replan` lets an unfinished run continue under another plan. Raises SpecError, and
    MissingError for an unknown backend.
    """
    from holdfast.pipelines.backends.request import RunRequest, identify_request
    from holdfast.pipelines.trials import plan_trials, require_comparable

    name = default_backend(backend)
    capabilities = capabilities_of(name)
    _require_usable(name, options, over)
    if isinstance(spec, Spec) and not overrides:
        checked_spec = resolve_code(spec, Path.cwd())
    else:
        checked_spec = load_spec(_path(spec), overrides)
    if over:
        require_comparable(checked_spec, over)
    trials, search = plan_trials(checked_spec, over) if over else ((), None)
    run_request = RunRequest(
        spec_of(checked_spec) if capabilities.foreground else checked_spec,
        store,
        salt,
        service_account=options.service_account,
        image=options.image,
        replan=replan,
        trials=trials,
        search=search,
        concurrent_trials=options.concurrent_trials,
    )
    if capabilities.foreground:
        return run_request  # the run identifies itself
    return identify_request(
        run_request, shared_folders=capabilities.shared_folders, shared_volumes=capabilities.shared_volumes
    )


def submit(
    wanted: RunRequest,
    *,
    backend: str = "",
    options: ClusterOptions = NO_OPTIONS,
    console: Console | None = None,
    again: str = "",
) -> Submission:
    """Submit a request to a backend. An unfinished or successful run of an equal request is returned.

    On this machine it runs to its end and shows its progress on `console`, with `again` as the advice on how to resume
    it. A failure of the run is no error here: see `Submission.run`.
    """
    target = _opened(default_backend(backend), wanted.store, options, console, again)
    publish_request_code(wanted, default_backend(backend))
    if wanted.search is not None and not target.capabilities.foreground:
        from holdfast.api.search_submission import run_search

        return run_search(target, wanted, console, lambda trial: _recorded(target.submit(trial), trial, options).run)
    return _recorded(target.submit(wanted), wanted, options)


def preview(wanted: RunRequest, *, backend: str = "", options: ClusterOptions = NO_OPTIONS) -> list[Any]:
    """The exact objects that `submit` would send. Of a search on a cluster, those of its first trial. Sends nothing."""
    target = _opened(default_backend(backend), wanted.store, options)
    if wanted.search is not None and not target.capabilities.foreground:
        from holdfast.pipelines.submitted_search import trial_request
        from holdfast.search.method import next_decision

        first = next_decision(wanted.search, wanted.spec.training.steps, ())
        assert first is not None
        wanted = trial_request(wanted, wanted.spec.with_overrides(first.changes), first.until)
    return target.objects(wanted)


def check_preview(
    objects: Sequence[dict[str, Any]], wanted: RunRequest, backend: str = "", options: ClusterOptions = NO_OPTIONS
) -> list[Validated]:
    """Check the objects of a preview, and those that steps would create later, against the cluster.

    Each of several contexts (`cluster.contexts`) checks them. Empty for a backend without Kubernetes objects.
    """
    capabilities = capabilities_of(default_backend(backend))
    if not objects or not capabilities.kubernetes:
        return []
    from holdfast.launch.emitters import objects_for, training_job
    from holdfast.pipelines.backends.validate import validate
    from holdfast.serving import deployment, inference_service

    spec = wanted.spec
    store = wanted.store or spec.store or "s3://bucket/prefix"
    later = objects_for(training_job(spec, wanted.run_id or "run-id", 1, store))
    if spec.serving.kserve is not None:
        later.append(inference_service(spec, f"{store.rstrip('/')}/export", {}))
    if spec.serving.deployment is not None:
        later += deployment(spec, store.rstrip("/"), "export/", "digest", {})
    contexts = ([options.endpoint] if options.endpoint else spec.cluster.contexts) if capabilities.contexts else ()
    namespace = options.namespace or spec.cluster.namespace
    return [validate([*objects, *later], namespace, context) for context in contexts or [""]]


def resume(run: str, *, at: Location = AS_RECORDED, replan: bool = False, console: Console | None = None) -> Submission:
    """Resume a run or a sweep from its newest checkpoint, where it was submitted or on `at.backend`.

    A last submission that was refused for its plan is skipped, unless `replan` allows it. Raises MissingError for a run
    without a record, and OtherResultsError for one that this version of Holdfast does not continue.
    """
    from holdfast.pipelines.backends.record import find_record
    from holdfast.telemetry.run_metadata import Maker, OtherResultsError

    opened_store = open_store_at(at.store)
    record = find_record(opened_store, run)
    if record is None:
        raise MissingError(
            f"{run!r}: {opened_store.url} does not say how it was submitted; run its spec again, which resumes it"
        )
    last = record if replan else record.accepted(opened_store)
    run_request = replace(last.request, replan=replan)  # a permission counts once
    require_known_code(run_request.spec, run)
    if run_request.spec.code is not None:
        require_submitted(run_request.executed, run)
    target = open_recorded(at, record)
    maker = None if record.is_sweep else Maker.of_run(opened_store, record.identity)
    if maker is not None and maker.other_results and target.capabilities.foreground:
        raise OtherResultsError(
            f"run {record.identity} was made by a Holdfast of other results: {maker.in_words}; resume it with that "
            "Holdfast, or run its spec again, which makes a new run"
        )
    _show_on(target, console)
    place = resolve_location(at, record)
    options = ClusterOptions(endpoint=place.endpoint, namespace=place.namespace)
    return replace(
        _recorded(target.resume(run_request), run_request, options), skipped_last=last is not record, maker=maker
    )


def stop(run: str, *, at: Location = AS_RECORDED) -> Stopped:
    """Ask a run or a sweep to save and stop. Of an ended run, end the jobs that it left on its cluster."""
    from holdfast.pipelines.backends.cleanup import clean_up_cluster
    from holdfast.pipelines.backends.record import find_record

    backend, backend_id = find_backend(run, at)
    status, ended = backend.cancel(backend_id)
    if ended or not backend.capabilities.kubernetes:
        return Stopped(status, ended)
    try:
        record = find_record(open_store_at(at.store), run)
        jobs = clean_up_cluster(record, status) if record is not None and record.id == status.id else []
    except HoldfastError as error:
        return Stopped(status, ended, unknown=str(error))
    return Stopped(status, ended, tuple(jobs))


def find_backend(run: str, at: Location = AS_RECORDED) -> tuple[Backend, str]:
    """The backend of a run, and its id there. `at` takes precedence over the run's record."""
    from holdfast.pipelines.backends.record import find_record

    record = None
    if not at.endpoint:
        try:
            record = find_record(open_store_at(at.store), run)
        except StoreUnreachableError as error:
            if not at.backend:
                raise  # only the record names the backend
            log.warning("the record of %s cannot be read (%s); %s is queried by this name", run, error, at.backend)
    if record is not None and at.backend in ("", record.backend):
        return open_recorded(at, record), record.id
    if at.backend or at.endpoint or os.environ.get("KFP_ENDPOINT"):
        name = at.backend or WITH_ENDPOINT
        return open_backend(name, store=at.store, endpoint=at.endpoint, namespace=at.namespace), run
    raise MissingError(
        f"{run!r}: the store {open_store_at(at.store).url} does not say where it runs; give --store with the one that "
        f"it was submitted with, or --backend ({VARIABLE}), or --endpoint or KFP_ENDPOINT for Kubeflow"
    )


def open_recorded(at: Location, record: Record) -> Backend:
    """The backend of a record, or `at.backend`. The places of `at` take precedence."""
    place = resolve_location(at, record)
    if not at.backend:
        record.require_known_backend()
    return open_backend(place.backend, store=place.store, endpoint=place.endpoint, namespace=place.namespace)


def resolve_location(at: Location, record: Record) -> Location:
    """Where a recorded run is: `at`, and what it leaves open from the record, unless `at` names another backend."""
    if at.backend not in ("", record.backend):
        return at  # the record has the places of another backend
    return replace(
        at,
        backend=record.backend,
        endpoint=at.endpoint or record.endpoint,
        namespace=at.namespace or record.namespace,
    )


def default_backend(name: str = "") -> str:
    """The backend `name`, else HOLDFAST_BACKEND, else this machine."""
    return name or os.environ.get(VARIABLE, "") or DEFAULT


def new_salt() -> str:
    """A random salt, for a new run of the same inputs."""
    return secrets.token_hex(4)


def _require_usable(name: str, options: ClusterOptions, over: Sequence[str] | Search) -> None:
    """Refuse a sweep or an option that a backend does not have. Raises UsageError."""
    capabilities = capabilities_of(name)
    if isinstance(over, Search) and over.method != "random":
        if not capabilities.searches:
            remedy = f"use one of {', '.join(backends_with('searches'))}"
            raise UsageError(f"the backend {name} runs no search by {over.method}", "--search", remedy)
        if options.concurrent_trials:
            raise UsageError(f"a search by {over.method} runs one trial at a time", "--concurrent-trials", "remove it")
    elif over and not capabilities.sweeps:
        raise UsageError(f"{name} runs no sweeps", "--backend", f"use one of {', '.join(backends_with('sweeps'))}")
    if options.concurrent_trials and not capabilities.limited_trials:
        raise UsageError(
            f"the backend {name} cannot limit the trials that run concurrently",
            "--concurrent-trials",
            f"leave it out, or use one of {', '.join(backends_with('limited_trials'))}",
        )
    needs = {
        "image": "images",
        "service_account": "images",
        "endpoint": "endpoints",
        "namespace": "namespaces",
    }
    for field, capability in needs.items():
        if getattr(options, field) and not getattr(capabilities, capability):
            raise UsageError(
                f"the backend {name} has no use for it",
                f"--{field.replace('_', '-')}",
                f"leave it out, or add --backend with one of {', '.join(backends_with(capability))}",
            )


def _opened(name: str, store: str, options: ClusterOptions, console: Console | None = None, again: str = "") -> Backend:
    target = open_backend(name, store=store, endpoint=options.endpoint, namespace=options.namespace)
    _show_on(target, console, again)
    return target


def publish_request_code(wanted: RunRequest, backend: str) -> None:
    """Put the code of a request into the store of its run, and remember the request. Raises SpecError if that store is
    unknown here."""
    if wanted.spec.code is None:
        return
    root = wanted.store or wanted.spec.store or os.environ.get("HOLDFAST_STORE", "")
    if not root and not (capabilities_of(backend).foreground or capabilities_of(backend).shared_folders):
        remedy = "name the store of the pods: --store, `store` in the spec, or HOLDFAST_STORE"
        raise SpecError([Problem("store", None, "is needed here, to send your code to it", remedy)])
    publish_code(wanted.spec, open_store_at(root))
    keep_submitted(wanted.executed)


def _show_on(target: Backend, console: Console | None, again: str = "") -> None:
    """Set where a backend of this machine shows its progress."""
    from holdfast.pipelines.backends.local.backend import Local

    if isinstance(target, Local):
        target.console, target.again = console, again


def _recorded(made: tuple[RunStatus, bool], wanted: RunRequest, options: ClusterOptions) -> Submission:
    """A submission, after keeping its record."""
    from holdfast.pipelines.backends.record import keep_submission

    status, created = made
    record_store = wanted.store or wanted.spec.store or os.environ.get("HOLDFAST_STORE", "")
    if not record_store and capabilities_of(status.backend).shared_folders:  # its jobs use the default one
        record_store = store_url()
    error = keep_submission(status, wanted, options.endpoint or status.endpoint, options.namespace, record_store)
    return Submission(status, created, wanted, error, record_store)


def _path(spec: Spec | str | Path) -> str | Path:
    if isinstance(spec, Spec):
        raise TypeError("overrides go with a file; change a Spec when you load it: load_spec(path, overrides)")
    return spec


def _listed(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    import json

    return [f"{field}={json.dumps(value)}" for field, value in overrides.items()]
