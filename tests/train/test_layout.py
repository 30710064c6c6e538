"""Where a tensor lies: the parts of all ranks make up every tensor once, and each rank fills no more than its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.components.checkpoint import TensorBox
from holdfast.components.model.hugging_face import open_weights, write_hugging_face
from holdfast.components.model.initialise import initial_tensor, parameter_shapes
from holdfast.components.train import weights
from holdfast.components.train.engines.layout import TensorLayout
from holdfast.components.train.weights import ImportedState, SeededState
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import join
from tests.train.tiny_run import END_OF_TEXT, VOCABULARY, _tokenizer, tiny_spec

NAME = "model.layers.0.self_attn.q_proj.weight"


@settings(deadline=None)
@given(st.data())
def test_the_parts_of_all_ranks_make_up_a_tensor_exactly_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = tuple(data.draw(st.sampled_from([*range(len(shape)), None])) for _ in mesh)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh)):
        offset, size = TensorLayout("w", shape, mesh, coordinate, cut).part()
        seen[tuple(slice(low, low + each) for low, each in zip(offset, size, strict=True))] += 1
    copies = 1
    for ranks, dimension in zip(mesh, cut, strict=True):
        copies *= 1 if dimension is not None else ranks
    assert bool((seen == copies).all())


def _layouts_against_torch(rank: int, size: int, folder: Path) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, deepspeed=False)
    placements = [Shard(0), Shard(1), Replicate()]
    for shape, mesh_shape in product([(7, 5), (3, 9), (2, 2)], [(4,), (2, 2)]):
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for places in product(placements, repeat=len(mesh_shape)):
            tensor = distribute_tensor(whole, mesh, places)
            box = TensorLayout.of("w", tensor).box(tensor)
            place = tuple(slice(low, low + each) for low, each in zip(box.offset, box.data.shape, strict=True))
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
