"""Verification of a training script: whether it resumes with the bits of an undisturbed run.

One run makes some steps in one launch. Another one is stopped on the way, and resumes in a new launch. Rows, tensors
and plain values after the last step are compared.
"""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.tools.difference import differences
from holdfast.code import fetch_code
from holdfast.code.packages import installed_packages
from holdfast.components.train.following import STEP
from holdfast.components.train.step import run_gang
from holdfast.launch import choose_launcher
from holdfast.launch.launches import newest_launch
from holdfast.runtime.environment import log_dir
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.state import TREE
from holdfast.script.tree import StateError, differing_paths, from_bytes
from holdfast.spec import Spec, run_id
from holdfast.spec.identity import digest
from holdfast.store import Store, layout
from holdfast.telemetry import Row, emit, read_history, recording
from holdfast.telemetry.events import ScriptVerification
from holdfast.telemetry.exactness import (
    Exactness,
    Resumption,
    find_verification,
    read_exactness,
    write_exactness,
    write_verification,
)
from holdfast.telemetry.history import is_pure

log = logging.getLogger("holdfast.train")


def nothing_saved(spec: Spec) -> str:
    """The warning for a script that ended without a checkpoint."""
    return (
        f"{spec.train.script} saved nothing: it never called session.restore and session.step, so a failure starts it "
        "from the beginning; add the lines of docs/your-own-code.md"
    )


def verify_script(
    spec: Spec,
    dataset_id: str,
    store: Store,
    steps: int,
    resume_at: int | None = None,
    salt: str = "",
    tell: Callable[[float, int], None] = lambda *_: None,
) -> Exactness:
    """Run the script of a spec for `steps` steps without and with stops, and compare. Without `resume_at` it stops in
    the middle, and, in another run, at the end of an epoch. A shorter script is verified for the steps that it makes.
    The runs are deleted. `tell` receives the seconds of the first launch and the number of stopped runs that follow.
    The launches of a stopped run make the same steps once, and start faster. Raises what `run_gang` raises, and
    StateError for a script whose length changes."""
    began = time.monotonic()
    train = spec.train.model_copy(update={"determinism": "exact"})
    checkpoint = spec.checkpoint.model_copy(update={"digest_every": 1})
    spec = spec.model_copy(update={"train": train, "checkpoint": checkpoint})

    calm, *stopped = (
        run_id(spec, dataset_id, f"{salt} {name}") for name in ("calm", "stopped", "stopped after an epoch")
    )
    launcher = choose_launcher(spec, log_dir(calm))

    def run(identity: str, stop_at: int) -> int | None:
        assignment = ScriptAssignment.of(spec, identity, dataset_id).model_copy(update={"stop_at": stop_at})
        run_gang(spec, assignment, store, launcher)
        return newest_step(store, identity)

    with ExitStack() as locks:  # one launcher, whose server keeps what it has imported
        for identity in (calm, *stopped):
            locks.enter_context(launcher.only_one(identity))
            locks.callback(_delete, store, identity)
            _delete(store, identity)  # of a verification that was killed
        if (last := run(calm, steps)) is None:
            return Exactness(code=str(spec.code), skipped=nothing_saved(spec))
        if last < max(2, (resume_at or 0) + 1):
            skipped = f"the script ended at step {last}: it cannot be stopped before; give it more steps"
            return Exactness(code=str(spec.code), skipped=skipped)
        stops = [resume_at] if resume_at is not None else stops_of(read_history(store, calm), last)
        tell(time.monotonic() - began, len(stops))
        found = []
        for identity, stop in zip(stopped, stops, strict=False):
            for stop_at in (stop, last):
                if (reached := run(identity, stop_at)) != stop_at:
                    raise StateError(
                        f"the script ended at step {reached}, and at step {last} before: its length changes"
                    )
            found.append(compare_runs(store, calm, identity, last, stop))
        return Exactness(code=str(spec.code), resumptions=tuple(found), seconds=time.monotonic() - began)


def require_verified(spec: Spec, dataset_id: str, store: Store, identity: str) -> None:
    """Verify the script of a run with `determinism: exact` before its first launch. A result of the same code in the
    same environment is used again. The result is recorded. Raises NotExactError, and what `verify_script` raises."""
    steps = spec.train.verify_steps
    if spec.train.determinism != "exact" or not steps or newest_launch(store, identity):
        return
    known = read_exactness(store, identity)
    if known is not None and (known.is_exact or known.skipped):
        return
    key = verification_key(spec, dataset_id)
    if (known := find_verification(store, key)) is None or not known.is_exact:
        known = _verified(spec, dataset_id, store, identity)
        if known.is_exact:
            write_verification(store, key, known)
    else:
        log.info("run %s: %s, for run %s with the same code and environment", identity, known.text, known.run_id)
    write_exactness(store, identity, known)
    if known.skipped:
        log.warning("run %s: %s", identity, known.text)
    else:
        known.require()


def verification_key(spec: Spec, dataset_id: str) -> str:
    """Digest of the code, its arguments and data, and the environment that a verification holds for."""
    cluster = spec.cluster
    return digest(
        {
            "run": run_id(spec, dataset_id, ""),  # code, arguments, inputs and dataset
            "steps": spec.train.verify_steps,
            "parallel": spec.parallel.model_dump(mode="json"),
            "cluster": [cluster.accelerator, cluster.nodes.max, cluster.image, cluster.environment],
            "environment": [installed_packages(), platform.python_version(), platform.machine()],
        }
    )


def _verified(spec: Spec, dataset_id: str, store: Store, identity: str) -> Exactness:
    """Verify the script for a run, and report it in the events of the run."""
    steps = spec.train.verify_steps
    folder = fetch_code(store, str(spec.code))
    if not any(b"holdfast" in path.read_bytes() for path in folder.rglob("*.py")):
        return Exactness(code=str(spec.code), skipped=nothing_saved(spec))

    def report(seconds: float | None = None, left: float = 0.0, result: str = "") -> None:
        event = ScriptVerification(steps=steps, seconds=seconds, seconds_left=left, result=result)
        log.info("run %s: %s", identity, event.text)
        with recording(store, identity, STEP):
            emit(event)

    report()

    def estimate(seconds: float, runs: int) -> None:
        report(seconds, seconds * runs)

    found = verify_script(spec, dataset_id, store, steps, salt=identity, tell=estimate)
    if not found.skipped:
        report(found.seconds, result=found.text)
    return found.model_copy(update={"run_id": identity})


def stops_of(rows: Sequence[Row], steps: int) -> list[int]:
    """The steps at which a run of `steps` steps is stopped: one within an epoch, and the end of the first epoch, if the
    rows say which epoch a step belongs to and there is one."""
    ends = [
        one["step"]
        for one, following in pairwise(rows)
        if one.get("epoch") != following.get("epoch") and 0 < one["step"] < steps
    ]
    within = [step for step in range(1, steps) if step not in ends] or ends
    middle = min(within, key=lambda step: (abs(step - steps // 2), -step))
    return [middle, *(end for end in ends[:1] if end != middle)]


def _delete(store: Store, identity: str) -> None:
    store.delete_many([info.key for info in store.list(layout.run(identity))])


def compare_runs(store: Store, calm: str, stopped: str, steps: int, resume_at: int) -> Resumption:
    """The differences between two runs by their checkpoints of the last step and their rows."""
    one, other = open_checkpoint(store, calm, steps), open_checkpoint(store, stopped, steps)
    found = differences(one, other)
    tensors = [difference.name for difference in found.tensors] + [*found.only_one, *found.only_other, *found.unlike]
    trees = [name for name in one.tensors if name.partition("/")[0] == TREE and name in other.tensors]  # one per rank
    values = [path for name in trees for path in differing_paths(_plain(one, name), _plain(other, name))]
    named = [name for name in tensors if name not in trees]
    return Resumption(
        steps=steps,
        resumed_at=resume_at,
        rows=tuple(_rows(store, calm, stopped, resume_at)),
        values=tuple(values),
        tensors=tuple(sorted(set(named))),
    )


def _plain(checkpoint: Checkpoint, name: str) -> object:
    return from_bytes(checkpoint.tensor(name), name)["items"]


def _rows(store: Store, calm: str, stopped: str, resume_at: int) -> list[str]:
    """The metrics of the first row that differs, in words."""
    pairs = zip(read_history(store, calm), read_history(store, stopped), strict=False)
    for mine, theirs in pairs:
        if names := _differing(mine, theirs):
            when = "before the stop" if mine["step"] <= resume_at else "after the resume"
            return [f"{name} of step {mine['step']} ({when})" for name in names]
    return []


def _differing(mine: Row, theirs: Row) -> Sequence[str]:
    names = [name for name in {**mine, **theirs} if is_pure(name) and name != "state_digest"]
    return [name for name in names if mine.get(name) != theirs.get(name)]
