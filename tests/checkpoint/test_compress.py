"""Compressed saves: fewer bytes in the store, the same bits after loading, and every checkpoint readable on its own."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, TensorBox, claim_attempt, open_checkpoint, packing
from holdfast.checkpoint import compress as compress_module
from holdfast.checkpoint.agent.store_writer import spare_threads
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.compress import Compression
from holdfast.checkpoint.damage_reports import DamageError
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store, layout
from tests.checkpoint.saving import DESCRIBE, RUN, blank, same, whole


def trained(step: int) -> dict[str, torch.Tensor]:
    """A state that changes slowly, as in training: weights, a moment without memory, and constants."""
    torch.manual_seed(1)
    weight, walk = torch.randn(300, 400) * 0.02, torch.randn(300, 400)
    torch.manual_seed(step + 2)
    return {
        "weight": weight + walk * 1e-6 * step,
        "moment": torch.randn(300, 400) * 1e-3,
        "half": (torch.randn(200, 400) * 0.02).bfloat16(),
        "frozen": torch.arange(80_000, dtype=torch.float32),
        "zeros": torch.zeros(70_000),
        "empty integers": torch.zeros(70_000, dtype=torch.int32),  # the same bytes with another dtype
        "noise": torch.randint(0, 256, (200_000,), dtype=torch.uint8),
        "step": torch.tensor(step),
    }


@pytest.fixture
def share(store: Store) -> ShardWriter:
    return ShardWriter(store, claim_attempt(store, RUN), 0, compression=Compression())


def saved(store: Store, saver: Checkpointer, step: int) -> int:
    """Commit a step. Returns the number of bytes that were written for it."""
    saver.save(step, whole(trained(step)), {"step": step})
    saver.wait()
    return open_checkpoint(store, RUN, step).manifest.fresh


@pytest.fixture
def saver(store: Store) -> Checkpointer:
    attempt = claim_attempt(store, RUN)
    return Checkpointer(store, attempt, Retention(keep_last=1), describe=DESCRIBE, options=SaveOptions(compress=True))


def codecs(store: Store, step: int, name: str) -> set[Codec]:
    return {Codec(piece.place.codec) for piece in open_checkpoint(store, RUN, step).pieces(name)}


@pytest.mark.slow
def test_a_compressed_checkpoint_restores_the_saved_state(store: Store, saver: Checkpointer) -> None:
    for step in range(1, 6):
        saved(store, saver, step)
        boxes = blank(whole(trained(step)))
        open_checkpoint(store, RUN, step).fill(boxes)  # readable after the previous one was collected
        assert same(boxes, whole(trained(step)))


def test_the_codec_of_each_tensor_is_chosen_by_size(store: Store, saver: Checkpointer) -> None:
    raw = sum(tensor.nbytes for tensor in trained(1).values())
    first = saved(store, saver, 1)
    assert codecs(store, 1, "weight") == {Codec.NUMBERS}
    second = saved(store, saver, 2)
    assert codecs(store, 2, "weight") == {Codec.DIFFERENCES}
    assert codecs(store, 2, "moment") == {Codec.NUMBERS}
    assert codecs(store, 2, "noise") == {Codec.RAW}
    assert second < first < 0.9 * raw
    before = open_checkpoint(store, RUN, 2).pieces("frozen")
    assert saved(store, saver, 3)
    assert [piece.place for piece in open_checkpoint(store, RUN, 3).pieces("frozen")] == [
        piece.place for piece in before
    ]


@pytest.mark.slow
def test_a_difference_is_never_based_on_a_difference(store: Store, saver: Checkpointer) -> None:
    for step in range(1, 5):
        saved(store, saver, step)
    places = [piece.place for piece in open_checkpoint(store, RUN, 4).pieces("weight")]
    assert all(place.base is not None and place.base.base is None for place in places)
    assert {place.base.pack.step for place in places if place.base} == {1}


def test_tensors_that_changed_too_much_are_stored_without_differences(store: Store, saver: Checkpointer) -> None:
    saved(store, saver, 1)
    saved(store, saver, 100_000)
    assert codecs(store, 100_000, "weight") == {Codec.NUMBERS}
    saved(store, saver, 100_001)
    places = [piece.place for piece in open_checkpoint(store, RUN, 100_001).pieces("weight")]
    assert {place.base.pack.step for place in places if place.base} == {100_000}


def test_a_damaged_base_is_reported(store: Store, saver: Checkpointer) -> None:
    saved(store, saver, 1)
    saved(store, saver, 2)
    place = open_checkpoint(store, RUN, 2).pieces("weight")[0].place
    assert place.base is not None
    key = layout.pack(RUN, str(place.base.pack))
    data = bytearray(store.get(key))
    data[place.base.start + 20] ^= 1
    store.put(key, data)
    with pytest.raises(DamageError, match=str(place.base.pack)):
        open_checkpoint(store, RUN, 2).fill(blank(whole(trained(2))))


def test_a_rewritten_pack_with_other_bytes_gets_another_name(store: Store) -> None:
    """An agent that lost its memory saves a step again. A pack that an index refers to must not change."""
    attempt = claim_attempt(store, RUN)
    first = ShardWriter(store, attempt, 0, compression=Compression())
    first.write(1, whole(trained(1)))
    first.write(2, whole(trained(2)))
    packs = {info.key: store.get(info.key) for info in store.list(layout.run(RUN, "packs/"))}
    restarted = ShardWriter(store, attempt, 0, compression=Compression())  # without the bases
    restarted.write(2, whole(trained(2)))
    assert {key: store.get(key) for key in packs} == packs
    assert len(list(store.list(layout.run(RUN, "packs/")))) > len(packs)


def test_parallel_encoding_gives_the_same_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    by: Counter[str] = Counter()
    encode = compress_module.encode

    def counted(*job: Any) -> bytes:
        by[threading.current_thread().name.rpartition("_")[0]] += 1
        return encode(*job)

    monkeypatch.setattr(compress_module, "encode", counted)
    attempt = claim_attempt(store, RUN)
    for writer, threads in enumerate((1, 2)):
        share = ShardWriter(store, attempt, writer, compression=Compression(threads))
        assert [share.write(step, whole(trained(step))) for step in (1, 2)]
    packs = [store.get(info.key) for info in store.list(layout.run(RUN, "packs/"))]
    assert len(packs) == 2  # the second save wrote the same content under the same names
    assert set(by) == {"", "encode"}
    assert by[""] == by["encode"]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 2, 1), (2, 1, 1), (16, 1, 8), (16, 4, 3), (192, 8, 8), (1, 2, 1)]
)
def test_a_writer_takes_its_share_of_the_cores_that_ranks_leave(
    cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert spare_threads(ranks) == threads


def test_no_difference_is_based_on_a_piece_that_the_previous_checkpoint_did_not_need(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 2**18)  # no pack holds pieces of both tensors
    attempt = claim_attempt(folder_store, RUN)
    writer = Checkpointer(
        folder_store, attempt, Retention(keep_last=1), describe=DESCRIBE, options=SaveOptions(compress=True)
    )
    torch.manual_seed(0)
    weight, zeros = torch.randn(300, 400) * 0.02, torch.zeros(300, 400)
    # The pack of step 1 is collected in between.
    for step, tensor in ((1, weight), (2, zeros), (3, weight * (1 + 1e-6))):
        writer.save(step, whole({"w": tensor, "z": zeros}), {})
        writer.wait()
        assert same([TensorBox.whole("w", open_checkpoint(folder_store, RUN, step).tensor("w"))], whole({"w": tensor}))


def test_no_difference_is_based_on_a_deleted_pack(store: Store) -> None:
    share = ShardWriter(store, claim_attempt(store, RUN), 0, compression=Compression())
    torch.manual_seed(0)
    weight = torch.randn(300, 400) * 0.02
    share.write(1, whole({"w": weight}))
    store.delete_many([info.key for info in store.list(layout.packs(RUN))])
    with pytest.raises(StoreUnreachableError, match="is gone"):
        share.write(2, whole({"w": weight * (1 + 1e-6)}))


def test_the_base_of_differences_is_read_in_ranges(folder_store: Store) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2000, 1000) * 0.02  # 31 pieces
    saver = Checkpointer(
        folder_store,
        claim_attempt(folder_store, RUN),
        Retention(3),
        describe=DESCRIBE,
        options=SaveOptions(compress=True),
    )
    for step in (1, 2):
        saver.save(step, whole({"w": weight * (1 + 1e-6 * step)}), {})
        saver.wait()
    reads: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(folder_store, name)

        def read_into(self, key: str, start: int, target: memoryview) -> None:
            reads.append(key)
            folder_store.read_into(key, start, target)

    checkpoint = open_checkpoint(Counting(), RUN, 2)  # type: ignore[arg-type]
    assert {piece.place.codec for piece in checkpoint.pieces("w")} == {Codec.DIFFERENCES}
    assert torch.equal(checkpoint.tensor("w"), weight * (1 + 2e-6))
    assert len(reads) <= 2
