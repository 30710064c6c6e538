"""The whole model that generates answers, and the losses of answers, on every rank of a layout that divides them.

Each is that of one process: the weights and the answers to the last bit, and the losses but for the order of sums. The
planner counts the memory of the copy.
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from holdfast.engines.assignment import Assignment
from holdfast.engines.mesh import Mesh
from holdfast.model.initialise import parameter_count
from holdfast.planning import ACCELERATORS, Candidate
from holdfast.planning.auto import layout_of, task_of
from holdfast.rollouts.generation import generate_lot, sampling_of
from tests.checkpoint.ranks import in_ranks
from tests.planning.answering import answering_spec, peak_of_answers
from tests.train.ranks import join_exactly
from tests.train.tiny_run import VOCABULARY, tiny_assignment

STAGES = ("parallel.pipeline=2", "parallel.strategy=fsdp", "model.tie_embeddings=false")
LORA = ("training.lora.rank=4", "model.init_from=x")
CASES: dict[str, tuple[str, ...]] = {
    "stages in bf16": (*STAGES, "training.precision=bf16"),
    "shards in bf16": ("parallel.strategy=fsdp", "training.precision=bf16"),
    "adapters in parts": (*LORA, "parallel.tensor=2", "training.lora.targets=[q_proj, o_proj, down_proj]"),
    "adapters in stages, in bf16": (*LORA, *STAGES, "training.precision=bf16", "training.lora.base=bf16"),
}
PEAKS: dict[str, tuple[str, ...]] = {
    "tensor": ("parallel.tensor=2",),
    "stages in bf16": (*STAGES, "training.precision=bf16"),
    "shards": ("parallel.strategy=fsdp",),
}
pytestmark = pytest.mark.slow

PROMPTS = [[60], [61, 62], [63, 64, 65]]
LAST_PLACE = {"fp32": 2.0**-24, "bf16": 2.0**-9}


def fields_of(case: str, ranks: int) -> tuple[str, ...]:
    """The overrides of a case. One rank has no layout."""
    own = CASES[case] if ranks > 1 else (field for field in CASES[case] if not field.startswith("parallel."))
    return (f"parallel.processes={ranks}", "training.global_batch=8", *own)


def _seen(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    """What a rank generates and computes in each case: weights by name, answers, and the losses of its rows."""
    from holdfast.engines.torch.engine import TorchEngine

    join_exactly(folder, rank, size, always=False)
    results = []
    for case in CASES:
        spec = tiny_assignment(*fields_of(case, size))
        engine = TorchEngine(spec, VOCABULARY, 0)
        for box in (*engine.boxes(), *engine.frozen()):
            draw = torch.Generator().manual_seed(crc32(box.name.encode()))
            whole = torch.randn(box.global_shape, generator=draw) * 0.3
            part = tuple(slice(at, at + n) for at, n in zip(box.offset, box.data.shape, strict=True))
            with torch.no_grad():
                box.data.copy_(whole[part])
        rows = torch.arange(8 * 17).view(8, 17) % VOCABULARY
        mesh = Mesh.of(spec.parallel, size)
        count, place = len(rows) // mesh.data, mesh.data_rank(rank)
        sampling = sampling_of(spec.training.grpo.model_copy(update={"answer_tokens": 6}), 2, 0, 0)
        with engine.generating() as decoder:
            weights = {name: (str(each.dtype), each.tolist()) for name, each in decoder.state_dict().items()}
            answers = generate_lot(decoder, PROMPTS, range(len(PROMPTS)), sampling)
        losses = engine.losses(rows[place * count : (place + 1) * count])
        results.append({"weights": weights, "answers": answers, "first": place * count, "losses": losses.tolist()})
    return results


def _seen_with_peaks(rank: int, size: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Also the peak of memory while a rank answers, by layout."""
    from holdfast.engines.torch.engine import TorchEngine

    results, peaks = _seen(rank, size, folder), {}
    for name, layout in PEAKS.items() if size > 1 else ():
        spec = answering_spec("parallel.processes=2", *layout)
        engine = TorchEngine(Assignment.of(spec, "run", "dataset"), 256, 3)
        peaks[name] = peak_of_answers(engine, spec.model, spec.training.grpo, 256)
    return results, peaks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[list[dict[str, Any]], dict[str, int]]]]:
    """The results of each rank, by the number of ranks."""
    return {size: in_ranks(size, _seen_with_peaks, tmp_path_factory.mktemp("ranks")) for size in (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_answers_and_computes_losses_like_one_process(seen: Any, case: str) -> None:
    number = list(CASES).index(case)
    ((results, _),) = seen[1]
    alone = results[number]
    last_place = LAST_PLACE["bf16" if "training.precision=bf16" in CASES[case] else "fp32"]
    for results, _ in seen[2]:
        found = results[number]
        assert found["weights"] == alone["weights"]
        assert found["answers"] == alone["answers"]
        losses = torch.tensor(found["losses"])
        expected = torch.tensor(alone["losses"])[found["first"] :][: len(losses)]
        assert float(expected.min()) > 0.01
        torch.testing.assert_close(losses, expected, rtol=last_place * VOCABULARY**0.5, atol=last_place)


@pytest.mark.parametrize("layout", PEAKS)
def test_the_planner_counts_the_copy_that_answers(seen: Any, layout: str) -> None:
    spec = answering_spec("parallel.processes=2", *PEAKS[layout])
    task = task_of(spec, ACCELERATORS["H100"].model_copy(update={"kind": "cpu", "context": 0}), 2, 256)
    memory = Candidate(task, layout_of(spec)).memory
    assert memory.moment == "answers"
    assert memory.terms["whole model"] == 4 * parameter_count(spec.model, 256)
    peak = max(peaks[layout] for _, peaks in seen[2])
    assert memory.total - memory.terms["fragmentation"] == pytest.approx(peak, rel=0.05)
