"""Every byte of a checkpoint is read and checked, even if other processes change it."""

from collections.abc import Callable

import pytest
import torch

from holdfast.checkpoint import Manifest, TensorBox, open_checkpoint
from holdfast.checkpoint.tools import verify
from holdfast.checkpoint.tools.difference import parts_of
from holdfast.store import Store, layout
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import RUN, checkpointer, names, pack_of, save, state


@pytest.fixture
def saved(folder_store: Store) -> Store:
    """A store with checkpoints at steps 3 and 6."""
    writer = checkpointer(folder_store)
    save(writer, 3)
    save(writer, 6)
    return folder_store


def spoil(store: Store, key: str, place: int) -> None:
    """Flip one bit of an object."""
    data = bytearray(store.get(key))
    data[place] ^= 1
    store.put(key, bytes(data))


def test_verification_reads_an_intact_checkpoint_completely(saved: Store) -> None:
    progress: list[tuple[int, int]] = []
    report = verify(saved, RUN, 6, lambda done, total: progress.append((done, total)))
    size = sum(tensor.nbytes for tensor in state(6).values())
    assert (report.intact, report.bytes, report.damages) == (True, size, ())
    assert progress[-1] == (size, size)
    assert [read for read, _ in progress] == sorted(read for read, _ in progress)


@pytest.mark.slow
def test_no_flipped_bit_of_a_pack_or_an_index_passes(saved: Store) -> None:
    for folder in ("packs", "indexes"):
        for name in names(saved, folder):
            key = f"runs/{RUN}/{folder}/{name}"
            intact = saved.get(key)
            is_needed = key in {*open_checkpoint(saved, RUN, 6).indexes()} or folder == "packs"
            for place in range(0, len(intact), 7):
                spoil(saved, key, place)
                damages = [damage for step in (3, 6) for damage in verify(saved, RUN, step).damages]
                assert {damage.key for damage in damages} == {key} or not is_needed, (key, place)
                assert damages
                saved.put(key, intact)


def test_a_damaged_pack_is_reported_with_its_tensor(saved: Store) -> None:
    key, start = pack_of(saved, 6)
    spoil(saved, key, start)
    report = verify(saved, RUN, 6)
    assert not report.intact
    assert [(damage.key, damage.tensor) for damage in report.damages] == [(key, "matrix")]
    assert "fail their checksum" in report.damages[0].reason
    assert report.bytes == sum(tensor.nbytes for name, tensor in state(6).items() if name != "matrix")
    assert verify(saved, RUN, 3).intact


@pytest.mark.parametrize("spoilt", [lambda data: data[:-9], lambda data: data.replace(b'"matrix"', b'"matriX"')])
def test_a_damaged_root_is_reported(saved: Store, spoilt: Callable[[bytes], bytes]) -> None:
    key = layout.checkpoint(RUN, 6)
    saved.put(key, spoilt(saved.get(key)))
    report = verify(saved, RUN, 6)
    assert [(damage.key, damage.tensor) for damage in report.damages] == [(key, "")]


def test_intact_parts_of_another_state_are_found_by_the_digest_of_the_whole(saved: Store) -> None:
    six, three = (open_checkpoint(saved, RUN, step).manifest for step in (6, 3))
    mixed = six.model_copy(update={"indexes": three.indexes})
    saved.put(layout.checkpoint(RUN, 6), mixed.to_bytes())
    report = verify(saved, RUN, 6)
    assert len(report.damages) == 1
    assert "has the digest" in report.damages[0].reason
    assert Manifest.from_bytes(saved.get(layout.checkpoint(RUN, 6)), "m").state_digest == six.state_digest


def test_a_checkpoint_collected_during_verification_is_not_damage(saved: Store) -> None:
    key = pack_of(saved, 3)[0]

    def collect(operation: str, name: str) -> None:
        if operation == "read_into":  # the collector removes the root first, then the objects below it
            saved.delete(layout.checkpoint(RUN, 3))
            saved.delete(key)

    report = verify(BreakingStore(saved, kill=False, before=collect), RUN, 3)
    assert (report.collected, report.damages, report.intact) == (True, (), False)
    assert verify(saved, RUN, 3).collected


def test_a_tensor_is_read_completely_in_parts_that_share_memory(folder_store: Store) -> None:
    large = torch.arange(12 * 2**20, dtype=torch.float32).view(-1, 48)  # 48 MiB
    save(checkpointer(folder_store), 1, [TensorBox.whole("large", large), TensorBox.whole("none", torch.empty(0, 3))])
    checkpoint = open_checkpoint(folder_store, RUN, 1)
    parts, rows = list(parts_of("large", checkpoint.tensors["large"])), 0
    for part in parts:
        checkpoint.fill([part])
        assert torch.equal(part.data, large[part.offset[0] : part.offset[0] + len(part.data)])
        rows += len(part.data)
    assert rows == len(large)
    assert len({part.data.untyped_storage().data_ptr() for part in parts}) == 1
    assert max(part.data.nbytes for part in parts) <= 16 * 2**20
    assert list(parts_of("none", checkpoint.tensors["none"])) == []
    assert verify(folder_store, RUN, 1).intact
