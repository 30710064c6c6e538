"""Only the newest attempt commits; a replaced one learns it and does no harm."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.components.checkpoint import claim_attempt, list_attempts, load_newest
from holdfast.components.checkpoint.attempts import read_attempt
from holdfast.components.checkpoint.retention import Retention, checkpoint_steps, sweep
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import FencedError, LostPeerError, StoreUnreachableError
from holdfast.components.store import Store
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import RUN, checkpointer, load, names, opened, same, save, shards, state, whole


def test_no_two_claims_get_the_same_number(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda each: claim_attempt(store, RUN, world_size=each), range(8)))
    assert sorted(claim.number for claim in claims) == list(range(1, 9))
    assert [number for number, _ in list_attempts(store, RUN)] == list(range(1, 9))
    assert {read_attempt(store, RUN, claim.number)["world_size"] for claim in claims} == set(range(8))


def test_a_replaced_attempt_cannot_commit_and_learns_it(store: Store) -> None:
    old = checkpointer(store, claim_attempt(store, RUN).number)
    save(old, 3)
    claim_attempt(store, RUN)
    old.save(6, whole(state(6)), {})
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        old.wait()
    with pytest.raises(FencedError):  # and every time it asks
        old.save(9, whole(state(9)), {})
    assert checkpoint_steps(store, RUN) == [3]


def test_an_attempt_replaced_while_it_commits_does_not_commit(folder_store: Store) -> None:
    old = checkpointer(folder_store, claim_attempt(folder_store, RUN).number, on_commit=lambda _: claimed())

    def claimed() -> None:
        claim_attempt(folder_store, RUN)

    with pytest.raises(FencedError):
        save(old, 3)
    assert checkpoint_steps(folder_store, RUN) == []


def _replaced_at_the_manifest(store: Store, deed: object) -> BreakingStore:
    """The store of an attempt that stands still just before it writes the manifest of step 9, until `deed` is done."""

    def before(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith("checkpoints/step-000000009.json"):
            deed()  # type: ignore[operator]

    return BreakingStore(store, kill=False, before=before)


def _newer_attempt(store: Store, *steps: int) -> None:
    newer = checkpointer(store, claim_attempt(store, RUN).number, keep_last=1)
    manifest, _ = load(store)
    assert manifest is not None
    newer.adopt(manifest)
    for step in steps:
        save(newer, step)


def test_one_that_wakes_up_after_its_successor_committed_the_step_is_fenced(folder_store: Store) -> None:
    frozen = _replaced_at_the_manifest(folder_store, lambda: _newer_attempt(folder_store, 9))
    old = checkpointer(frozen, claim_attempt(folder_store, RUN).number)  # type: ignore[arg-type]
    save(old, 6)
    with pytest.raises(FencedError, match="newer attempt 2"):
        save(old, 9)
    assert same(load(folder_store)[1], whole(state(9)))


def test_a_manifest_of_a_replaced_attempt_whose_packs_are_gone_is_mended_by_its_successor(folder_store: Store) -> None:
    frozen = _replaced_at_the_manifest(folder_store, lambda: _newer_attempt(folder_store, 7))
    old = checkpointer(frozen, claim_attempt(folder_store, RUN).number)  # type: ignore[arg-type]
    save(old, 6)
    with pytest.raises(FencedError):
        save(old, 9)  # it appears, and the sweep after step 7 has taken its packs
    assert checkpoint_steps(folder_store, RUN) == [7, 9]
    save(checkpointer(folder_store, 2, keep_last=1), 9)
    assert names(folder_store, "checkpoints") == ["step-000000009.json"]
    assert same(load(folder_store)[1], whole(state(9)))


def test_the_newest_attempts_own_checkpoint_outlives_later_steps_of_a_replaced_one(folder_store: Store) -> None:
    save(checkpointer(folder_store, 1), 9)
    newer = checkpointer(folder_store, 2, keep_last=1)
    save(newer, 6)
    assert checkpoint_steps(folder_store, RUN) == [6, 9]
    save(newer, 7, whole(state(6)))  # refers to what step 6 wrote
    assert checkpoint_steps(folder_store, RUN) == [7, 9]
    assert same(load(folder_store)[1], whole(state(9)))


def test_the_sweep_of_an_older_attempt_leaves_the_packs_of_a_newer_one(folder_store: Store) -> None:
    old = claim_attempt(folder_store, RUN)
    save(checkpointer(folder_store, old.number), 3)
    in_flight = f"runs/{RUN}/packs/000002-{'0' * 32}.pack"  # durable, and not committed yet
    folder_store.put(in_flight, b"x")
    sweep(folder_store, old, Retention(1), 3)
    assert folder_store.stat(in_flight) is not None
    claim_attempt(folder_store, RUN)
    with pytest.raises(FencedError):
        sweep(folder_store, old, Retention(1), 3)


def test_packs_that_go_before_the_commit_keep_it_from_happening(folder_store: Store) -> None:
    def thief(operation: str, key: str) -> None:
        if operation == "list" and key.endswith("packs/") and names(folder_store, "packs"):
            folder_store.delete(f"runs/{RUN}/packs/{names(folder_store, 'packs')[0]}")

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=thief))  # type: ignore[arg-type]
    with pytest.raises(StoreUnreachableError, match=r"packs/000001-.* is gone .*not committing"):
        save(writer, 3)
    assert checkpoint_steps(folder_store, RUN) == []


def test_retention_keeps_exactly_these_steps(folder_store: Store) -> None:
    writer = checkpointer(folder_store, keep_last=2, keep_every=5)
    seen = []
    for step in range(1, 13):
        save(writer, step)
        seen.append(checkpoint_steps(folder_store, RUN))
    assert seen == [
        [1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [5, 6, 7], [5, 7, 8], [5, 8, 9], [5, 9, 10], [5, 10, 11],
        [5, 10, 11, 12],
    ]  # fmt: skip
    assert len(names(folder_store, "packs")) == 5  # one a checkpoint, and the first, which holds `frozen`
    assert Retention(1).kept([3, 9, 6]) == [9]
    assert Retention(3, 4).kept([]) == []


def test_a_store_failure_of_one_rank_is_raised_on_every_rank_and_nothing_is_committed(tmp_path: Path) -> None:
    messages = in_ranks(3, _one_fails, f"file://{tmp_path / 'store'}", tmp_path)
    assert messages == ["StoreUnreachableError: put: rank 1 cannot write"] * 3
    assert checkpoint_steps(opened(f"file://{tmp_path / 'store'}"), RUN) == [3]


def _one_fails(rank: int, size: int, url: str, meetings: Path) -> str:
    store, failing = opened(url), False

    def before(operation: str, _key: str) -> None:
        if failing and operation == "put":
            raise StoreUnreachableError(f"put: rank {rank} cannot write")

    with process_group(meetings / "meeting", rank, size):
        writer = checkpointer(BreakingStore(store, kill=False, before=before))  # type: ignore[arg-type]
        save(writer, 3, shards(state(3), rank, size))
        failing = rank == 1
        writer.save(6, shards(state(6), rank, size), {})
        with pytest.raises(StoreUnreachableError) as raised:
            writer.wait()
        return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("moment", ["save", "load"])
def test_a_rank_that_dies_in_a_save_or_a_load_frees_the_others_at_once(tmp_path: Path, moment: str) -> None:
    heard = in_ranks(2, _one_dies, f"file://{tmp_path / 'store'}", tmp_path, moment, seconds=60)
    assert heard == ["LostPeerError" if moment == "save" else "RuntimeError", None]


def _one_dies(rank: int, size: int, url: str, meetings: Path, moment: str) -> str:
    store = opened(url)
    with process_group(meetings / "meeting", rank, size, seconds=600):
        gang, writer = Gang(), checkpointer(store)
        save(writer, 3, shards(state(3), rank, size))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if moment == "load":
                load_newest(store, RUN, shards(state(3), rank, size), gang)
            else:
                save(writer, 6, shards(state(6), rank, size))
        except (LostPeerError, RuntimeError) as error:
            return type(error).__name__
        return "went on alone"
