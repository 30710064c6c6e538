"""Replay of a run: computes its steps again and compares them bit by bit with its record.

It compares the history (loss, gradient norm, learning rate, tokens, samples, recorded state digests; for a script, all
its metrics) and the digests of the remaining checkpoints. It reads the run's store and changes nothing there.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint import Manifest, list_attempts, read_manifest
from holdfast.checkpoint.attempts import read_attempt
from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.code.resolve import require_known_code
from holdfast.components.train.step import GangError
from holdfast.engines.assignment import Assignment
from holdfast.launch.emitters import script_arguments, script_environment
from holdfast.launch.interface import Job
from holdfast.launch.launches import read_launch
from holdfast.launch.local import LocalLauncher
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, MissingError, PlanChangedError, Problem, SpecError
from holdfast.spec.functions import code_arguments, rank_functions, require_functions
from holdfast.spec.json_parsing import parse_json_lines
from holdfast.spec.plan import Segment
from holdfast.store import Store
from holdfast.telemetry import Row, read_history
from holdfast.telemetry.history import is_pure

LOOK_SECONDS = 0.5  # between two reads of the ranks' progress


@dataclass(frozen=True)
class StepDifference:
    """A value of a step that differs from the record."""

    name: str
    recorded: Any
    computed: Any


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay."""

    start: int  # step of the checkpoint that it began from; 0: the first state
    last: int
    figures: int  # that were compared
    digests: int  # state digests that were compared
    plan: str  # plan of the run, as text
    first: int | None  # the first step that differs
    differing: tuple[StepDifference, ...]  # at that step

    @property
    def none(self) -> bool:
        """Whether all compared values are the same, bit for bit."""
        return self.first is None


def replay_steps(
    store: Store,
    run_id: str,
    spec: Spec,
    first: int,
    last: int,
    *,
    anyway: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
    losses: Path | None = None,
) -> ReplayResult:
    """Compute the steps `first` to `last` of a run of `spec` again, on this machine, from the checkpoint before them.
    `progress` receives the number of finished steps and of all steps. `losses` is a folder where the ranks write the
    token losses of the step `last` (see `token_losses`). Call it from the main thread.

    Raises:

    - SpecError for a training script with `determinism: off`, unless `anyway`.
    - DataError for steps that were not committed, or were computed under two plans.
    - MissingError if no state is left to begin from.
    - PlanChangedError if this machine differs from that of the run, unless `anyway`.
    - GangError if the ranks fail.
    """
    if spec.train.script is not None and spec.train.determinism == "off" and not anyway:
        message, remedy = "promises nothing about the bits of a script", "say --anyway to compute its steps regardless"
        raise SpecError([Problem("train.determinism", "off", message, remedy)])
    newest = newest_step(store, run_id)
    if newest is None or not 1 <= first <= last <= newest:
        raise DataError(f"run {run_id} has the committed steps 1 to {newest or 0}, and not all of {first} to {last}")
    manifest = read_manifest(store, run_id, newest)
    start = max((step for step in counted_steps(store, run_id) if step < first), default=0)
    launch, ranks = _computed_by(store, manifest, start, last)
    segment = _segment(manifest, start, last)
    recorded = read_launch(store, run_id, launch).assignment
    with temporary_folder("replay") as name:
        folder = Path(name)
        results, plan = folder / "rows.jsonl", folder / "plan.json"
        results.touch()
        command = ["--of", run_id, "--launch", str(launch)]
        command += ["--root", store.url, "--from-step", str(start), "--to-step", str(last), "--results", str(results)]
        if start:  # the ranks open it by its step, and its root may be replaced by then
            command += ["--state-digest", read_manifest(store, run_id, start).state_digest]
        if not anyway:
            plan.write_text(segment.plan.model_dump_json())
            command += ["--plan", str(plan)]
        if losses is not None:
            command += ["--losses", str(losses)]
        job = _job(spec, run_id, launch, ranks, command, recorded)
        with _watched(results, last - start, progress), closing(LocalLauncher(folder)) as launcher:
            ending = launcher.run(job)
        if ending.code == PlanChangedError.exit_code:
            log = "\n".join(ending.log_tail)  # each rank prints it
            raise PlanChangedError(log[max(0, log.find("this machine computes")) :].partition("\n")[0])
        if ending.code:
            tail = "\n".join(f"    {line}" for line in ending.log_tail)
            raise GangError(f"the replay ended ({ending.reason}); the end of its log:\n{tail}", ending.code)
        computed = parse_json_lines(results.read_bytes(), str(results))
    return _compared(store, run_id, computed, start, last, segment)


def _job(spec: Spec, run_id: str, launch: int, ranks: int, command: Sequence[str], recorded: Mapping[str, Any]) -> Job:
    """The job of a replay of `launch`, whose assignment is `recorded`. `command`: the arguments of a rank. Raises
    MissingError for code that is not of this machine."""
    source = f"launch {launch} of run {run_id}"
    threads, environment = spec.parallel.threads, dict[str, str]()
    if spec.train.script is not None:
        require_known_code(spec, f"run {run_id}")
        module, own = "holdfast.audit.replay_script_rank", script_arguments(spec)
        environment = script_environment(spec)
    else:
        assignment = Assignment.recorded(recorded, source)
        if functions := rank_functions(assignment):
            require_known_code(spec, f"run {run_id}")
            require_functions(spec, json.dumps(functions), f"the metadata of run {run_id}")
        module, own = "holdfast.audit.replay_rank", code_arguments(spec.code, functions)
        threads = assignment.parallel.threads
    return Job(
        name=f"replay-{run_id}",
        run_id=run_id,
        launch=launch,
        command=["-m", module, *command, *own],
        processes=ranks,
        threads=threads,
        grace_seconds=5,
        cluster=spec.cluster,
        environment=environment,
    )


def _computed_by(store: Store, manifest: Manifest, start: int, last: int) -> tuple[int, int]:
    """The launch that computed the steps up to `last`, and its number of ranks. Raises MissingError for steps that
    this run did not compute."""
    owner = [attempt for after, attempt in manifest.history if after < last]
    claimed = read_attempt(store, manifest.run_id, owner[-1]) if owner else {}
    first = list_attempts(store, manifest.run_id)[0][0]
    taken_in = start == 0 and not read_attempt(store, manifest.run_id, first).get("launch")
    if taken_in or not claimed.get("launch"):
        raise MissingError(
            f"run {manifest.run_id} began with a state of another run, or of other software, and no checkpoint before "
            "the steps is left: there is nothing to begin from; replay them in the run that computed them"
        )
    return int(claimed["launch"]), int(claimed["world_size"])


def _segment(manifest: Manifest, start: int, last: int) -> Segment:
    """The one plan of the steps above `start` up to `last`. Raises DataError for several plans, or none."""
    if not manifest.segments:
        raise DataError(f"run {manifest.run_id} has no plan recorded: nothing says what to compare this machine with")
    inside = [segment.from_step for segment in manifest.segments if start < segment.from_step < last]
    if inside:
        raise DataError(
            f"the plan of run {manifest.run_id} changed after step {', '.join(map(str, inside))}, and the replay would "
            f"begin at step {start}: ask for steps of one plan, with a checkpoint of it before them"
        )
    return [segment for segment in manifest.segments if segment.from_step <= start][-1]


def _compared(store: Store, run_id: str, computed: list[Row], start: int, last: int, segment: Segment) -> ReplayResult:
    recorded = {row["step"]: dict(row) for row in read_history(store, run_id, after=start)}
    if missing := [row["step"] for row in computed if row["step"] not in recorded]:
        raise DataError(f"run {run_id} has no record of step {missing[0]}: there is nothing to compare a replay with")
    for step in counted_steps(store, run_id):
        if start < step <= last:
            recorded.setdefault(step, {})["state_digest"] = read_manifest(store, run_id, step).state_digest
    figures, digests = 0, 0
    for row in computed:
        there = recorded.get(row["step"], {})
        known = [name for name in row if name in there and is_pure(name)]
        figures, digests = figures + len(known), digests + ("state_digest" in known)
        if differing := [StepDifference(name, there[name], row[name]) for name in known if there[name] != row[name]]:
            return ReplayResult(start, last, figures, digests, segment.plan.summary, row["step"], tuple(differing))
    return ReplayResult(start, last, figures, digests, segment.plan.summary, None, ())


@contextmanager
def _watched(results: Path, steps: int, progress: Callable[[int, int], None]) -> Iterator[None]:
    """Report the number of rows while the ranks compute."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(LOOK_SECONDS):
            progress(results.read_bytes().count(b"\n"), steps)

    thread = threading.Thread(target=watch, name="replay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
