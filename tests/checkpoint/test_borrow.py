"""A run that begins with the bytes of another one saves everything itself, also what never changes."""

from __future__ import annotations

from pathlib import Path

from holdfast.components.checkpoint import Attempt, Checkpointer, Retention, open_checkpoint
from holdfast.components.checkpoint.attempts import claim_attempt, list_attempts
from holdfast.components.checkpoint.borrow import borrow
from holdfast.components.checkpoint.keeping import checkpoint_steps
from holdfast.components.checkpoint.lineage import newest_step
from holdfast.components.checkpoint.tools import collect_now, verify
from holdfast.components.store import layout, open_store
from tests.checkpoint.saving import DESCRIBE, RUN, blank, checkpointer, same, save, state, whole


def test_the_first_save_after_a_borrowed_checkpoint_refers_to_nothing_of_the_other_run(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    save(checkpointer(store), 3)
    borrow(store, RUN, 3, "child")
    writer = Checkpointer(store, Attempt("child", 2), Retention(9), describe=DESCRIBE)
    boxes = blank(whole(state(0)))
    assert writer.restore(boxes, lambda _: None) == 3
    assert same(boxes, whole(state(3)))
    save(writer, 6)  # `frozen` is what it was
    writer.close()
    assert open_checkpoint(store, "child", 6).manifest.holder == "child"
    store.delete_many([info.key for info in store.list(layout.run(RUN))])
    assert verify(store, "child", 6).intact


def test_to_borrow_again_changes_nothing_of_a_run_that_has_gone_on_and_keeps_its_first_checkpoint_no_longer(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}")
    save(checkpointer(store), 3)
    first = borrow(store, RUN, 3, "child")
    writer = Checkpointer(store, claim_attempt(store, "child"), Retention(1), describe=DESCRIBE)
    assert writer.restore(blank(whole(state(0))), lambda _: None) == 3
    save(writer, 6)
    writer.close()
    collect_now(store, "child", Retention(1))
    assert checkpoint_steps(store, "child") == [6]
    before = [number for number, _ in list_attempts(store, "child")]
    assert borrow(store, RUN, 3, "child") == first
    assert [number for number, _ in list_attempts(store, "child")] == before, "a gang that runs is not fenced off"
    assert checkpoint_steps(store, "child") == [newest_step(store, "child")] == [6]
