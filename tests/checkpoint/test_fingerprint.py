"""The state digest is the same for every cut of the same bits, and different for different bits."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holdfast.checkpoint import TensorBox, digest_of, fingerprint, read_manifest, scalars_digest
from holdfast.checkpoint.box import DTYPES
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import RUN, checkpointer, opened, save, shards, state, whole

SIZES = st.lists(st.integers(1, 7), min_size=0, max_size=4)


def random_bits(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of random bits, which can include NaN, infinities and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape, dtype=torch.int64).prod()) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def digest(tensor: Tensor, name: str = "w") -> str:
    return str(digest_of([TensorBox.whole(name, tensor)]))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    return random_bits(draw(SIZES), DTYPES[draw(st.sampled_from(sorted(DTYPES)))], draw(st.integers(0, 2**31)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Tensor, list[TensorBox]]:
    """A tensor and the boxes that make it up: cuts along every axis, in any order."""
    tensor = draw(tensors())
    axes = []
    for size in tensor.shape:
        inside = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
        axes.append(list(pairwise([0, *sorted(inside), size])))
    boxes = [
        TensorBox(
            "w",
            tuple(tensor.shape),
            tuple(low for low, _ in cell),
            tensor[tuple(slice(*span) for span in cell)],  # a view with separate rows
        )
        for cell in product(*axes)
    ]
    return tensor, draw(st.permutations(boxes))


@given(cuts())
def test_any_cut_into_boxes_adds_up_to_the_digest_of_the_whole(cut: tuple[Tensor, list[TensorBox]]) -> None:
    tensor, boxes = cut
    assert str(digest_of(boxes)) == digest(tensor)


@given(tensors(), st.data())
def test_one_flipped_bit_always_changes_the_digest(tensor: Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    raw = changed.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(changed) != digest(tensor)


@given(tensors(), st.data())
def test_two_swapped_elements_change_the_digest(tensor: Tensor, data: st.DataObject) -> None:
    changed = tensor.clone().view(-1)
    first, second = (data.draw(st.integers(0, len(changed) - 1)) for _ in range(2))
    changed[first], changed[second] = tensor.view(-1)[second].clone(), tensor.view(-1)[first].clone()
    same = torch.equal(changed.view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert (digest(changed.view(tensor.shape)) == digest(tensor)) == same


def test_two_changed_signs_change_the_digest_also_in_the_widest_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensor = random_bits([6, 5], dtype, 3)
        changed = tensor.clone()
        changed[1, 2], changed[4, 0] = -changed[1, 2], -changed[4, 0]
        assert digest(changed) != digest(tensor)


def test_zeros_of_either_sign_and_every_nan_are_bits_like_others() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    assert len({digest(zero), digest(-zero), digest(nan), digest(-nan)}) == 4


def test_names_shapes_types_and_places_count() -> None:
    tensor = random_bits([4, 6], torch.float32, 1)
    shifted_box = TensorBox("w", (8, 6), (4, 0), tensor)
    others = [
        digest(tensor, "v"),
        digest(tensor.view(6, 4)),
        digest(tensor.view(torch.int32)),
        digest(tensor.T.contiguous().T.roll(1, 0)),
        str(digest_of([shifted_box])),
        str(digest_of([TensorBox("w", (8, 6), (0, 0), tensor)])),
        str(digest_of([])),
    ]
    assert len({digest(tensor), *others}) == 1 + len(others)
    two = {"a": tensor, "b": random_bits([4, 6], torch.float32, 2)}
    swapped = {"a": two["b"], "b": two["a"]}
    assert digest_of(whole(two)) != digest_of(whole(swapped))


def test_a_missing_tensor_of_zeros_changes_the_digest() -> None:
    assert digest(torch.zeros(4)) != str(digest_of([]))
    assert scalars_digest({"step": 0}) not in (
        scalars_digest({"step": 1}),
        scalars_digest({}),
        scalars_digest({"s": 0}),
    )


@pytest.mark.parametrize("shape", [(300, 7), (3, 5, 40), (5, 300), (700,), (2, 2, 90)])
def test_tensors_of_many_chunks_and_beyond_the_table_of_keys_have_the_same_digest(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_bits(list(shape), torch.float32, 5)
    expected = digest(tensor)
    monkeypatch.setattr(fingerprint, "_CPU_CHUNK", 64)
    assert digest(tensor) == expected
    monkeypatch.setattr(fingerprint, "_TABLE", 3)
    assert digest(tensor) == expected


def test_the_digest_matches_its_definition_and_never_changes() -> None:
    """Stored digests are compared with new ones, so this number must never change."""
    tensors = {str(dtype): (torch.arange(70).view(7, 10) % 256).to(dtype) for dtype in DTYPES.values()}
    total = str(digest_of(whole(tensors)))
    assert total == "03aeca82fd5a35050eeb647494090eab"
    sums = [sum(by_definition(name, tensor, stream) for name, tensor in tensors.items()) for stream in (0, 1)]
    assert total == "".join(f"{number % 2**64:016x}" for number in sums)


def by_definition(name: str, tensor: Tensor, stream: int) -> int:
    """One of the two sums, element by element in plain integers."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    key = blake3(f"{name}\0{dtype}\0{list(tensor.shape)}".encode()).digest(16)[8 * stream : 8 * stream + 8]
    total = 0
    for row, column in product(*map(range, tensor.shape)):
        bits = int(fingerprint._bits(tensor[row, column]))
        if tensor.element_size() == 8:
            bits = (bits & 0xFFFFFFFF) + (bits >> 32) * number(0x68696768)
        total += splitmix(number(1 + stream), row) * splitmix(number(3 + stream), column) * (bits + 1)
    return total * (int.from_bytes(key, "little") | 1)


def number(label: int) -> int:
    return int.from_bytes(blake3(f"state digest\0{label}".encode()).digest(8), "little") | 1


def splitmix(seed: int, index: int) -> int:
    value = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31 | 1


def test_one_state_saved_from_any_number_of_ranks_has_one_digest(folder_store: Store, tmp_path: Path) -> None:
    save(checkpointer(folder_store), 3)
    digests = {read_manifest(folder_store, RUN, 3).state_digest}
    assert digests == {str(digest_of(whole(state(3))) + scalars_digest({"optimizer.step": 3}))}
    for size in (2, 3):
        other = opened(f"file://{tmp_path / str(size)}")
        in_ranks(size, _save_shards, other.url, tmp_path / f"meeting-{size}")
        digests.add(read_manifest(other, RUN, 3).state_digest)
    assert len(digests) == 1


def test_a_step_that_was_saved_from_another_cut_is_no_other_state(folder_store: Store, tmp_path: Path) -> None:
    in_ranks(2, _save_shards, folder_store.url, tmp_path / "meeting")
    save(checkpointer(folder_store, 2), 3)  # the same bits in one piece; replaces what the older attempt wrote
    assert read_manifest(folder_store, RUN, 3).attempt == 2
    with pytest.raises(DataError, match="not deterministic"):
        save(checkpointer(folder_store, 3), 3, whole(state(4)))


def _save_shards(rank: int, size: int, url: str, meeting: Path) -> None:
    with process_group(meeting, rank, size):
        save(checkpointer(opened(url)), 3, shards(state(3), rank, size))
