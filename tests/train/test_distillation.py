"""Distillation: the divergence from a teacher of another shape, at every layout, and teachers that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.engines.interface import build_engine
from holdfast.engines.weights import teacher_shape
from holdfast.model.decoder import Decoder
from holdfast.model.hub import TEACHER_FIELD, first_weights_digest, require_weights
from holdfast.model.initialise import initialise
from holdfast.rank.state_loading import first_state
from holdfast.spec.errors import DataError
from tests.checkpoint.ranks import in_ranks
from tests.model.tiny_model import decoder, export, shape
from tests.train.ranks import Steps, join_exactly, steps_of
from tests.train.tiny_run import VOCABULARY, tiny_assignment, tiny_spec

TOP, WEIGHT, RATE, STEPS, END = 6, 0.5, 0.02, 2, 0
STAGES = ("parallel.pipeline=2", "training.micro_batch=1")
LAYOUTS = (
    (1, ("parallel.strategy=ddp",)),
    (2, ("parallel.strategy=ddp", "training.micro_batch=1")),
    (2, ("parallel.strategy=fsdp", "training.determinism=elastic")),
    (2, ("parallel.tensor=2",)),
    (2, ("parallel.context=2",)),
    (2, STAGES),
)
WARM = ("training.distillation.temperature=2.0",)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    export(folder, decoder(shape(layers=3, hidden=48), VOCABULARY))
    return folder


def fields(teacher: Path) -> tuple[str, ...]:
    return (
        "training.objective=distillation", f"training.distillation.teacher={teacher}",
        f"training.distillation.top_k={TOP}", f"training.distillation.hard_weight={WEIGHT}",
    )  # fmt: skip


def global_batch(step: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))


def reference(teacher: Path, temperature: float = 1.0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a plain loop in fp64 over all logits."""
    spec = tiny_spec(*fields(teacher))
    student, guide = Decoder(spec.model, VOCABULARY), decoder(shape(layers=3, hidden=48), VOCABULARY).double()
    initialise(student, spec.training.seed)
    student.double()
    settings = spec.training.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in student.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in student.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.epsilon,
    )  # fmt: skip
    curve = []
    for step in range(STEPS):
        rows = global_batch(step)
        logits, theirs = student(rows[:, :-1]), (guide(rows[:, :-1]).detach() / temperature).softmax(-1)
        top, tokens = theirs.topk(TOP)
        ours, mine = logits.log_softmax(-1), (logits / temperature).log_softmax(-1).gather(-1, tokens)
        rest, own_rest = 1 - top.sum(-1), 1 - mine.exp().sum(-1)
        divergence = (top * (top.log() - mine)).sum(-1) + rest * (rest.log() - own_rest.log())
        loss = divergence.mean() - WEIGHT * ours.gather(-1, rows[:, 1:, None]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), spec.training.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return curve


def _steps(rank: int, size: int, folder: Path, runs: list[tuple[str, ...]]) -> list[Steps]:
    join_exactly(folder, rank, size, always=True)
    results = []
    for overrides in runs:
        spec = tiny_assignment(*overrides, f"parallel.processes={size}")
        spec = spec.model_copy(
            update={"first_weights": first_weights_digest(tiny_spec(*overrides, f"parallel.processes={size}"))}
        )
        engine, first = build_engine(spec, VOCABULARY, END), first_state(spec, VOCABULARY)
        for box in engine.frozen():
            first.fill([box])
        first.fill(engine.boxes())
        engine.restored(0)
        results.append(steps_of(engine, spec, rank, size, map(global_batch, range(STEPS)), RATE))
    return results


@pytest.mark.slow
def test_every_layout_learns_the_likeliest_tokens_of_the_teacher(tmp_path: Path, teacher: Path) -> None:
    cold, warm = reference(teacher), reference(teacher, 2.0)
    for size in (1, 2):
        runs = [(*fields(teacher), *layout) for ranks, layout in LAYOUTS if ranks == size]
        runs.append((*runs[-1], *WARM))
        for ranks in in_ranks(size, _steps, tmp_path / str(size), runs, seconds=300):
            for run, (curve, boxes) in zip(runs, ranks, strict=True):
                torch.testing.assert_close(curve, warm if run[-1:] == WARM else cold, rtol=1e-4, atol=0)
                assert not [name for name, _, _ in boxes if name.startswith("teacher")], "a teacher in a checkpoint"


@pytest.mark.parametrize(
    ("changes", "vocabulary", "message"),
    [
        ({}, 200, "has a vocabulary of 300, and the run one of 200"),
        ({"context": 8}, VOCABULARY, "has a context of 8, shorter than model.context = 16"),
        ({"head": "scalar"}, VOCABULARY, "is a reward model"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], vocabulary: int, message: str
) -> None:
    export(tmp_path, decoder(shape(**changes), VOCABULARY))
    with pytest.raises(DataError, match=message):
        teacher_shape(tiny_assignment(*fields(tmp_path)), vocabulary)


def test_more_tokens_than_the_vocabulary_has_are_refused(teacher: Path) -> None:
    with pytest.raises(DataError, match=r"training\.distillation\.top_k: 301 is more than the 300 tokens"):
        teacher_shape(tiny_assignment(*fields(teacher), "training.distillation.top_k=301"), VOCABULARY)


def test_a_teacher_with_experts_gets_the_biases_of_its_routers(tmp_path: Path) -> None:
    """They are no parameters, and were left as the memory happened to be."""
    taught = decoder(shape(layers=1, family="dots1", experts=4, routing={"top_k": 2, "shared": 1}), VOCABULARY)
    taught.state_dict()["model.layers.0.mlp.gate.e_score_correction_bias"].copy_(torch.tensor([3.0, -1.0, 0.0, 2.0]))
    export(tmp_path, taught)
    spec = tiny_assignment(*fields(tmp_path))
    digest = first_weights_digest(tiny_spec(*fields(tmp_path)))
    first = first_state(spec.model_copy(update={"first_weights": digest}), VOCABULARY)
    engine = build_engine(spec, VOCABULARY, END)
    filled = {}
    for box in engine.frozen():
        first.fill([box])
        filled[box.name] = box.data
    assert filled.keys() == {f"teacher.{name}" for name in taught.state_dict()}
    for name, tensor in taught.state_dict().items():
        assert torch.equal(filled[f"teacher.{name}"], tensor), name


def test_the_run_id_has_the_content_of_the_teacher_and_not_its_place(tmp_path: Path, teacher: Path) -> None:
    from holdfast.spec import run_id

    other = tmp_path / "copy"
    other.mkdir()
    for file in teacher.iterdir():
        (other / file.name).write_bytes(file.read_bytes())

    def identity(folder: Path) -> str:
        spec = tiny_spec(*fields(folder))
        return run_id(spec, "d", first_weights=first_weights_digest(spec))

    assert identity(other) == identity(teacher)
    digest = first_weights_digest(tiny_spec(*fields(other))).removeprefix("+")
    export(other, decoder(shape(layers=1, hidden=48), VOCABULARY, seed=9))
    assert identity(other) != identity(teacher)
    with pytest.raises(DataError, match=r"training\.distillation\.teacher: .* holds other weights"):
        require_weights(str(other), digest, TEACHER_FIELD)
