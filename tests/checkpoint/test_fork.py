"""A forked run saves all bytes itself, including tensors that never change."""

from pathlib import Path

from holdfast.checkpoint import Attempt, Checkpointer, Retention, open_checkpoint
from holdfast.checkpoint.attempts import claim_attempt, list_attempts
from holdfast.checkpoint.fork import fork_checkpoint, pin_name
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.retention import checkpoint_steps, pinned_steps
from holdfast.checkpoint.tools import collect_now, verify
from holdfast.store import Store, layout, open_store
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import DESCRIBE, RUN, blank, checkpointer, same, save, state, whole


def test_the_first_save_after_a_borrowed_checkpoint_refers_to_nothing_of_the_other_run(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    save(checkpointer(store), 3)
    fork_checkpoint(store, RUN, 3, "child")
    writer = Checkpointer(store, Attempt("child", 2), Retention(9), describe=DESCRIBE)
    boxes = blank(whole(state(0)))
    assert writer.restore(boxes, lambda _: None) == 3
    assert same(boxes, whole(state(3)))
    save(writer, 6)  # `frozen` is unchanged
    writer.close()
    assert open_checkpoint(store, "child", 6).manifest.holder == "child"
    store.delete_many([info.key for info in store.list(layout.run(RUN))])
    assert verify(store, "child", 6).intact


def test_a_repeated_fork_changes_nothing_of_a_child_that_has_trained(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}")
    save(checkpointer(store), 3)
    first = fork_checkpoint(store, RUN, 3, "child")
    writer = Checkpointer(store, claim_attempt(store, "child"), Retention(1), describe=DESCRIBE)
    assert writer.restore(blank(whole(state(0))), lambda _: None) == 3
    save(writer, 6)
    writer.close()
    collect_now(store, "child", Retention(1))
    assert checkpoint_steps(store, "child") == [6]
    before = [number for number, _ in list_attempts(store, "child")]
    assert fork_checkpoint(store, RUN, 3, "child") == first
    assert [number for number, _ in list_attempts(store, "child")] == before, "a gang that runs is not fenced off"
    assert checkpoint_steps(store, "child") == [newest_step(store, "child")] == [6]


def test_at_every_moment_of_borrowing_a_run_that_has_a_checkpoint_has_its_pin_its_parent_and_its_history(
    folder_store: Store,
) -> None:
    """A fork that dies before it writes the root creates no run. A collector removes nothing that the fork needs."""
    save(checkpointer(folder_store), 3)
    keys: list[str] = []

    def before(_: str, key: str) -> None:
        keys.append(str(key))
        if folder_store.stat(layout.checkpoint("child", 3)) is not None:
            assert pinned_steps(folder_store, RUN) == {3}
            assert folder_store.stat(layout.parent("child")) is not None

    fork_checkpoint(BreakingStore(folder_store, kill=False, before=before), RUN, 3, "child")
    before("", "")
    root = keys.index(layout.checkpoint("child", 3))
    assert keys.index(layout.pin(RUN, 3, pin_name("child"))) < root
    assert keys.index(layout.parent("child")) < root
    assert keys[root + 1 :] == [""]  # the root is written last
