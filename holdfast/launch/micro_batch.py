"""Records of `training.micro_batch: auto`: the choice of a run for each layout, and the trials that led to it.

The choice is created once, and every later launch uses it. A mark is written before a candidate is tried, so that a
candidate that ended the processes of a trial is not tried again.
"""

import logging

from pydantic import BaseModel, FiniteFloat

from holdfast.checkpoint import newest_segments
from holdfast.launch.launches import read_exit
from holdfast.planning.auto import with_micro_batch
from holdfast.spec import ExitCode, Spec, digest, rules
from holdfast.spec.parallel import Parallel
from holdfast.spec.plan import settings_of
from holdfast.spec.training import Training
from holdfast.store import Store, layout
from holdfast.store.json_reading import find_json, read_json

log = logging.getLogger("holdfast.train")

SIZE = "training.micro_batch"
STOPPED = (ExitCode.PREEMPTED, ExitCode.TERMINATED, ExitCode.INTERRUPTED)  # ends that say nothing about a candidate


class MicroBatchChoice(BaseModel, extra="forbid", frozen=True):
    """The micro-batch of a run under one layout, and what was measured."""

    micro_batch: int
    seconds: dict[int, FiniteFloat]  # of a step, by micro-batch
    unfit: int | None = None  # the smallest candidate that needed more memory than there is
    device: str = ""

    @property
    def words(self) -> str:
        """The choice, and the seconds of a step with each candidate."""
        measured = ", ".join(f"{size}: {seconds:.3g} s" for size, seconds in sorted(self.seconds.items()))
        unfit = f"; {self.unfit} does not fit" if self.unfit is not None else ""
        return f"{self.micro_batch} by trial (a step with {measured}{unfit})"


class _Mark(BaseModel):
    """The beginning of the trial of a candidate."""

    launch: int


def layout_key(training: Training, parallel: Parallel, accelerator: str, nodes: int) -> str:
    """The identity of a layout without its micro-batch."""
    settings = settings_of(training, parallel, accelerator, nodes)
    return digest({name: value for name, value in settings.items() if name != SIZE})


def find_choice(store: Store, run_id: str, spec: Spec) -> MicroBatchChoice | None:
    """The recorded choice of a run for the layout of `spec`. None before its trial. Raises DataError for a damaged
    record."""
    key = layout_key(spec.training, spec.parallel, spec.cluster.accelerator, spec.cluster.nodes.max)
    return find_json(store, layout.micro_batch(run_id, key), MicroBatchChoice)


def record_choice(store: Store, run_id: str, key: str, choice: MicroBatchChoice) -> MicroBatchChoice:
    """Record the choice unless there is one. Returns the recorded one."""
    name = layout.micro_batch(run_id, key)
    store.put_if_absent(name, choice.model_dump_json(indent=2).encode())
    return read_json(store, name, MicroBatchChoice)


def begin_candidate(store: Store, run_id: str, key: str, size: int, launch: int) -> bool:
    """Mark that the trial of a candidate begins. False if an earlier launch ended during it, for a reason other than a
    stop request: the candidate then counts as too large."""
    name = layout.micro_batch(run_id, key, size)
    mark = find_json(store, name, _Mark)
    if mark is not None and mark.launch != launch:
        ended = read_exit(store, run_id, mark.launch)
        if ended is None or ended.code not in STOPPED:
            return False
    store.put(name, _Mark(launch=launch).model_dump_json().encode())
    return True


def end_candidate(store: Store, run_id: str, key: str, size: int) -> None:
    """Remove the mark of a candidate: its trial ended without ending the launch."""
    store.delete(layout.micro_batch(run_id, key, size))


def with_recorded_micro_batch(spec: Spec, run_id: str, store: Store, *, replan: bool = False) -> Spec | None:
    """The spec with the micro-batch that `auto` stands for in this run. None if a trial is needed. Other specs are
    returned unchanged.

    A run continues with the micro-batch of its newest checkpoint. `replan` looks only at the choice for this layout.
    """
    if not spec.training.auto_micro_batch:
        return spec
    if not replan and (segments := newest_segments(store, run_id)):
        resolved = with_micro_batch(spec, int(segments[-1].plan.settings[SIZE] or 1))
        if spec.training.determinism != "off" or not rules.problems(resolved):
            return resolved  # a changed layout of a run that promises bits is refused later, with its differences
    choice = find_choice(store, run_id, spec)
    if choice is None:
        return None
    log.info("micro_batch: auto is %s", choice.words)
    return with_micro_batch(spec, choice.micro_batch)
