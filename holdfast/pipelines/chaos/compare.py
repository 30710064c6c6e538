"""`holdfast chaos`: the calm run, the runs under faults ("storms"), and the comparison of their bits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.components.train.result import ScriptResult, TrainingResult, read_result, read_script_result
from holdfast.pipelines.backends.local.run import LocalRun, identified
from holdfast.pipelines.chaos.fault_run import ChaosError, Planned, Run, Survived, schedule
from holdfast.pipelines.chaos.faults import FAULTS
from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.pipelines.paths import load_spec, store_root
from holdfast.runtime.environment import home
from holdfast.spec import ExitCode
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import layout, open_store

if TYPE_CHECKING:
    from holdfast.checkpoint.tools import Divergence

STEPS = 60  # default upper limit of trained steps
BUCKET = "holdfast-chaos"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "chaos",
    "AWS_SECRET_ACCESS_KEY": "chaos-on-this-machine",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@dataclass(frozen=True)
class FaultRun:
    """One run under faults, compared with the calm one."""

    seed: int
    planned: tuple[Planned, ...]
    survived: tuple[Survived, ...]
    commands: int  # commands that it took
    result: TrainingResult | ScriptResult
    divergence: Divergence | None  # from the calm run; None: equal

    @property
    def equal(self) -> bool:
        """Whether its bits equal those of the calm run."""
        return self.divergence is None

    @property
    def missed(self) -> tuple[str, ...]:
        """The faults that were due only after its training had ended."""
        return tuple(planned_fault.fault for planned_fault in self.planned[len(self.survived) :])


@dataclass
class Chaos:
    """The request and its results."""

    spec: Path
    overrides: Sequence[str]
    steps: int  # 0: those of the calm run
    seed: int
    minutes: float  # new storms begin during this time; 0: one storm
    faults: Sequence[str]
    store: str = ""
    is_script: bool = False
    left_out: dict[str, str] = field(default_factory=dict)  # faults that are impossible here, with the reasons
    storms: list[FaultRun] = field(default_factory=list)
    calm: TrainingResult | ScriptResult | None = None

    def goodput(self, storm: FaultRun) -> float:
        """The time of the calm training as a share of the time of a storm's training."""
        assert self.calm is not None
        return min(1.0, self.calm.seconds / storm.result.seconds)


def known_faults(wanted: str) -> list[str]:
    """Parse a list of faults such as `rank-killed,store-away`; empty: all. Raises DataError."""
    names = [name.strip() for name in wanted.split(",") if name.strip()] or list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        raise DataError(f"--faults {', '.join(unknown)}: is not known; use some of {', '.join(FAULTS)}")
    return names


def run_with_faults(experiment: Chaos, tell: Callable[[object], None]) -> None:
    """Run the calm run, then storms.

    `tell` receives progress: text, steps, faults, their results, and each storm. The data stay in a folder under
    HOLDFAST_HOME if anything differs or fails; otherwise they are removed. Raises ChaosError when a run fails
    permanently, and at the end for a fault that never had time in any storm.
    """
    folder = (
        home() / "chaos" / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{experiment.seed}-{uuid.uuid4().hex[:6]}"
    )
    with _store(experiment, folder) as site:
        url = site.url
        experiment.left_out = _left_out(experiment, proxied=site.proxy is not None)
        experiment.faults = [name for name in experiment.faults if name not in experiment.left_out]
        began = time.monotonic()
        calm_id, experiment.calm, _, _ = _trained(experiment, site, "calm", (), 0, tell)
        experiment.steps = experiment.steps or experiment.calm.step
        number = 0
        while number == 0 or time.monotonic() - began < 60 * experiment.minutes:
            seed = experiment.seed + number
            planned = schedule(experiment.faults, experiment.steps, seed)
            tell(planned)
            salt = f"storm-{number}"
            storm_id, result, survived, commands = _trained(experiment, site, salt, planned, seed, tell)
            divergence = None
            if result.state_digest != experiment.calm.state_digest:
                from holdfast.checkpoint.tools import Side, find_divergence

                divergence = find_divergence(Side(open_store(url), calm_id), Side(open_store(url), storm_id))
            experiment.storms.append(FaultRun(seed, tuple(planned), tuple(survived), commands, result, divergence))
            tell(experiment.storms[-1])
            if divergence is not None:
                raise ChaosError(f"the bits differ; both runs are kept in {folder}", ExitCode.MISMATCH)
            _forget(url, storm_id)
            number += 1
        if experiment.store:  # nothing else is below the prefix
            store = open_store(url)
            store.delete_many([info.key for info in store.list("")])
    shutil.rmtree(folder, ignore_errors=True)
    if missed := [name for name in experiment.faults if all(name in storm.missed for storm in experiment.storms)]:
        raise ChaosError(
            f"the training was over before {', '.join(missed)} could happen; give it more "
            f"{'steps in train.arguments' if experiment.is_script else '--steps'}, or fewer --faults",
            ExitCode.USAGE,
        )


def _left_out(experiment: Chaos, *, proxied: bool) -> dict[str, str]:
    """The faults that are impossible here, with the reasons."""
    parallel, reasons = load_spec(experiment.spec, _changes(experiment)).parallel, {}
    for name in experiment.faults:
        fault = FAULTS[name]
        if fault.of_store and not proxied:
            reasons[name] = "nothing can stand in front of a folder; pip install 'holdfast[chaos]' for an S3 here"
        elif fault.ranks > parallel.processes:
            reasons[name] = f"it takes {fault.ranks} ranks, and parallel.processes is {parallel.processes}"
        elif fault.excuses == ExitCode.OUT_OF_MEMORY and parallel.auto:
            reasons[name] = "with parallel.auto another layout follows, of other bits"
        elif reason := fault.refused():
            reasons[name] = reason
    return reasons


def _forget(url: str, run_id: str) -> None:
    """Delete an equal run's data, which would fill the store in an hour of storms."""
    store = open_store(url)
    store.delete_many([info.key for info in store.list(layout.run(run_id))])


@dataclass(frozen=True)
class _Site:
    """The folder, the store and the proxy of the runs."""

    folder: Path
    url: str  # root of their store
    environment: dict[str, str] = field(default_factory=dict)  # variables to reach the store
    proxy: FaultyProxy | None = None  # in front of the store, if possible


def _trained(
    experiment: Chaos, site: _Site, salt: str, planned: Sequence[Planned], seed: int, tell: Callable[[object], None]
) -> tuple[str, TrainingResult | ScriptResult, list[Survived], int]:
    length = f"{experiment.steps} steps" if experiment.steps else "all steps of its script"
    tell(f"{salt}: {experiment.spec}, {length}")
    changes = _changes(experiment)
    flags = [word for change in changes for word in ("--set", change)]
    command = [
        sys.executable,
        "-m",
        "holdfast.pipelines.cli",
        "run",
        str(experiment.spec),
        "--backend",
        "local",
        *flags,
    ]
    folder = site.folder
    run = Run(
        [*command, "--store", site.url, "--salt", salt], folder / "home", site.environment, folder / f"{salt}.log"
    )
    folder.mkdir(parents=True, exist_ok=True)
    survived = run.go(planned, site.proxy, seed, tell)
    local_run = _identified(experiment, site.url, salt)
    read = read_script_result if experiment.is_script else read_result
    result: TrainingResult | ScriptResult | None = read(local_run.store, local_run.run_id)
    if result is None:
        raise ChaosError(f"{salt}: the command ended with {run.code}, and there is no result; see {run.log}", 1)
    return local_run.run_id, result, survived, run.commands


def _identified(experiment: Chaos, url: str, salt: str) -> LocalRun:
    return identified(load_spec(experiment.spec, _changes(experiment)), url, salt)


def _changes(experiment: Chaos) -> list[str]:
    """Settings of both runs: short, restarted immediately, saved often, and not served. A script keeps its own steps
    and saves, and is not verified before. The user's settings come last.
    """
    if experiment.is_script:
        restarts = "cluster.restarts={budget: 1000, backoff_seconds: 0}"
        return ["train.log_every=1", "train.verify_steps=0", restarts, *experiment.overrides]
    return [
        f"training.steps={experiment.steps}",
        f"training.log_every={max(1, experiment.steps // 100)}",
        f"checkpoint.every_steps={max(1, experiment.steps // 10)}",
        "cluster.restarts={budget: 1000, backoff_seconds: 0}",
        "serving={}",
        *experiment.overrides,
    ]


@contextlib.contextmanager
def _store(experiment: Chaos, folder: Path) -> Iterator[_Site]:
    """The folder and the store of the runs, with the environment to reach it, and a proxy in front of it if possible.

    A named store is used under a new prefix. The default is a mock of S3 on this machine if it is installed, otherwise
    a folder, which no proxy can cover.
    """
    location = experiment.store or ""
    if location.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        if not endpoint.startswith("http://"):
            raise MissingError(
                f"--store {location}: a proxy can stand in front of an http:// endpoint only; set AWS_ENDPOINT_URL to "
                "one of an S3 to try it on, or leave --store out"
            )
        with FaultyProxy(endpoint, seed=experiment.seed) as proxy:
            yield _Site(folder, f"{location.rstrip('/')}/{folder.name}", _through(proxy), proxy)
        return
    if location or find_spec("moto") is None:
        url = f"{store_root(location).rstrip('/')}/{folder.name}" if location else (folder / "store").as_uri()
        yield _Site(folder, url)
        return
    import boto3

    from holdfast.pipelines.chaos.s3 import S3Server

    with S3Server() as endpoint, FaultyProxy(endpoint, seed=experiment.seed) as proxy, _environment(endpoint):
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield _Site(folder, f"s3://{BUCKET}", _through(proxy), proxy)


def _through(proxy: FaultyProxy) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": proxy.url, "AWS_ENDPOINT_URL_S3": proxy.url}


@contextlib.contextmanager
def _environment(endpoint: str) -> Iterator[None]:
    """Point this process and its children to the mock of S3, without settings of any other one."""
    variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_S3": endpoint}
    saved = dict(os.environ)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def draw_seed() -> int:
    """A random default seed."""
    return random.SystemRandom().randrange(10**6)
