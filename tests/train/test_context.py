"""Sequences cut over ranks: each rank computes the logits of its positions as one process does, with every kind of
mask.

In double precision, the order of sums changes results by less than 1e-12 of their size. A larger difference is an
error.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from holdfast.engines.mesh import Mesh
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.spec.model import Model
from holdfast.spec.parallel import Parallel
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import join
from tests.train.tiny_run import VOCABULARY, tiny_spec

RANKS = 4
FORMS = {"all before": (), "in windows": ("model.family=mistral", "model.sliding_window=5")}


def test_ranks_of_a_context_group_see_the_same_rows_and_each_a_part_of_them() -> None:
    mesh = Mesh.of(Parallel(strategy="fsdp", context=2, tensor=2), 8)
    assert mesh == Mesh(replicas=1, shards=4, tensor=2, context=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.context_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.context_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [rank for rank in range(8) if mesh.speaks(rank)] == [0, 2, 4, 6]  # each of them has separate losses
    assert [rank for rank in range(8) if mesh.counts(rank)] == [0, 4]
    stages = Mesh.of(Parallel(pipeline=2, context=2), 8)
    assert stages == Mesh(replicas=4, shards=1, tensor=1, pipeline=2, context=2)
    assert [stages.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank in range(8) if stages.speaks(rank)] == [4, 5, 6, 7]


@pytest.mark.slow
def test_parts_of_sequences_have_the_logits_and_gradients_of_whole_ones(tmp_path: Path) -> None:
    for cases in in_ranks(RANKS, _compared, tmp_path):
        assert len(cases) == 2 * 2 * 2
        for case, (positions, logits, gradient) in cases.items():
            assert positions == 16 / int(case[0]), case
            assert logits < 1e-12 and gradient < 1e-12, (case, logits, gradient)


def _compared(rank: int, size: int, folder: Path) -> dict[str, tuple[int, float, float]]:
    """The difference between a rank's logits, and the summed gradients of all ranks, and those of whole sequences."""
    import torch.distributed as dist

    from holdfast.engines.torch.context import SequenceShard, apply_context_parallel

    join(folder, rank, size, always=True)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (3, 16), generator=generator)
    documents = torch.tensor([[0] * 16, [0] * 3 + [1] * 8 + [2] * 5, [*range(16)]])
    results = {}
    for ranks, (form, overrides), packed in product((2, 4), FORMS.items(), (False, True)):
        shape = tiny_spec(*overrides).model
        part = SequenceShard.of(Mesh(size, 1, 1, context=ranks), rank, shape.context, torch.device("cpu"))
        whole, cut = _decoder(shape), _decoder(shape)
        assert part is not None
        apply_context_parallel(cut, part)
        positions = part.positions
        expected = whole(tokens, None, Segments.of_documents(documents) if packed else None)
        logits = cut(
            tokens[:, positions], None, Segments.of_documents(documents) if packed else Segments.of_rows(3, 16)
        )
        expected.square().sum().backward()
        logits.square().sum().backward()
        off = (logits - expected[:, positions]).abs().max() / expected.abs().max()
        worst = 0.0
        for reference, actual in zip(whole.parameters(), cut.parameters(), strict=True):
            assert reference.grad is not None and actual.grad is not None
            dist.all_reduce(actual.grad)  # of `size / ranks` groups with the same samples
            actual.grad *= ranks / size
            worst = max(worst, float((actual.grad - reference.grad).abs().max() / reference.grad.abs().max()))
        results[f"{ranks} ranks, {form}, {packed}"] = (logits.shape[1], float(off), worst)
    return results


def _decoder(shape: Model) -> Decoder:
    decoder = Decoder.empty(shape, VOCABULARY)
    initialise(decoder, 1)
    return decoder.double()
