"""Damage of any kind at any place is detected and reported. A run survives it while one checkpoint is intact."""

import json
import logging
from pathlib import Path

import pytest

from holdfast.checkpoint import Manifest, load_newest
from holdfast.checkpoint.root import UnfitError, body_digest
from holdfast.collectives import Gang
from holdfast.spec.errors import DataError, NoCheckpointVerifiesError
from holdfast.store import Store, layout
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import (
    RUN,
    blank,
    checkpointer,
    load,
    names,
    opened,
    pack_of,
    same,
    save,
    shards,
    state,
    whole,
)


def test_no_changed_byte_of_a_manifest_passes(two_steps: Store) -> None:
    intact = two_steps.get(layout.checkpoint(RUN, 6))
    manifest = Manifest.from_bytes(intact, "m")
    for place in range(len(intact)):
        for change in (0x01, 0x20, 0xFF):
            damaged = bytearray(intact)
            damaged[place] ^= change
            try:
                parsed = Manifest.from_bytes(bytes(damaged), "m")
            except DataError:
                continue
            assert parsed == manifest  # another spelling of the same number


def test_no_shortened_manifest_passes(two_steps: Store) -> None:
    intact = two_steps.get(layout.checkpoint(RUN, 6))
    for length in range(len(intact)):
        with pytest.raises(DataError):
            Manifest.from_bytes(intact[:length], "m")


@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_shortened_pack_is_noticed(two_steps: Store, length: int) -> None:
    key = pack_of(two_steps, 6)[0]
    two_steps.put(key, two_steps.get(key)[:length])
    assert same(load(two_steps)[1], whole(state(3)))


def test_a_missing_pack_is_noticed(two_steps: Store) -> None:
    two_steps.delete(pack_of(two_steps, 6)[0])
    assert same(load(two_steps)[1], whole(state(3)))


def test_a_manifest_under_another_step_is_noticed(two_steps: Store) -> None:
    two_steps.put(layout.checkpoint(RUN, 9), two_steps.get(layout.checkpoint(RUN, 3)))
    assert same(load(two_steps)[1], whole(state(6)))
    assert names(two_steps, "checkpoints/damaged") == ["step-000000009.json"]


def test_a_damaged_checkpoint_is_reported_quarantined_and_replaced_by_resumed_training(
    two_steps: Store, caplog: pytest.LogCaptureFixture
) -> None:
    pack = pack_of(two_steps, 6)[0]
    two_steps.put(pack, b"rubbish" * 100)
    with caplog.at_level(logging.ERROR, "holdfast.checkpoint"):
        manifest, _ = load(two_steps)
    assert manifest is not None
    assert "step 6 is DAMAGED and is set aside; falling back" in caplog.text
    assert pack in caplog.text
    assert names(two_steps, "checkpoints") == ["damaged/step-000000006.json", "step-000000003.json"]
    resumed = checkpointer(two_steps, 2)
    resumed.adopt(manifest)
    save(resumed, 6)
    healed, boxes = load(two_steps)
    assert healed is not None
    assert same(boxes, whole(state(6)))
    assert pack not in {layout.pack(RUN, str(name)) for name in healed.packs()}  # nothing refers to the damaged pack


def test_a_damaged_manifest_that_appears_later_is_written_anew(two_steps: Store) -> None:
    two_steps.put(layout.checkpoint(RUN, 9), b"torn")
    save(checkpointer(two_steps, 2), 9)
    assert same(load(two_steps)[1], whole(state(9)))


def test_when_all_are_damaged_it_stops_and_stops_again(two_steps: Store) -> None:
    for step in (3, 6):
        two_steps.put(layout.checkpoint(RUN, step), b"torn")
    for _ in range(2):
        with pytest.raises(NoCheckpointVerifiesError, match=r"no checkpoint verifies.*checkpoints/damaged/.*--fresh"):
            load(two_steps)
    for name in names(two_steps, "checkpoints/damaged"):
        two_steps.delete(f"runs/{RUN}/checkpoints/damaged/{name}")
    assert load(two_steps)[0] is None


def test_a_checkpoint_of_a_newer_format_stops_the_load_and_is_kept(two_steps: Store) -> None:
    body = json.loads(two_steps.get(layout.checkpoint(RUN, 6)))
    body.pop("digest")
    body["version"] = 3
    two_steps.put(layout.checkpoint(RUN, 6), json.dumps(body | {"digest": body_digest(body)}).encode())
    with pytest.raises(UnfitError, match="upgrade Holdfast"):
        load(two_steps)
    assert names(two_steps, "checkpoints") == ["step-000000003.json", "step-000000006.json"]


def test_other_files_between_the_checkpoints_do_no_harm(two_steps: Store) -> None:
    for name in (
        "checkpoints/step-000000009.json.bak",
        "checkpoints/step-x.json",
        "packs/notes.txt",
        "attempts/README",
    ):
        two_steps.put(f"runs/{RUN}/{name}", b"a person's notes")
    save(checkpointer(two_steps, keep_last=1), 9)
    assert same(load(two_steps)[1], whole(state(9)))
    assert two_steps.stat(f"runs/{RUN}/packs/notes.txt") is not None


def test_damage_that_one_rank_sees_makes_every_rank_fall_back(tmp_path: Path) -> None:
    assert in_ranks(2, _damaged_for_one, f"file://{tmp_path / 'store'}", tmp_path) == [3, 3]


def _damaged_for_one(rank: int, size: int, url: str, meetings: Path) -> int:
    store = opened(url)
    with process_group(meetings / "meeting", rank, size):
        gang, writer = Gang(), checkpointer(store)
        for step in (3, 6):
            save(writer, step, shards(state(step), rank, size))
        if rank == 0:
            key, start = pack_of(store, 6, -1)  # of the last rank
            content = bytearray(store.get(key))
            content[start] ^= 4
            store.put(key, content)
        gang.barrier()
        boxes = blank(shards(state(3), rank, size))
        loaded = load_newest(store, RUN, boxes, gang)
        assert loaded is not None
        assert same(boxes, shards(state(3), rank, size))
        return loaded.step
