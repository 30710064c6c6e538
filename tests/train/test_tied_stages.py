"""A tied embedding in a pipeline: two stages have a copy each, and all other code sees one matrix."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import TensorBox, digest_of
from holdfast.collectives import Gang
from holdfast.engines.interface import Engine
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch.tied import TIED
from holdfast.engines.weights import SeededState
from holdfast.rank.replicas import require_equal_replicas
from holdfast.spec.errors import HoldfastError
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import join
from tests.train.test_mesh import overrides_of, require_close
from tests.train.tiny_run import VOCABULARY, tiny_assignment

TWO = ("parallel.pipeline=2", "training.micro_batch=1", "model.layers=4")
STEPS = 3
# The first two need four ranks and run in every test run. The rest runs in the drill.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": (*TWO, "parallel.tensor=2"),
    "interleaved shards": (*TWO, "parallel.strategy=fsdp", "parallel.schedule=interleaved"),
    "GPipe": (*TWO, "parallel.schedule=gpipe"),
    "zero bubble": (*TWO, "parallel.strategy=fsdp", "parallel.schedule=zero_bubble", "parallel.reshard=never"),
    "four stages": (*TWO, "parallel.pipeline=4"),
    "context": (*TWO, "parallel.context=2"),
}
MODEL = tuple(each for each in TWO if not each.startswith("parallel."))
Found = tuple[list[float], list[float]]  # the loss and the gradient norm of each step


def test_the_ends_of_a_pipeline_are_the_ranks_with_one_place_in_the_first_and_the_last_stage() -> None:
    assert Mesh(replicas=1, shards=2, tensor=1, pipeline=2).ends() == [[0, 2], [1, 3]]
    assert Mesh(replicas=1, shards=1, tensor=2, pipeline=3).ends() == [[0, 4], [1, 5]]


@pytest.mark.slow
def test_both_copies_are_the_same_bits_after_every_step_and_the_matrix_that_one_process_has(tmp_path: Path) -> None:
    _require_one_matrix(tmp_path, list(LAYOUTS)[:2])


@pytest.mark.drill
def test_tied_weights_stay_equal_under_every_schedule_and_mesh(tmp_path: Path) -> None:
    _require_one_matrix(tmp_path, list(LAYOUTS)[2:])


def _require_one_matrix(folder: Path, names: list[str]) -> None:
    (((losses, norms),),) = in_ranks(1, _train, folder / "one", [MODEL], seconds=200)
    results = in_ranks(4, _train, folder / "ranks", [LAYOUTS[name] for name in names], seconds=200)
    assert all(rank_results == results[0] for rank_results in results)
    for name, (actual, norms_here) in zip(names, results[0], strict=True):
        require_close(np.array(actual, np.float32), np.array(losses, np.float32))
        # If the matrix counted twice, or lacked one of its two gradients, the norm would differ by far.
        assert norms_here == pytest.approx(norms, rel=1e-5), name


def _train(rank: int, size: int, folder: Path, layouts: list[tuple[str, ...]]) -> list[Found]:
    from holdfast.engines.interface import build_engine

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    gang, results = Gang(), []
    for overrides in layouts:
        assignment = tiny_assignment(*overrides_of(*overrides, processes=size))
        engine, mesh = build_engine(assignment, VOCABULARY, 0), Mesh.of(assignment.parallel, size)
        SeededState(assignment.model, 3).fill(engine.boxes())
        engine.restored(0)
        rows = torch.arange(8 * 17).view(8, 17) * 7 % VOCABULARY
        outputs = []
        for step in range(STEPS):
            outputs.append(engine.step(rows.chunk(mesh.data)[mesh.data_rank(rank)], 0.01))
            copies = gang.all_gather({box.name: str(digest_of([box])) for box in _tied(engine.boxes())}, dict[str, str])
            if mesh.pipeline > 1:
                assert [len(part) for part in copies] == [
                    3 * (mesh.place(r) % (mesh.pipeline - 1) == 0) for r in range(size)
                ]
                assert all(copies[first] == copies[last] for first, last in mesh.ends()), (overrides, step)
            require_equal_replicas(engine, gang, step)
        element_counts = gang.all_gather([box.data.numel() for box in _tied(engine.saved())], list[int])
        assert sum(map(sum, element_counts)) == 3 * VOCABULARY * assignment.model.hidden, (
            "a checkpoint has each element once"
        )
        if mesh.pipeline > 1:
            _require_a_flipped_bit_to_be_seen(engine, gang, mesh)
        results.append(([float(output.loss) for output in outputs], [float(output.grad_norm) for output in outputs]))
    return results


def _require_a_flipped_bit_to_be_seen(engine: Engine, gang: Gang, mesh: Mesh) -> None:
    """The last rank's copy differs in one bit."""
    if gang.rank == mesh.size - 1:
        next(iter(_tied(engine.boxes()))).data.view(torch.int32)[0, 0] ^= 1
    with pytest.raises(HoldfastError, match=TIED):
        require_equal_replicas(engine, gang, STEPS)


def _tied(boxes: Sequence[TensorBox]) -> list[TensorBox]:
    return [box for box in boxes if box.name.endswith(TIED)]
