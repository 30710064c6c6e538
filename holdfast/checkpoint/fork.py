"""A fork: a run that begins from a checkpoint of another run and shares its bytes. Its first root names indexes and
packs of the run that wrote them.

No tensor is copied. The borrowed root is pinned in the run that holds its bytes, under the name of the borrowing run.
So its bytes stay even when a newer attempt replaces it. Later saves of the new run are stored with it and reference
nothing borrowed. It needs the other run only as long as it keeps that first checkpoint. Metrics, which are small, are
copied, so that its history is complete.
"""

import json
import time

from holdfast.checkpoint.attempts import claim_attempt
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import read_manifest
from holdfast.checkpoint.retention import pin_bytes
from holdfast.store import Store, layout
from holdfast.telemetry import read_history, segment


def pin_name(borrower: str) -> str:
    """The name of the pin that keeps a checkpoint for the run `borrower`."""
    return f"forked-{borrower}"


def fork_checkpoint(store: Store, run_id: str, step: int, borrower: str) -> str:
    """Make the checkpoint at `step` of a run the first checkpoint of the run `borrower`, which has no other. Return its
    state digest. Repeating is safe, also when the borrower has continued and no longer keeps that first one. Raises
    MissingError when there is no such checkpoint, or a newer attempt has replaced it, and what reading it raises."""
    if newest_step(store, borrower) is not None:  # the root that it began with is pinned already
        return read_manifest(store, run_id, step).state_digest
    data = pin_bytes(store, run_id, step, pin_name(borrower), f"run {borrower} begins with it")
    source = Manifest.from_bytes(data, layout.checkpoint(run_id, step))
    attempt = claim_attempt(store, borrower)
    rows = [row for row in read_history(store, run_id) if row["step"] <= step]
    for key, text in segment(borrower, 0, rows, attempt.number).items():
        store.put(key, text.encode())
    parent = {"run_id": run_id, "step": step, "state_digest": source.state_digest, "created": time.time()}
    store.put(layout.parent(borrower), json.dumps(parent).encode())
    number = attempt.number
    root = source.model_copy(
        update={
            "run_id": borrower,
            "attempt": number,
            "created": time.time(),
            "history": ((0, number),),
            "bytes_of": source.holder,
            "segments": tuple(past.model_copy(update={"attempt": number}) for past in source.segments),
        }
    )
    store.put_if_absent(layout.checkpoint(borrower, step), root.to_bytes())
    return source.state_digest
