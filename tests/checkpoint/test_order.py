"""The order of writes, checked before each operation: a crash at any operation leaves only loadable checkpoints."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import (
    Attempt,
    Retention,
    TensorBox,
    claim_attempt,
    gc,
    load_newest,
    open_checkpoint,
    pin,
)
from holdfast.checkpoint.compress import Compression
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.index import Index
from holdfast.checkpoint.local_tiers.peers import Endpoint, Neighbour, Remote
from holdfast.checkpoint.local_tiers.tier import Tier
from holdfast.checkpoint.local_tiers.tier_writer import Record, TierWriter, record_key, whole_steps
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError, FencedError, StoreUnreachableError
from holdfast.store import Store, layout, open_store
from tests.checkpoint.breaking_store import BreakingStore, Killed
from tests.checkpoint.saving import RUN, blank, checkpointer, names, save, state, whole
from tests.checkpoint.test_commit import Hurry
from tests.checkpoint.test_compress import trained
from tests.checkpoint.test_damage_reports import damage
from tests.checkpoint.test_gc import commit
from tests.checkpoint.test_local_tiers_peers import served

__all__ = ["served"]

ROOT_6, ASIDE_6 = layout.checkpoint(RUN, 6), layout.damaged(RUN, 6)


def require_packs(store: Store, step: str = "") -> None:
    """Require that each index refers to existing packs only."""
    for info in list(store.list(layout.indexes(RUN))):
        if info.key.endswith(".idx") and step in info.key:
            for pack in Index.from_bytes(store.get(info.key), info.key).pack_names:
                object_info = store.stat(layout.pack(RUN, str(pack)))
                assert object_info is not None, info.key
                assert object_info.size == pack.size


def require_loadable(store: Store) -> None:
    """Require that each root has all the objects that it needs."""
    for name in names(store, "checkpoints"):
        if name.startswith("step-"):
            checkpoint = open_checkpoint(store, RUN, int(name[5:14]))
            checkpoint.fill(blank(whole(state(0))))


def test_at_every_moment_of_a_save_an_index_has_its_packs_and_a_root_its_indexes_and_what_is_attached(
    folder_store: Store,
) -> None:
    operations: list[tuple[str, str]] = []

    def before(operation: str, key: str) -> None:
        operations.append((operation, key))
        require_packs(folder_store)
        require_loadable(folder_store)
        if folder_store.stat(ROOT_6) is not None:
            assert folder_store.get("runs/run/metrics/6") == b"rows"

    attempt = claim_attempt(folder_store, RUN).number
    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), attempt, keep_last=1)
    save(writer, 3)
    writer.save(6, whole(state(6)), {}, {"runs/run/metrics/6": "rows"})
    writer.wait()
    keys = [str(key) for _, key in operations]
    root = keys.index(ROOT_6)
    attached = keys.index("runs/run/metrics/6")
    fences = [at for at, key in enumerate(keys) if key.startswith(layout.attempts(RUN))]
    assert any(attached < at < root for at in fences)  # an attempt that is replaced in between commits nothing
    assert any(at < attached for at in fences)


@pytest.fixture(scope="module")
def doubted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a damaged step 6. Attempt 1 has reported the damage; attempt 2 sets the step aside."""
    folder = tmp_path_factory.mktemp("doubted")
    store = open_store(f"file://{folder / 'store'}")
    writer = checkpointer(store, claim_attempt(store, RUN).number)
    for step in (3, 6):
        save(writer, step)
    damage(store, 6)
    with pytest.raises(BadReaderError):
        load_newest(store, RUN, blank(whole(state(0))), Gang(), 1)
    claim_attempt(store, RUN)
    return folder / "store"


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects that attempt 3 writes when it commits step 6 again."""
    store = open_store(f"file://{tmp_path_factory.mktemp('successor')}")
    commit(store, 6, attempt=3)
    return {info.key: store.get(info.key) for info in store.list(f"runs/{RUN}/")}


def set_aside(store: Any, raw: Store) -> int:
    """Load as attempt 2, which finds the same damage in step 6 as attempt 1. Returns the loaded step."""
    fence = partial(Attempt(RUN, 2).check, store)
    manifest = load_newest(store, RUN, blank(whole(state(0))), Gang(), 2, fence)
    assert manifest is not None
    assert (raw.stat(ROOT_6), raw.stat(ASIDE_6) is not None) == (None, True)
    return manifest.step


def test_a_quarantine_interrupted_at_any_operation_keeps_the_root(doubted: Path, tmp_path: Path) -> None:
    """Otherwise its packs are collected. If it was the only checkpoint, the run would silently start from the
    beginning.
    """
    root = open_store(f"file://{doubted}").get(ROOT_6)
    number, finished = 0, False
    while not finished:
        shutil.copytree(doubted, folder := tmp_path / str(number))
        store = open_store(f"file://{folder}")
        with suppress(Killed):
            assert set_aside(BreakingStore(store, number, kill=True), store) == 3
            finished = True
        copies = [store.get(key) for key in (ROOT_6, ASIDE_6) if store.stat(key) is not None]
        assert copies
        assert set(copies) == {root}
        number += 1
    assert number > 10


def test_an_attempt_that_is_replaced_before_its_fence_leaves_the_checkpoint_of_its_successor(
    doubted: Path, successor: dict[str, bytes], tmp_path: Path
) -> None:
    operations: list[tuple[str, str]] = []
    shutil.copytree(doubted, tmp_path / "whole")
    whole_store = open_store(f"file://{tmp_path / 'whole'}")
    watched = BreakingStore(whole_store, kill=False, before=lambda *operation: operations.append(operation))
    set_aside(watched, whole_store)
    deleted = operations.index(("delete", ROOT_6))
    fence = max(at for at in range(deleted) if layout.attempts(RUN) in operations[at][1])
    assert fence > operations.index(("put", ASIDE_6))  # only the fence comes in between
    for number in range(fence + 1):
        shutil.copytree(doubted, folder := tmp_path / str(number))
        store = open_store(f"file://{folder}")

        calls = [0]

        def replace(*_: str, store: Store = store, at: int = number, seen: list[int] = calls) -> None:
            if seen[0] == at:
                claim_attempt(store, RUN)
                for key, data in successor.items():
                    store.put(key, data)
            seen[0] += 1

        breaking: Any = BreakingStore(store, kill=False, before=replace)
        check = partial(Attempt(RUN, 2).check, breaking)
        with suppress(FencedError, BadReaderError):
            load_newest(breaking, RUN, blank(whole(state(0))), Gang(), 2, check)
        assert store.get(ROOT_6) == successor[ROOT_6], operations[number]


def test_checkpoints_stay_loadable_at_every_operation_of_a_collection(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roots are deleted before the objects that they need, also with pins and shared packs."""
    monkeypatch.setattr(gc, "BATCH", 1)
    claim_attempt(folder_store, RUN)
    writer = checkpointer(folder_store)
    for step in (3, 6, 9, 12):
        save(writer, step, whole({**state(step), "half": state(min(step, 9))["half"]}))  # 12 needs a pack of 9
    pin(folder_store, RUN, 3)

    def look(*_: str) -> None:
        require_packs(folder_store, "-000000012")
        require_loadable(folder_store)

    watched = BreakingStore(folder_store, kill=False, before=look)
    Collector(watched, Attempt(RUN, 1), Retention(1), Hurry()).collect(12)
    assert checkpoint_steps(folder_store, RUN) == [3, 12]
    assert [name[:16] for name in names(folder_store, "packs")] == [f"000001-{step:09d}" for step in (3, 9, 12)]


def record_of(step: int) -> Record:
    return Record(run_id=RUN, step=step, attempt=1, writers=1, created=0.0, describe={})


def require_whole_near(store: Store, steps: list[int]) -> None:
    """Require that every step with an index is whole, and that one of `steps` is whole."""
    whole = whole_steps(store, RUN, 0)
    require_packs(store)
    for attempt, step in whole:
        assert store.stat(record_key(RUN, attempt, step)) is not None
    assert {step for _, step in whole} & set(steps), "the last whole copy is gone"


def test_a_complete_local_copy_exists_at_every_operation_of_a_local_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(name="memory", folder=str(tmp_path), every=1)
    raw = tier.store(0)
    for step in (1, 2):
        TierWriter(tier, Attempt(RUN, 1), 0).keep(step, whole(state(step)), None, record_of(step))
    monkeypatch.setattr(
        Tier, "store", lambda *_: BreakingStore(raw, kill=False, before=lambda *_: require_whole_near(raw, [1, 2, 3]))
    )
    keeper = TierWriter(tier, Attempt(RUN, 1), 0)
    for step in (3, 4, 5):
        keeper.keep(step, whole(state(step)), None, record_of(step))
        assert not keeper.off
        require_whole_near(raw, [step])
    assert len(whole_steps(raw, RUN, 0)) == 2


def test_a_neighbour_that_loses_its_sender_at_any_moment_has_a_whole_step(
    served: tuple[Endpoint, Tier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbor removes old steps when an index arrives. The index is therefore the last object of a step."""
    endpoint, peer = served
    (tmp_path / "here").mkdir()
    tier = Tier(name="memory", folder=str(tmp_path / "here"), every=1)
    sent_keys: list[str] = []
    original_put, remaining = Remote.put, [10**9]

    def counted(remote: Remote, key: str, data: bytes) -> None:
        if not remaining[0]:
            raise StoreUnreachableError("the sender dies")
        remaining[0] -= 1
        original_put(remote, key, data)
        sent_keys.append(key)
        if whole_steps(peer.store(0), RUN, 0):
            require_whole_near(peer.store(0), [1, 2, 3, 4, 5, 6, 7, 8])

    monkeypatch.setattr(Remote, "put", counted)
    for step, objects in ((1, 10**9), (2, 10**9), (3, 1), (4, 2), (5, 10**9), (6, 1), (7, 10**9)):
        remaining[0], before = objects, len(sent_keys)
        neighbour = Neighbour(endpoint, tier, RUN, 0)
        TierWriter(tier, Attempt(RUN, 1), 0, neighbour.send).keep(step, whole(state(step)), None, record_of(step))
        require_whole_near(peer.store(0), list(range(1, step + 1)))
        if objects > 2:
            assert [key.rpartition(".")[2] for key in sent_keys[before:]][-1] == "idx"
            assert len(sent_keys) - before == 3


def weight(step: int) -> list[TensorBox]:
    """A state in which everything changes, and everything can be stored as differences."""
    return whole({"weight": trained(step)["weight"]})


@pytest.mark.parametrize(("compress", "harm"), [(False, "gone"), (True, "gone"), (True, "short")])
def test_no_index_is_written_that_refers_to_a_pack_or_a_base_that_is_not_whole(
    folder_store: Store, compress: bool, harm: str
) -> None:
    share = ShardWriter(
        folder_store, claim_attempt(folder_store, RUN), 0, compression=Compression() if compress else None
    )
    for step in (1, 2):
        share.write(step, weight(step))
    packs = [info.key for info in folder_store.list(layout.packs(RUN))]
    known_pieces = dict(share._known)
    refusals = 0
    for number, key in enumerate(packs):
        data = folder_store.get(key)
        if harm == "gone":
            folder_store.delete(key)
        else:
            folder_store.put(key, data[:-1])
        for saved_step, content in ((10 + number, 2), (20 + number, 3)):  # the same bits, and then other bits
            try:
                index = share.write(saved_step, weight(content))
            except StoreUnreachableError:
                refusals += 1
                assert folder_store.stat(f"{layout.indexes(RUN, 1, saved_step)}00000.idx") is None
            else:
                assert key not in {layout.pack(RUN, str(name)) for name in index.pack_names}
            share._known = dict(known_pieces)
        folder_store.put(key, data)
    assert refusals >= (2 if compress else 1)
    of_bases = {layout.pack(RUN, str(place.base.pack)) for place in known_pieces.values() if place.base}
    assert len(of_bases) == compress
    assert not of_bases & {
        layout.pack(RUN, str(place.pack)) for place in known_pieces.values()
    }  # nothing else needs it
