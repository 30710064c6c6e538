"""Request to run a spec or sweep, and its names; identical for every backend."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from holdfast.pipelines.trials import Trials
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import sweep_id, sweep_name, trials_of
from holdfast.search.method import Search
from holdfast.spec import Spec, SpecError, dump_spec, run_id
from holdfast.spec.engine_text import escape_tree, to_struct
from holdfast.spec.errors import HoldfastError, MissingError, Problem
from holdfast.spec.identity import digest
from holdfast.spec.load import written_spec
from holdfast.spec.rules.operations import check_collector_address

ORDER_DIGITS = 8


@dataclass(frozen=True)
class RunRequest:
    """A request to run a spec or a sweep."""

    spec: Spec
    store: str = ""  # empty: the spec's, otherwise HOLDFAST_STORE of the pods
    salt: str = ""
    run_id: str = ""  # or the sweep's; empty until the steps have read the sources
    unread: str = ""  # why `run_id` is unknown
    service_account: str = ""
    image: str = ""
    replan: bool = False
    trials: Trials = ()  # of a sweep
    search: Search | None = None  # a sweep whose trials depend on results
    concurrent_trials: int = 0  # concurrent trials; 0: all, unless the backend limits them

    @property
    def title(self) -> str:
        """The name of the runs of this spec, or of the sweep."""
        return sweep_name(self.spec) if self.is_sweep else self.spec.name

    @property
    def is_sweep(self) -> bool:
        """Whether it is for a sweep, and not for one run."""
        return bool(self.trials) or self.search is not None

    def parameters(self) -> dict[str, Any]:
        """The parameters of the DAG for forms, with the spec as its author wrote it."""
        found = {
            "spec": to_struct(written_spec(self.spec)),
            "overrides": [],
            "store": self.store,
            "salt": self.salt,
            "replan": self.replan,
        }
        if self.is_sweep:
            del found["overrides"]  # each trial has its own
        return found

    def question(self) -> dict[str, Any]:
        """The parameters of the DAG with every default: equal for two spellings of the same spec."""
        return {**self.parameters(), "spec": dump_spec(self.spec)}

    def escaped_parameters(self) -> dict[str, Any]:
        """The parameters of the DAG in a form that KFP and Argo pass on unchanged."""
        parameters: dict[str, Any] = escape_tree(self.parameters())
        return parameters

    @property
    def executed(self) -> str:
        """A digest of all that decides what runs: the spec with its code, arguments and environment, the image, and
        the changes of the trials."""
        searched = [asdict(self.search)] if self.search else []
        return digest([dump_spec(self.spec), self.image, self.trials, *searched])

    @property
    def key(self) -> str:
        """The key of the submission in a store: the id of the run, or a digest of the request."""
        return self.run_id or digest([self.question(), self.image])

    def name(self, version: str) -> str:
        """The name of the run: title, run id, and a digest of the rest of the request."""
        rest = digest([version, self.question(), self.service_account])[:ORDER_DIGITS]
        return " ".join(part for part in (self.title, self.run_id, rest) if part)


def identify_request(request: RunRequest, *, shared_folders: bool = False, shared_volumes: bool = False) -> RunRequest:
    """Check that a cluster can run the request, and identify its run or its sweep.

    The id is known only if the steps' inputs can be read from here. `shared_folders`: the cluster's machines see this
    machine's folders. `shared_volumes`: they see `cluster.volumes`. Raises SpecError.
    """
    from holdfast.corpus import identify
    from holdfast.model.hub import first_weights_digest

    spec = request.spec
    if not shared_folders:
        check_for_cluster(spec, request.store)
    if spec.parallel.auto:
        from holdfast.planning.auto import best

        best(spec, None, here=shared_folders)  # fails early if no pod can plan
    identity, unread = "", "" if shared_folders else _read_by_steps(spec, shared_volumes)
    if spec.model.init_from is not None and not unread:
        from holdfast.corpus.starting_model import require_start

        require_start(spec)
    try:
        if unread:
            raise MissingError(unread)
        dataset_id = identify(spec)
        if request.trials:
            identity = sweep_id([run for _, _, run in trials_of(spec, request.trials, dataset_id, request.salt)])
        else:
            identity = run_id(spec, dataset_id, request.salt, first_weights_digest(spec))
        if request.search is not None:
            identity = request.search.identity(identity, settings_key(spec))
    except (HoldfastError, OSError) as error:
        unread = str(error)
    return replace(request, run_id=identity, unread=unread)


def check_for_cluster(spec: Spec, store: str = "") -> None:
    """Raise SpecError for a spec that cannot run in pods.

    Causes: a path that does not exist in a pod, a store in a folder that is not shared, a metrics address that is
    reachable only inside the pod.
    """
    mounts = [PurePosixPath(volume.path) for volume in spec.cluster.volumes]
    remedy = "put it into a bucket, or on a volume of cluster.volumes and write the absolute path there"
    problems = []
    for name, path in _inputs(spec):
        if _is_path(path) and not _mounted(path, mounts):
            problems.append(Problem(name, path, "is a path that no pod of the cluster has", remedy))
    root = store or spec.store or ""
    if root.startswith("file:") and not _mounted(root, mounts):
        problems.append(Problem("store", root, "is a folder that the pods of the cluster do not share", remedy))
    problems += check_collector_address(spec)
    if problems:
        raise SpecError(problems, "spec, for a cluster")


def _inputs(spec: Spec) -> Iterator[tuple[str, str]]:
    """The input fields of a run, with their values."""
    yield "data.tokenizer.path", spec.data.tokenizer.path or ""
    for number, path in enumerate(spec.data.cleaning.decontaminate.tasks if spec.data.cleaning.decontaminate else ()):
        yield f"data.cleaning.decontaminate.tasks.{number}", path
    yield "model.init_from", spec.model.init_from or ""
    yield "training.distillation.teacher", spec.training.distillation.teacher or ""
    for number, reward in enumerate(spec.training.grpo.rewards):
        yield f"training.grpo.rewards.{number}.model", reward.model or ""
    yield "data.chat.template", spec.data.chat.template or ""
    for index, source in enumerate(spec.data.sources):
        yield f"data.sources.{index}.uri", source.uri
    for index, given in enumerate(spec.train.inputs):
        yield f"train.inputs.{index}.uri", given.uri


def _read_by_steps(spec: Spec, shared_volumes: bool) -> str:
    """The reason why an input of the spec may have other content in a pod than here; empty if no input can."""
    for name, value in _inputs(spec):
        if value.startswith("python:"):
            return f"{name}: {value} is that of the image in which the steps run"
        if _is_path(value) and not shared_volumes:
            return f"{name}: {value} is on a volume of the pods"
    for index, source in enumerate(spec.data.sources):
        if source.uri.startswith("dvc:") and _is_path(source.repo) and not shared_volumes:
            return f"data.sources.{index}.repo: {source.repo} is a repository in the file system of the pods"
    return ""


def _is_path(value: str) -> bool:
    return bool(value) and (":" not in value or value.startswith("file:"))


def _mounted(path: str, mounts: Sequence[PurePosixPath]) -> bool:
    location = PurePosixPath(path.removeprefix("file://"))
    return any(location.is_relative_to(mount) for mount in mounts)
