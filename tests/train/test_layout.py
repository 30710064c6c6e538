"""Tensor layouts: the parts of all ranks make up every tensor once, and each rank fills only its own part."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import TensorBox
from holdfast.engines import weights
from holdfast.engines.layout import TensorLayout, flat_boxes, share_out
from holdfast.engines.weights import ImportedState, SeededState
from holdfast.model.hugging_face import open_weights
from holdfast.model.initialise import initial_tensor, parameter_shapes
from tests.checkpoint.ranks import in_ranks
from tests.model.exporting import write_hugging_face
from tests.train.ranks import join
from tests.train.tiny_run import END_OF_TEXT, VOCABULARY, _tokenizer, tiny_spec

NAME = "model.layers.0.self_attn.q_proj.weight"


@given(st.data())
def test_the_parts_of_all_ranks_make_up_a_tensor_exactly_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = tuple(data.draw(st.sampled_from([*range(len(shape)), None])) for _ in mesh)
    coverage = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh)):
        offset, size = TensorLayout("w", shape, mesh, coordinate, cut).part()
        coverage[tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))] += 1
    copies = 1
    for ranks, dimension in zip(mesh, cut, strict=True):
        copies *= 1 if dimension is not None else ranks
    assert bool((coverage == copies).all())


@settings(max_examples=30)
@given(st.data())
def test_saved_boxes_of_all_ranks_cover_every_tensor_exactly_once(data: st.DataObject) -> None:
    mesh = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shapes = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=4))
    cuts = [tuple(data.draw(st.sampled_from([*range(len(shape)), None])) for _ in mesh) for shape in shapes]
    order = tuple(data.draw(st.permutations(range(len(mesh)))))
    coverage = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    for coordinate in product(*map(range, mesh)):
        lying = [
            TensorLayout(str(index), tuple(shape), mesh, coordinate, cut, order)
            for index, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
        ]
        for box in share_out(
            [(lying_layout, lying_layout.box(torch.empty(lying_layout.part()[1]))) for lying_layout in lying]
        ):
            place = tuple(slice(low, low + length) for low, length in zip(box.offset, box.data.shape, strict=True))
            coverage[int(box.name)][place] += 1
    assert all(bool((counts == 1).all()) for counts in coverage)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (0,), (1, 5), (3, 1), (4, 5), (3, 0), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]
)
def test_any_flat_range_of_a_tensor_is_a_handful_of_boxes_that_are_views_of_it(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            flat = whole.flatten()[start:stop].clone()
            boxes = flat_boxes("w", shape, start, stop, flat)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            filled = torch.full(shape, -1)
            for box in boxes:
                assert box.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                place = tuple(slice(low, low + length) for low, length in zip(box.offset, box.data.shape, strict=True))
                assert bool((filled[place] == -1).all())
                filled[place] = box.data
            expected = torch.full((whole.numel(),), -1)
            expected[start:stop] = whole.flatten()[start:stop]
            assert torch.equal(filled, expected.view(shape))


def _layouts_against_torch(rank: int, size: int, folder: Path) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    placements = [Shard(0), Shard(1), Replicate()]
    for shape, mesh_shape in product([(7, 5), (3, 9), (2, 2)], [(4,), (2, 2)]):
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for places in product(placements, repeat=len(mesh_shape)):
            tensor = distribute_tensor(whole, mesh, places)
            box = TensorLayout.of("w", tensor).box(tensor)
            place = tuple(slice(low, low + length) for low, length in zip(box.offset, box.data.shape, strict=True))
            assert torch.equal(box.data, whole[place]), (shape, places)
    return True


def test_a_layout_names_the_part_that_torch_gives_to_a_rank(tmp_path: Path) -> None:
    assert in_ranks(4, _layouts_against_torch, tmp_path / "r", seconds=120) == [True] * 4


@pytest.mark.parametrize("place", [(0, 32, 0, 32), (3, 20, 0, 32), (0, 32, 8, 16), (5, 6, 31, 32), (4, 4, 0, 32)])
def test_first_weights_are_filled_slice_by_slice(
    place: tuple[int, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "FILL_ELEMENTS", 100)
    shape, shapes = tiny_spec().model, parameter_shapes(tiny_spec().model, VOCABULARY)
    top, bottom, left, right = place
    whole = initial_tensor(NAME, (32, 32), shape, 5)
    write_hugging_face(
        tmp_path, shape, VOCABULARY, ((name, initial_tensor(name, size, shape, 5)) for name, size in shapes.items()),
        tokenizer_json=_tokenizer().decode(), end_of_text=END_OF_TEXT,
    )  # fmt: skip
    assert open_weights(str(tmp_path), tmp_path / "cache").vocabulary == VOCABULARY
    for first in (SeededState(shape, 5), ImportedState(str(tmp_path), shape, VOCABULARY)):
        box = TensorBox(NAME, (32, 32), (top, left), torch.full((bottom - top, right - left), 7.0))
        moment = TensorBox("optimizer.exp_avg." + NAME, (32, 32), (top, left), torch.full_like(box.data, 7.0))
        first.fill([box, moment])
        assert torch.equal(box.data, whole[top:bottom, left:right])
        assert not moment.data.any()
