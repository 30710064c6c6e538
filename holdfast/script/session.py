"""Session of a training script: restore, step, log, save, export.

In a managed launch, `holdfast.session()` returns a session that restores the newest checkpoint, saves when it is due,
and stops all ranks after the same step. Without one it returns a session that does nothing, so the same script runs on
its own. The session owns no loop, no model and no optimizer.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint import (
    Attempt,
    Checkpointer,
    Manifest,
    Retention,
    SaveOptions,
    StateDigest,
    digest_of,
    read_manifest,
)
from holdfast.checkpoint.lineage import newest_step
from holdfast.collectives import Gang
from holdfast.dataset import Dataset
from holdfast.launch.device import device_name, local_device
from holdfast.launch.exits import RankRecord
from holdfast.rank.checkpoint_policy import CheckpointPolicy, failures_before, near_tiers, upload_rate
from holdfast.rank.measure.energy_meter import Meter
from holdfast.rank.measure.phase_timer import PhaseTimeReporter
from holdfast.rank.plan import claim
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.randomness import make_deterministic
from holdfast.runtime.environment import cache_dir
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.data import DatasetRows
from holdfast.script.export import write_export
from holdfast.script.history import ScriptHistory
from holdfast.script.interface import PreemptionExit, Session, StopExit
from holdfast.script.plan import agree_on_plan
from holdfast.script.seeding import key_fetches, seed_all
from holdfast.script.state import ScriptState
from holdfast.script.tree import StateError
from holdfast.script.unreported import UnreportedUpdates
from holdfast.spec.errors import ExitCode, UserCodeError
from holdfast.spec.plan import Plan, require_plan
from holdfast.store import Store
from holdfast.telemetry import emit, phases
from holdfast.telemetry.channel import set_source
from holdfast.telemetry.events import AttemptBegan
from holdfast.telemetry.serving import showing_metrics

log = logging.getLogger("holdfast.script")

UNKNOWN_STEPS = 1 << 60  # a step that no run reaches: the script does not say how many it needs


@dataclass(frozen=True)
class Launched:
    """The launch that runs this process."""

    store: Store
    launch: int
    claimed: float  # unix seconds
    replan: bool
    assignment: ScriptAssignment
    code: str  # digest of the bundle
    leave: PreemptionSignal
    record: RankRecord
    inputs: Mapping[str, Path] = field(default_factory=dict)  # by name

    def session(self, seed: int | None, seed_rank: int | None) -> ManagedSession:
        """The session of the script."""
        return ManagedSession(self, seed, seed_rank)


class ManagedSession(Session):
    """The session of a rank in a managed launch."""

    managed = True

    def __init__(self, launched: Launched, seed: int | None = None, seed_rank: int | None = None) -> None:
        super().__init__(seed, seed_rank)
        self._launched, self._assignment = launched, launched.assignment
        self.run_id = self._assignment.run_id
        self.exact = self._assignment.determinism == "exact"
        make_deterministic(self._assignment.determinism, self._assignment.threads)
        self._seeds = self._seeds or self.exact
        if self.exact:
            key_fetches(self.seed, lambda: self.epoch, self._seed_rank)
        if self._seeds:
            seed_all(self.seed, "step", 0, self._seed_rank)
        self._stack = ExitStack()
        self._saved = -1  # the step saved last
        self._due: tuple[int, bool] = (-1, False)
        self._left = False  # all ranks leave
        self._steps: int | None = None
        self._dataset: Dataset | None = None

    def restore(self, *, per_rank: Mapping[str, Any] = {}, steps: int | None = None, **state: Any) -> int:
        """See Session."""
        launched, assignment = self._launched, self._assignment
        device, plan = self._meet()
        gang = self._gang
        claiming = partial(
            claim,
            launched.store,
            self.run_id,
            launched.launch,
            gang.size,
            plan,
            assignment.determinism,
            launched.replan,
        )
        attempt = gang.from_rank_0(claiming, Attempt)
        self.attempt = attempt.number
        set_source(f"rank {gang.rank}", launch=launched.launch, attempt=attempt.number, not_before=launched.claimed)
        launched.record.formed(attempt.number)
        launched.leave.listen()
        launched.leave.raise_if_stopping("before the state was loaded")

        phases.enter("restore")
        self._state = ScriptState(dict(state), dict(per_rank), gang)
        self._checkpointer = Checkpointer(
            launched.store,
            attempt,
            Retention.of(assignment.checkpoint, assignment.anomalies),
            describe={
                "dataset_id": assignment.dataset_id,
                "layout": {"engine": "script", "world_size": gang.size},
                "random": {"scheme": "keyed by step", "seed": self.seed},
            },
            plan=plan,
            options=SaveOptions(
                max_lag_steps=assignment.checkpoint.lag_steps,
                same_bits=self.exact,
                compress=assignment.checkpoint.compression == "lossless",
                upload_rate=upload_rate(assignment.checkpoint),
            ),
            gang=gang,
            near=near_tiers(launched.store, attempt, gang, assignment.checkpoint),
        )
        accept = partial(self._accept, plan)
        start = self._checkpointer.restore(self._state.boxes, lambda _: None, accept)
        if start:
            self._state.adopt()
        launched.leave.raise_if_stopping(f"with the state of step {start} loaded")
        self._step, self._saved, self._steps = start, start, steps
        self._begin(attempt, device, start, steps)
        self._next(start)
        return start

    def step(self, step: int, /, **metrics: float | Tensor) -> None:
        """See Session."""
        self._count(step)
        phases.enter("check", step)
        self.keep_listening()
        every = self._assignment.checkpoint.digest_every
        state_digest = self._state_digest(step) if every is not None and step % every == 0 else None
        lap = phases.lap()
        self._history.add(step, metrics, state_digest, lap, self.epoch if self._has_epochs else None)
        self._accounts.on_step(_Timed(step, lap))
        leaving = self._launched.leave.all_ranks_stopping()
        if step == self._assignment.stop_at:
            self.save(step)
            self._checkpointer.wait()
            raise StopExit(0)
        due = self.due(step) or leaving
        if due or self._checkpointer.near_due(step):
            self._save(committed=due)
        if leaving and (self._steps is None or step < self._steps):
            phases.enter("leave")
            self._checkpointer.wait()
            self._left = True
            raise PreemptionExit(step)
        self._next(step)

    def log(self, step: int, /, **metrics: float | Tensor) -> None:
        """See Session."""
        if self._step is None:
            raise StateError("session.log was called before session.restore")
        self._history.log(step, metrics)

    def save(self, step: int) -> None:
        """See Session."""
        if step != self._step:
            raise StateError(f"session.save({step}): the state is that of step {self._step}; call session.step first")
        if self._saved != step:
            self._save(committed=True)

    def due(self, step: int) -> bool:
        """See Session."""
        if self._due[0] != step:
            self._due = (step, self._policy.due(step))
        return self._due[1]

    def should_stop(self) -> bool:
        """See Session."""
        if not self._left and self._launched.leave.all_ranks_stopping():
            assert self._step is not None
            self.save(self._step)
            self._checkpointer.wait()
            self._left = True
        return self._left

    def export(self, what: nn.Module | str | Path | Callable[[Path], object], *, step: int | None = None) -> None:
        """See Session."""
        if not self._step or step not in (None, self._step):
            raise StateError(f"session.export after step {self._step or 0}: export after the last session.step")
        if self._left:
            log.info("stop requested: nothing is exported; the launch that makes the last step exports")
            return
        self.save(self._step)
        phases.enter("save")
        self._checkpointer.wait()
        self._gang.barrier()
        manifest = partial(read_manifest, self._launched.store, self.run_id, self._step)
        write_export(what, self.folder / "export", self._launched.store, manifest, self._gang)

    def input(self, name: str, default: str | Path | None = None) -> Path:  # noqa: ARG002
        """See Session."""
        if (path := self._launched.inputs.get(name)) is not None:
            return path
        declared = ", ".join(self._launched.inputs) or "none"
        raise StateError(f"session.input({name!r}): the spec has no such input ({declared}); add it to train.inputs")

    def dataset(
        self, global_batch: int, context: int, *, rank: int | None = None, ranks: int | None = None
    ) -> DatasetRows:
        """See Session."""
        rank, ranks = self._share(rank, ranks, global_batch)
        if not self._assignment.dataset_id:
            raise StateError("session.dataset: the run has no dataset; add the section data to the spec")
        if self._dataset is None:
            self._dataset = Dataset.open(self._launched.store, self._assignment.dataset_id, cache_dir())
        weights, shuffle = self._assignment.source_weights, self._assignment.shuffle
        batches = self._dataset.training(context, global_batch, self.seed, weights, shuffle)
        return DatasetRows(self._dataset, batches, rank, ranks)

    # For integrations and `holdfast.script.process`

    def newest_step(self) -> int:
        """The step that `restore` will load, as far as the store tells. Local tiers may have a newer one, so it raises
        StateError if the spec has them."""
        settings = self._assignment.checkpoint
        if settings.memory.every_steps is not None or settings.disk.every_steps is not None:
            raise StateError("this integration needs the step before it restores; remove checkpoint.memory and .disk")
        return newest_step(self._launched.store, self.run_id) or 0

    def resume_again(self, reason: str) -> NoReturn:
        """End this launch, so that the next one resumes from another checkpoint."""
        error = UserCodeError(f"{reason}; the next launch resumes")
        error.exit_code = ExitCode.SCRIPT_FAILED
        raise error

    @property
    def left(self) -> bool:
        """Whether all ranks leave before the last step, with a checkpoint."""
        return self._left

    def finish(self) -> None:
        """End a script that returned: save its last state and wait for the commit. Collective. Raises StateError if it
        made no step."""
        if self._step is None:
            return
        if self._step == 0:
            raise StateError(
                "the script called session.restore and ended without session.step; call it after each optimizer step"
            )
        phases.enter("leave")
        self.save(self._step)
        self._checkpointer.wait()
        if not self._left:
            if self._step == self._started:  # an earlier attempt died between its last commit and the collection
                self._checkpointer.collect_garbage(self._step)
            self._checkpointer.drop_local_tiers()

    def close(self, error: BaseException | None) -> None:
        """Release everything, after any end of the script."""
        phases.enter("leave")
        self._stack.__exit__(None if error is None else type(error), error, None)
        if self._folder is not None:
            self._folder.cleanup()

    def _meet(self) -> tuple[torch.device, Plan]:
        """Join the gang. Returns the device of this rank and the plan of the gang. Collective."""
        if self._step is not None:
            raise StateError("session.restore was called twice; give all objects in one call")
        if self.world_size > 1 and not dist.is_initialized():
            raise StateError("session.restore needs the process group: call torch.distributed.init_process_group first")
        phases.enter("meet")
        self._launched.leave.join()
        self._gang = Gang()
        device = local_device(self._assignment.accelerator)
        return device, agree_on_plan(self._assignment, device, self._gang)

    def _state_digest(self, step: int) -> str:
        """The digest of the state of all ranks after `step`. Collective."""
        held = self._state.live()
        self._state.require_equal(held, step)
        parts = self._gang.all_gather(digest_of(self._state.saved(held)), StateDigest)
        return str(sum(parts, StateDigest()))

    def _begin(self, attempt: Attempt, device: torch.device, start: int, steps: int | None) -> None:
        """Start what lasts until the end of the script."""
        assignment, gang, store = self._assignment, self._gang, self._launched.store
        self._started = start
        self._policy = CheckpointPolicy(
            assignment.checkpoint,
            start=start,
            steps=steps or UNKNOWN_STEPS,
            gang=gang,
            failures=failures_before(store, attempt, gang.size) if gang.rank == 0 else None,
        )
        self._history = ScriptHistory(
            self.run_id,
            attempt.number,
            start,
            keep=gang.rank == 0,
            steps=steps,
            log_every=assignment.log_every,
            diverges=self.exact,
        )
        self._checkpointer.on_commit = self._history.committed
        meter = Meter(device)
        if gang.rank == 0:
            self._stack.enter_context(showing_metrics(assignment.telemetry, self.run_id))
            began = AttemptBegan(
                attempt=attempt.number,
                world=gang.size,
                step=start,
                steps=steps or 0,
                host=socket.gethostname(),
                device=str(device),
                mfu_unavailable="the work of a script's step is not known",
                accelerator=device_name(device),
                energy_unavailable=meter.unknown,
                missing_metrics=meter.missing_metrics,
            )
            log.info("%s", began.text)
            if assignment.stop_at is None:  # a verification reports itself, and its runs are deleted
                emit(began)
        self._accounts = PhaseTimeReporter(gang.rank, gang.size, start, device, meter)
        self._stack.enter_context(self._accounts)
        self._stack.enter_context(closing(self._checkpointer))
        if self._checkpointer.near_start is not None:  # no checkpoint yet
            self._checkpointer.save(start, self._state.saved(self._state.live()), {})
        self._unreported = UnreportedUpdates(reports=gang.rank == 0, verifies=assignment.stop_at is not None)
        hook = register_optimizer_step_pre_hook(self._before_update)
        self._stack.callback(hook.remove)

    def _before_update(self, optimizer: object, *_: object) -> None:
        """Wait for the readers of the state before an optimizer changes it."""
        phases.enter("save")
        self._checkpointer.wait_for_staging()
        if self._step != self._started:
            phases.enter("optimizer")
            return
        phases.enter("script")
        self._unreported.count(optimizer)

    def _next(self, step: int) -> None:
        """Prepare the step after `step`."""
        if self._seeds:
            seed_all(self.seed, "step", step, self._seed_rank)
        if step == self._started:
            phases.enter("script", step)  # it may do anything before its first step, for any time
            return
        phases.enter("data", step)
        phases.enter("forward")

    def _save(self, *, committed: bool) -> None:
        assert self._step is not None
        held = self._state.live()
        self._state.require_equal(held, self._step)
        rows = self._history.segment(self._step)
        phases.enter("save")
        self._checkpointer.save(self._step, self._state.saved(held), {}, rows, committed=committed)
        if committed:
            self._saved = self._step
            self._policy.saved()

    def keep_listening(self) -> None:
        """Install the handler of SIGTERM again if a library has replaced it."""
        if threading.current_thread() is threading.main_thread() and not self._launched.leave.listens():
            log.warning("a library replaced the handler of SIGTERM; the one of Holdfast is installed again")
            self._launched.leave.listen()

    def _accept(self, plan: Plan, manifest: Manifest) -> None:
        require_plan(manifest.segments, plan, self._assignment.determinism, self._launched.replan)


@dataclass(frozen=True)
class _Timed:
    step: int
    lap: phases.Lap


launched: Launched | None = None  # set by `holdfast.script.process`
_session: Session | None = None


def session(*, seed: int | None = None, seed_rank: int | None = None) -> Session:
    """The session of this process: the same object each time.

    Call it before anything is drawn. `seed` is the seed of the run: each step then begins with generators that depend
    only on (seed, step, rank). Ranks with the same `seed_rank` draw the same numbers, as ranks of tensor parallelism
    must; the default is the rank.
    """
    global _session  # noqa: PLW0603 - a process has one
    if _session is None:
        _session = Session(seed, seed_rank) if launched is None else launched.session(seed, seed_rank)
    return _session


def current() -> Session | None:
    """The session that the script created, or None."""
    return _session
