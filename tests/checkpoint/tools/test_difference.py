"""Checkpoints are compared to the bit, and only pieces that may differ are read."""

import math

import pytest
import torch

from holdfast.checkpoint import Attempt, Checkpoint, Checkpointer, Retention, TensorBox, open_checkpoint
from holdfast.checkpoint.tools import differences, equal
from holdfast.store import Store
from tests.checkpoint.saving import DESCRIBE, state


def checkpoint(store: Store, run: str, tensors: dict[str, torch.Tensor], cuts: int = 1, **scalars: float) -> Checkpoint:
    """A checkpoint of these tensors. More `cuts` also cut each row of a matrix, off the grid."""
    boxes = []
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and cuts > 1 and tensor.numel():
            columns = tensor.tensor_split(cuts, dim=1)
            at = 0
            for part in columns:
                boxes.append(TensorBox(name, tuple(tensor.shape), (0, at), part))
                at += part.shape[1]
        else:
            boxes.append(TensorBox.whole(name, tensor))
    writer = Checkpointer(store, Attempt(run, 1), Retention(9), describe=DESCRIBE)
    writer.save(1, boxes, {"optimizer.step": 1, **scalars})
    writer.wait()
    return open_checkpoint(store, run, 1)


def test_equal_states_are_equal_by_their_digests_however_they_were_cut(folder_store: Store) -> None:
    first, second = (checkpoint(folder_store, run, state(1), cuts) for run, cuts in (("a", 1), ("b", 2)))
    assert equal(first, second)
    difference = differences(first, second)
    assert difference.none
    assert difference.read == 0


@pytest.mark.parametrize("cuts", [1, 2])
def test_the_first_differing_element_is_reported_with_values_and_distance(folder_store: Store, cuts: int) -> None:
    changed = state(1)
    changed["matrix"] = changed["matrix"].clone()
    changed["matrix"][3, 4] = math.nextafter(changed["matrix"][3, 4].item(), math.inf)  # rounds to fp32 exactly
    changed["matrix"].view(torch.int32)[3, 4] += 3
    changed["matrix"].view(torch.int32)[6, 0] += 1000
    first, second = checkpoint(folder_store, "a", state(1)), checkpoint(folder_store, "b", changed, cuts)
    (difference,) = differences(first, second).tensors
    assert (difference.name, difference.elements, difference.of, difference.first) == ("matrix", 2, 35, (3, 4))
    assert (difference.ulps, difference.most_ulps) == (3, 1000)
    assert difference.values == (state(1)["matrix"][3, 4].item(), changed["matrix"][3, 4].item())


def test_only_pieces_that_may_differ_are_read(folder_store: Store) -> None:
    large = torch.arange(2**20, dtype=torch.float32).view(-1, 64)  # 4 MiB
    changed = large.clone()
    changed[7, 3] += 1
    changed[-1, -1] += 1
    first = checkpoint(folder_store, "a", {"large": large, "same": large[:9].clone()})
    second = checkpoint(folder_store, "b", {"large": changed, "same": large[:9].clone()})
    difference = differences(first, second)
    assert [(tensor.name, tensor.first) for tensor in difference.tensors] == [("large", (7, 3))]
    assert difference.tensors[0].elements == 2
    assert 0 < difference.read <= 2**20


def test_every_kind_of_difference_is_reported(folder_store: Store) -> None:
    left, right = state(1), state(1)
    right["count"] = torch.tensor(5)
    right["scalar"] = -left["scalar"]
    right["half"] = right["half"].float()
    right["new"] = right.pop("double")
    first = checkpoint(folder_store, "a", left, rate=0.5)
    difference = differences(first, checkpoint(folder_store, "b", right, cuts=2, rate=0.25))
    assert [(tensor.name, tensor.first, tensor.ulps is None) for tensor in difference.tensors] == [
        ("count", (), True),
        ("scalar", (), False),
    ]
    assert [(scalar.name, scalar.values) for scalar in difference.scalars] == [("rate", (0.5, 0.25))]
    assert (difference.only_one, difference.only_other) == (("double",), ("new",))
    assert difference.unlike == ("half: bfloat16 [6, 3], and float32 [6, 3]",)
    assert not difference.none


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_distances_go_through_zero_and_to_the_ends(folder_store: Store, dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the number after zero
    first = torch.tensor([0.0, least, least, -torch.finfo(dtype).max], dtype=dtype)
    second = torch.tensor([-0.0, 0.0, -least, torch.finfo(dtype).max], dtype=dtype)
    pairs = [differences(
        checkpoint(folder_store, f"a{at}", {"w": first[at : at + 1].clone()}),
        checkpoint(folder_store, f"b{at}", {"w": second[at : at + 1].clone()}),
    ).tensors[0].ulps for at in range(4)]  # fmt: skip
    assert pairs[:3] == [0, 1, 2]
    assert pairs[3] == min(2**63 - 1, 2 * _bits_of_largest(dtype))


def _bits_of_largest(dtype: torch.dtype) -> int:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(bits))
