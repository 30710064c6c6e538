"""Clusters and this machine: checks before a run, the health of accelerators, and runs under faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.api.submission import AS_RECORDED, Location
from holdfast.spec import Spec
from holdfast.spec.errors import Problem, SpecError, UsageError

if TYPE_CHECKING:
    from holdfast.health import Report
    from holdfast.pipelines.chaos.compare import Chaos
    from holdfast.pipelines.doctor import Finding
    from holdfast.planning.calibration import Calibration
    from holdfast.telemetry.exactness import Exactness

MEASURED = ("cpu", "nvidia", "amd")  # kinds of accelerators that `calibrate` can synchronize with


@dataclass(frozen=True)
class Health:
    """The result of a health check of this machine."""

    report: Report | None  # None if the check did not finish
    code: int  # of the exit code table; 0 if everything is healthy
    reason: str = ""  # why it did not finish


def doctor(
    spec: Spec | None = None, *, at: Location = AS_RECORDED, service_account: str = "", everything: bool = False
) -> list[Finding]:
    """Check a cluster, the store and MLflow for what a spec needs, or without a spec, for what every run needs.

    `at.backend`: slurm and ray check those; every other backend, and the default, checks Kubernetes.
    """
    from holdfast.pipelines.backends import require_known
    from holdfast.pipelines.doctor import examine

    if at.backend:
        require_known(at.backend)
    return list(examine(spec, at.namespace, at.store, at.backend, service_account, everything))


def health(
    spec: Spec | None = None, *, ranks: int | None = None, accelerator: str = "", seconds: float = 5.0, store: str = ""
) -> Health:
    """Probe and compare the ranks of this machine, as a run does at its start."""
    from holdfast.health import Report
    from holdfast.launch import Job, LocalLauncher
    from holdfast.launch.accelerators import ACCELERATORS
    from holdfast.pipelines.paths import store_root
    from holdfast.runtime.environment import store_url
    from holdfast.runtime.temporary import temporary_folder
    from holdfast.spec.cluster import Cluster

    kind = accelerator or (spec.cluster.accelerator if spec else "cpu")
    if kind not in ACCELERATORS:
        raise SpecError([Problem("--accelerator", kind, "is not known", f"use one of {', '.join(ACCELERATORS)}")])
    count = ranks or (spec.parallel.processes if spec else 2)
    url = store_root(store) if store else store_url(spec)
    cluster = (spec.cluster if spec else Cluster()).model_copy(update={"accelerator": kind})
    with temporary_folder("health") as folder:
        path = Path(folder) / "report.json"
        command = [
            "-m",
            "holdfast.health.program",
            "--accelerator",
            kind,
            "--seconds",
            str(seconds),
            "--store",
            url,
            "--report",
            str(path),
        ]
        launcher = LocalLauncher(Path(folder))
        threads = spec.parallel.threads if spec else 1
        try:
            ending = launcher.run(Job("health", "health", 0, command, count, threads, 5.0, cluster))
        finally:
            launcher.close()
        if path.exists():
            return Health(Report.model_validate_json(path.read_text(encoding="utf-8")), ending.code)
        return Health(None, ending.code, "\n".join(ending.log_tail[-10:]) or ending.detail)


def calibrate(ranks: int | None = None, accelerator: str = "cpu", path: Path | None = None) -> tuple[Calibration, Path]:
    """Measure this machine for the planner, and write the result. Returns it, and the path of the file."""
    import os

    from holdfast.pipelines.measure import calibrate as measure
    from holdfast.planning import calibration

    if accelerator not in MEASURED:
        raise UsageError(f"{accelerator} cannot be measured", "--accelerator", f"use one of {', '.join(MEASURED)}")
    if ranks is None and accelerator != "cpu":
        raise UsageError("is missing", "--ranks", "give the number of accelerators of this machine")
    calibrated = measure(ranks or len(os.sched_getaffinity(0)), accelerator)
    to = path or calibration.default_path()
    calibration.write(calibrated, to)
    return calibrated, to


def chaos(
    spec: Path,
    *,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    seed: int | None = None,
    minutes: float = 0.0,
    faults: str = "",
    store: str = "",
) -> Chaos:
    """A request to train a spec on this machine with and without faults; `run_with_faults` runs it.

    `faults`: names such as `rank-killed,store-away`; empty: all. Raises UsageError for `steps` of a training script.
    """
    from holdfast.pipelines.chaos import compare
    from holdfast.pipelines.paths import load_spec

    checked_spec = load_spec(spec, overrides)
    is_script = checked_spec.train.script is not None
    if is_script and steps:
        remedy = "give the script its steps: --set 'train.arguments=[...]'"
        raise UsageError("a training script has its own number of steps", "--steps", remedy)
    return compare.Chaos(
        spec,
        overrides,
        0 if is_script else steps or min(checked_spec.training.steps, compare.STEPS),
        compare.draw_seed() if seed is None else seed,
        minutes,
        compare.known_faults(faults),
        store,
        is_script=is_script,
    )


def verify(spec: Path, *, overrides: Sequence[str] = (), steps: int = 8, resume_at: int | None = None) -> Exactness:
    """Run the training script of a spec for some steps on this machine, without and with a stop, and compare the bits.
    `resume_at` is the step of the stop; default: the middle, and the end of an epoch. The runs are kept nowhere."""
    from holdfast.code.resolve import enter_code, publish_code
    from holdfast.components.train.exactness import verify_script
    from holdfast.corpus import prepare
    from holdfast.pipelines.paths import load_spec, with_absolute_paths
    from holdfast.runtime.temporary import temporary_folder
    from holdfast.store import open_store

    checked_spec = with_absolute_paths(load_spec(spec, overrides))
    if checked_spec.train.script is None:
        raise UsageError("has no training script", "SPEC", "use `holdfast chaos` for Holdfast's own loop")
    if resume_at is not None and not 0 < resume_at < steps:
        raise UsageError(f"{resume_at} is not between 0 and {steps}", "--resume-at", "stop within the steps")
    with temporary_folder() as folder:
        store = open_store(f"file://{folder}/store")
        publish_code(checked_spec, store)
        dataset_id = ""
        if checked_spec.data.sources:
            enter_code(store, checked_spec.code)  # it may have readers
            dataset_id = prepare(checked_spec, store).dataset_id
        return verify_script(checked_spec, dataset_id, store, steps, resume_at)


def run_with_faults(wanted: Chaos, tell: Callable[[object], None] = lambda _: None) -> Chaos:
    """Run a request of `chaos`. `tell` receives the progress. Raises ChaosError, also if the bits differ."""
    from holdfast.pipelines.chaos import compare

    compare.run_with_faults(wanted, tell)
    return wanted
