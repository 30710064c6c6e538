"""A save that dies or fails at any of its store operations leaves a committed state, and the rerun ends the same."""

from __future__ import annotations

import itertools

import pytest

from holdfast.components.checkpoint import Manifest, claim_attempt
from holdfast.components.checkpoint.retention import checkpoint_steps
from holdfast.components.spec.errors import StoreUnreachableError
from holdfast.components.store import Store, layout
from tests.checkpoint.breaking_store import BreakingStore, Killed
from tests.checkpoint.saving import RUN, checkpointer, load, names, same, save, state, whole

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def attempt_to_the_end(store: Store, save_through: Store, upto: int = 12) -> None:
    """What a run does: claim, load the newest, save the steps that are missing."""
    number = claim_attempt(store, RUN).number
    manifest, boxes = load(store)
    done = manifest.step if manifest else 0
    if manifest:
        assert same(boxes, whole(state(done)))
    writer = checkpointer(save_through, number, keep_last=1, keep_every=6)
    if manifest:
        writer.adopt(manifest)
    for step in range(done + 3, upto + 1, 3):
        save(writer, step)
    if done == upto:
        writer.sweep(upto)


def ending(store: Store) -> tuple[list[int], str, set[str]]:
    """What must not depend on what happened on the way: steps, state, and that no pack is left over or missing."""
    steps = checkpoint_steps(store, RUN)
    manifests = [Manifest.from_bytes(store.get(layout.checkpoint(RUN, step)), "m") for step in steps]
    reached = {f"{pack}.pack" for manifest in manifests for pack in manifest.packs}
    return steps, manifests[-1].state_digest, reached ^ set(names(store, "packs"))


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "refused"])
def test_whatever_operation_breaks_a_committed_state_stays_and_the_rerun_ends_the_same(
    tmp_path_factory: pytest.TempPathFactory, kill: bool
) -> None:
    from holdfast.components.store import open_store

    reference = open_store(f"file://{tmp_path_factory.mktemp('store')}")
    attempt_to_the_end(reference, reference)
    undisturbed = ending(reference)
    assert undisturbed[0] == [6, 12]
    assert undisturbed[2] == set()

    for at in itertools.count():
        store = open_store(f"file://{tmp_path_factory.mktemp('store')}")
        breaking = BreakingStore(store, at, kill=kill)
        try:
            attempt_to_the_end(store, breaking)  # type: ignore[arg-type]
        except StoreUnreachableError:
            assert not kill
        if breaking.operations <= at:
            assert ending(store) == undisturbed
            break
        manifest, boxes = load(store)  # nothing torn, nothing half of one step and half of another
        assert names(store, "checkpoints/damaged") == []
        if manifest is not None:
            assert same(boxes, whole(state(manifest.step)))
        attempt_to_the_end(store, store)
        assert ending(store) == undisturbed, at
    assert at > 30


def test_a_killed_attempt_writes_nothing_more(folder_store: Store) -> None:
    breaking = BreakingStore(folder_store, 1, kill=True)
    save(checkpointer(breaking), 3)  # type: ignore[arg-type]
    with pytest.raises(Killed):
        breaking.put("k", b"")
    assert names(folder_store, "checkpoints") == []
