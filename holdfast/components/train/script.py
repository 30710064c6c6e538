"""Training by a script: the gang, events and restarts of Holdfast's own loop, with the user's code in the ranks."""

import logging
import time

from holdfast.checkpoint import list_attempts, newest_segments, read_manifest
from holdfast.checkpoint.attempts import attempt_began
from holdfast.checkpoint.lineage import newest_step
from holdfast.components.train.exactness import nothing_saved, require_verified
from holdfast.components.train.following import recorded_training
from holdfast.components.train.result import ScriptResult, read_script_result
from holdfast.components.train.step import run_gang
from holdfast.launch import choose_launcher
from holdfast.model.verified import ExportRecord
from holdfast.runtime.environment import log_dir
from holdfast.script.assignment import ScriptAssignment
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.telemetry import emit, read_history
from holdfast.telemetry.events import WarningIssued
from holdfast.telemetry.run_metadata import write_run_metadata

log = logging.getLogger("holdfast.train")


def train_script(spec: Spec, dataset_id: str, store: Store, salt: str = "", *, replan: bool = False) -> ScriptResult:
    """Run the script of (spec, dataset_id, salt) to its end, from its newest checkpoint. Raises what
    `step.train` raises."""
    identity = run_id(spec, dataset_id, salt)
    launcher = choose_launcher(spec, log_dir(identity))
    with launcher.only_one(identity):
        if (finished := read_script_result(store, identity)) is not None:
            log.info("run %s: already trained, step %d", identity, finished.step)
            return finished
        write_run_metadata(store, identity, spec, dataset_id, salt)
        require_verified(spec, dataset_id, store, identity)
        with recorded_training(spec, identity, dataset_id, store) as ended:
            run_gang(spec, ScriptAssignment.of(spec, identity, dataset_id), store, launcher, replan)
            result = _finish(spec, identity, dataset_id, store)
            ended(f"step {result.step}")
        log.info("run %s: trained, step %d", identity, result.step)
        return result


def _finish(spec: Spec, identity: str, dataset_id: str, store: Store) -> ScriptResult:
    """Write the result: the newest checkpoint, which the ranks saved at their end, and its export."""
    step = newest_step(store, identity)
    attempts = [number for number, _ in list_attempts(store, identity)]
    result = ScriptResult(
        run_id=identity, code=str(spec.code), dataset_id=dataset_id, step=step or 0, attempts=len(attempts)
    )
    if step is None:
        message = nothing_saved(spec)
        log.warning("run %s: %s", identity, message)
        emit(WarningIssued(message=message))
    else:
        manifest = read_manifest(store, identity, step)
        folder = layout.export(identity, step, manifest.state_digest)
        rows = read_history(store, identity, after=step - 1)
        update = {
            "loss": rows[-1].get("loss") if rows else None,
            "checkpoint": layout.checkpoint(identity, step),
            "state_digest": manifest.state_digest,
            "segments": newest_segments(store, identity),
            "seconds": time.time() - attempt_began(store, identity, attempts[0]),
        }
        key = layout.export_record(folder)
        try:
            update |= {"export": folder, "export_digest": ExportRecord.parse(store.get(key), key).digest}
        except MissingError:
            log.info("run %s: the script exported nothing", identity)
        result = result.model_copy(update=update)
    store.put_if_absent(layout.result(identity), result.model_dump_json(indent=2).encode())
    return result
