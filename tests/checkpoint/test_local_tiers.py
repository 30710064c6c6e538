"""Local tiers: what they keep, which copies count, and what happens to a gang with damaged or useless copies."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoint import Checkpointer, Retention, TensorBox, claim_attempt
from holdfast.checkpoint.lineage import void_steps
from holdfast.checkpoint.local_tiers import tier
from holdfast.checkpoint.local_tiers.tier import TierLock, remove_stale
from holdfast.checkpoint.local_tiers.tier_set import TierSet
from holdfast.checkpoint.local_tiers.tier_writer import steps_in, whole_steps
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.collectives import Gang
from holdfast.store import Store, layout
from holdfast.store.file import FileStore
from tests.checkpoint.saving import DESCRIBE, RUN, blank, names, same, save, state, whole
from tests.spec.plans import plan_of

MEMORY = {"memory": 1}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of this node, for one test."""
    monkeypatch.setenv(tier.VARIABLE, str(tmp_path / "memory"))
    return tmp_path / "memory"


def gang(store: Store, every: dict[str, int] | None = None, disk: Path | None = None, **more: Any) -> Checkpointer:
    """The next gang of the run: one rank that keeps every step in memory."""
    attempt = claim_attempt(store, RUN)
    near = TierSet(store, attempt, Gang(), MEMORY if every is None else every, str(disk) if disk else None)
    return Checkpointer(store, attempt, Retention(100), describe=DESCRIBE, near=near, **more)


def begin(saver: Checkpointer) -> tuple[int, list[TensorBox]]:
    """Restore. Returns the step and the state at that step."""
    boxes = blank(whole(state(0)))

    def first(targets: Any) -> None:
        for box, source in zip(targets, whole(state(0)), strict=True):
            box.data.copy_(source.data)

    return saver.restore(boxes, first), boxes


def keep(saver: Checkpointer, step: int) -> None:
    """Keep a step in the local tier only, and wait until it is complete."""
    attachments = {layout.metrics(RUN, 0, step, saver._attempt.number): f"up to {step}"}
    saver.save(step, whole(state(step)), {"optimizer.step": step}, attachments, committed=False)
    saver.wait()


def near_store(memory: Path) -> FileStore:
    """The local store of the only writer."""
    (folder,) = (path for path in memory.iterdir() if path.is_dir())
    return FileStore(folder / "w00000")


def test_the_next_gang_resumes_from_a_local_copy_newer_than_the_newest_checkpoint(folder_store: Store) -> None:
    ranks = gang(folder_store)
    assert begin(ranks)[0] == 0
    save(ranks, 1)
    for step in (2, 3):
        keep(ranks, step)
    assert checkpoint_steps(folder_store, RUN) == [1]
    two = gang(folder_store)
    start, boxes = begin(two)
    assert start == 3
    assert same(boxes, whole(state(3)))
    assert two.near_start is not None
    assert two.near_start.scalars == {"optimizer.step": 3}
    assert names(folder_store, "metrics") == ["000000000-000000003.000001.jsonl"]  # before the first step


def test_a_resumed_local_copy_becomes_a_checkpoint_with_the_history_of_both_attempts(folder_store: Store) -> None:
    ranks = gang(folder_store)
    begin(ranks)
    keep(ranks, 2)
    two = gang(folder_store)
    begin(two)
    save(two, 2)
    save(two, 5)
    three = gang(folder_store)
    assert begin(three)[0] == 5
    assert three._loaded is not None
    assert three._loaded.history == ((0, 1), (2, 2))
    assert void_steps(three._loaded, {2: 2, 5: 2}) == set()
    assert void_steps(three._loaded, {2: 1, 5: 2}) == set()
    assert void_steps(three._loaded, {1: 2, 5: 2}) == {1}


def test_a_newer_checkpoint_is_loaded_and_no_older_near_step(folder_store: Store) -> None:
    ranks = gang(folder_store, {"memory": 2})
    begin(ranks)
    keep(ranks, 2)
    save(ranks, 3)
    two = gang(folder_store)
    assert begin(two)[0] == 3
    assert two.near_start is None


def test_two_whole_steps_of_a_writer_are_kept_and_nothing_of_others(folder_store: Store, memory: Path) -> None:
    saver = gang(folder_store)
    begin(saver)
    for step in range(1, 6):
        keep(saver, step)
    assert whole_steps(near_store(memory), RUN, 0) == [(1, 4), (1, 5)]
    assert steps_in(near_store(memory), RUN) == {(1, 4), (1, 5)}
    assert all(path.stat().st_mode & 0o77 == 0 for path in memory.iterdir())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def saved_then_kept_near(store: Store) -> None:
    """A gang that has saved step 1 and kept steps 2 and 3 locally."""
    ranks = gang(store)
    begin(ranks)
    save(ranks, 1)
    for step in (2, 3):
        keep(ranks, step)


@pytest.mark.parametrize("harm", [_flip, _cut, Path.unlink], ids=["flipped", "torn", "gone"])
@pytest.mark.parametrize("what", ["packs/000001-000000003-*.pack", "indexes/*-000000003/00000.idx",
                                  "indexes/*-000000003/record.json"])  # fmt: skip
def test_damage_of_a_near_step_is_noticed_and_the_one_before_it_is_loaded(
    what: str, harm: Callable[[Path], None], folder_store: Store, memory: Path
) -> None:
    saved_then_kept_near(folder_store)
    for path in near_store(memory).root.glob(f"runs/{RUN}/{what}"):
        harm(path)
    start, boxes = begin(gang(folder_store))
    assert start == 2
    assert same(boxes, whole(state(2)))


def test_where_nothing_near_verifies_the_checkpoint_is_loaded(folder_store: Store, memory: Path) -> None:
    saved_then_kept_near(folder_store)
    for path in near_store(memory).root.glob(f"runs/{RUN}/packs/*"):
        _flip(path)
    start, boxes = begin(gang(folder_store))
    assert start == 1
    assert same(boxes, whole(state(1)))


def test_a_local_copy_of_a_fenced_attempt_is_never_resumed_from(folder_store: Store) -> None:
    zombie = gang(folder_store)
    begin(zombie)
    keep(zombie, 5)
    two = gang(folder_store)
    assert begin(two)[0] == 5
    keep(zombie, 6)  # complete, of the same run
    two.close()
    three = gang(folder_store)
    assert begin(three)[0] == 5
    keep(three, 6)
    assert begin(gang(folder_store))[0] == 6


def test_a_deleted_and_restarted_run_ignores_its_old_local_copies(folder_store: Store) -> None:
    ranks = gang(folder_store)
    begin(ranks)
    keep(ranks, 4)
    folder_store.delete_many([info.key for info in list(folder_store.list(layout.run(RUN)))])
    start, boxes = begin(gang(folder_store))
    assert start == 0
    assert same(boxes, whole(state(0)))


def test_a_local_copy_of_another_plan_is_not_resumed_from(folder_store: Store) -> None:
    ranks = gang(folder_store, plan=plan_of())
    begin(ranks)
    keep(ranks, 4)
    assert begin(gang(folder_store, plan=plan_of(device="other")))[0] == 0
    folder_store.delete(layout.began(RUN, 2))  # an attempt that trained nothing
    assert begin(gang(folder_store, plan=plan_of()))[0] == 4


def test_a_full_tier_is_logged_and_training_continues(
    folder_store: Store, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = gang(folder_store)
    begin(saver)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    for step in (1, 2):
        keep(saver, step)
    assert caplog.text.count("do not fit into the 100 bytes that are left of") == 1
    assert not near_store(memory).root.exists()
    save(saver, 3)
    assert checkpoint_steps(folder_store, RUN) == [3]


def test_a_disk_tier_has_a_separate_cadence_and_an_unusable_one_is_ignored(folder_store: Store, tmp_path: Path) -> None:
    ranks = gang(folder_store, {"memory": 1, "disk": 2}, tmp_path / "disk")
    begin(ranks)
    for step in (1, 2, 3):
        keep(ranks, step)
    shutil.rmtree(tmp_path / "memory")  # as a reboot does
    start, boxes = begin(gang(folder_store, {"memory": 1, "disk": 2}, tmp_path / "disk"))
    assert start == 2
    assert same(boxes, whole(state(2)))
    (tmp_path / "file").touch()
    saver = gang(folder_store, {"disk": 1}, tmp_path / "file")
    assert begin(saver)[0] == 0
    keep(saver, 1)
    save(saver, 2)
    assert checkpoint_steps(folder_store, RUN) == [2]


def test_local_copies_of_inactive_runs_are_removed_and_locked_ones_stay(tmp_path: Path) -> None:
    for name in ("left", "held", "new", "own"):
        hold = TierLock(tier.make_folder(tmp_path, name))
        if name != "held":
            hold.end()
    for name in ("left", "held", "own"):
        os.utime(tmp_path / name / ".lock", (0, 0))
    remove_stale(tmp_path, "own", 3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held", "new", "own"]
