"""One device mesh: any cut of the model, the batch and the sequence gives the same model, and any layout resumes from
any other's checkpoint.

Layouts add the same numbers in different orders. They agree with one process within a bound, and with themselves to the
last bit. Reordering a sum of n numbers changes it by about sqrt(n) units in the last place (Higham and Mary 2019); n is
at most the vocabulary here. A step starts from weights with the gradient errors of all earlier steps, and gradients are
sums of a forward and a backward pass. Therefore `bound` grows by twice that with every step.
"""

import importlib.util
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import (
    Attempt,
    Checkpointer,
    Retention,
    StateDigest,
    TensorBox,
    digest_of,
    read_manifest,
)
from holdfast.collectives import Gang
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch import pipeline
from holdfast.engines.torch.pipeline import given_layers, split_layers
from holdfast.engines.weights import SeededState
from holdfast.spec import run_id
from holdfast.spec.model import Model
from holdfast.spec.parallel import Parallel
from holdfast.spec.plan import settings_of, stages_of
from holdfast.store import Store, open_store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, join, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

RANKS, STEPS = 4, 5  # an odd number: biases of experts that move up and down are not zero at the end
# Four ranks each.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor x shards": ("parallel.tensor=2", "parallel.strategy=fsdp"),
    "replicas x shards": ("parallel.replicas=2", "parallel.strategy=fsdp"),
    "tensor x replicas": ("parallel.tensor=2", "parallel.strategy=ddp"),
    "tensor": ("parallel.tensor=4", "parallel.strategy=fsdp", "model.kv_heads=4"),
    "shards": ("parallel.strategy=fsdp",),
}
# Sequences cut over two or more ranks. Documents of the tiny dataset end within the sequences.
SEQUENCES: dict[str, tuple[str, ...]] = {
    "context x shards": ("parallel.context=2", "parallel.strategy=fsdp", "data.document_masks=true"),
    "context x tensor": ("parallel.context=2", "parallel.tensor=2", "data.document_masks=true"),
    "context": ("parallel.context=4", "parallel.strategy=fsdp"),
    "replicas of context": ("parallel.context=2", "parallel.strategy=fsdp", "parallel.replicas=2"),
    "context in windows": ("parallel.context=2", "model.family=mistral", "model.sliding_window=5"),
}
TIED = "model.tie_embeddings=true"
STAGES = ("parallel.pipeline=2", "parallel.strategy=fsdp", "model.tie_embeddings=false", "training.micro_batch=1")
PIPELINES: dict[str, tuple[str, ...]] = {
    "stages x shards": STAGES,
    "stages x replicas": (*STAGES, "parallel.strategy=ddp"),
    "stages x tensor": (*STAGES, "parallel.tensor=2"),
    "four stages": (*STAGES, "parallel.pipeline=4", "model.layers=4"),
    "GPipe": (*STAGES, "parallel.schedule=gpipe"),
    "interleaved": (*STAGES, "parallel.schedule=interleaved", "model.layers=4"),
    "zero bubble": (*STAGES, "parallel.schedule=zero_bubble", "parallel.reshard=never"),
    "masked stages": (*STAGES, "data.document_masks=true"),
    "recomputed stages": (*STAGES, "training.activation_checkpointing=full"),
    "stages x context": (*STAGES, "parallel.context=2", "data.document_masks=true"),
    "tied stages x shards": (*STAGES, TIED),
    "tied zero bubble": (*STAGES, TIED, "parallel.schedule=zero_bubble", "parallel.strategy=ddp"),
    "given stages": (*STAGES, "model.layers=4", "parallel.stages=[3, 1]", "parallel.tensor=2"),
    "given rounds": (*STAGES, TIED, "model.layers=5", "parallel.stages=[1, 1, 2, 1]", "parallel.schedule=interleaved"),
    "tied stages in fp16": (*STAGES, TIED, "training.precision=fp16"),
}
FORMS: dict[str, tuple[str, ...]] = {
    "biased": ("model.family=qwen2",),
    "normed": ("model.family=qwen3",),
    "bf16": ("training.precision=bf16",),
    "partly recomputed": ("training.activation_checkpointing=selective",),
}

# Every test run trains these. The drill trains the rest, and stops and resumes those in `STOPPED`. Another test loads
# the state of every layout in every other one.
FAST = (*list(LAYOUTS)[:2], "stages x shards", "zero bubble", "context x tensor")
MATRIX = {name: layout for name, layout in (LAYOUTS | PIPELINES | SEQUENCES).items() if name not in FAST}
MATRIX |= {form: (*LAYOUTS["tensor x shards"], *more) for form, more in FORMS.items()}
STOPPED = {
    "tensor", "stages x replicas", "interleaved", "tied zero bubble", "given rounds", "context x shards",
    "stages x context", "bf16", "tied stages in fp16", "partly recomputed",
}  # fmt: skip
CASES_PER_TEST = 8  # matrix cases per test: `train_in_ranks` has a limit of minutes
TAKEN_OVER = {**LAYOUTS, **{name: PIPELINES[name] for name in ("stages x tensor", "interleaved")},
              "uneven": (*STAGES, "parallel.stages=[3, 1]"), "copies": ()}  # fmt: skip


def overrides_of(*overrides: str, processes: int = RANKS) -> tuple[str, ...]:
    return (f"parallel.processes={processes}", f"training.steps={STEPS}", *overrides)


def alone(*overrides: str) -> tuple[str, ...]:
    """The same model in one process."""
    return overrides_of(*(field for field in overrides if not field.startswith(("parallel.", "cluster."))), processes=1)


def losses(store: Store, overrides: tuple[str, ...], salt: str) -> np.ndarray:
    rows = read_history(store, run_id(tiny_spec(*overrides), DATASET_ID, salt))
    return np.array([row["loss"] for row in rows], np.float32)


def require_close(found: np.ndarray, expected: np.ndarray, last_place: float = 2.0**-24) -> None:
    """Both curves agree within the bound of the module, for arithmetic of that precision."""
    assert len(found) == len(expected)
    bound = last_place * math.sqrt(VOCABULARY) * (1 + 2 * np.arange(len(found)))
    off = np.abs(found - expected) / expected
    assert (off <= bound).all(), (off / last_place, bound / last_place)


def test_ranks_of_a_tensor_group_see_the_same_rows_and_one_of_them_speaks() -> None:
    mesh = Mesh.of(Parallel(replicas=2, strategy="fsdp", tensor=2), 8)
    assert mesh == Mesh(replicas=2, shards=2, tensor=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rank for rank in range(8) if mesh.speaks(rank)] == [0, 2, 4, 6]
    assert Mesh.of(Parallel(tensor=2), 8) == Mesh(replicas=4, shards=1, tensor=2)
    stages = Mesh.of(Parallel(pipeline=2, tensor=2), 8)
    assert stages == Mesh(replicas=2, shards=1, tensor=2, pipeline=2)
    assert [stages.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [stages.place(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank in range(8) if stages.speaks(rank)] == [4, 6]
    assert Mesh.of(Parallel(strategy="fsdp"), 8) == Mesh(replicas=1, shards=8, tensor=1)


def test_stages_are_dealt_layers_so_that_the_dearest_costs_least() -> None:
    assert split_layers(Model(layers=8), 300, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert split_layers(Model(layers=8), 50_000, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]  # the head
    wide = Model(
        family="glm4_moe", layers=4, experts=8, ffn=64, dense_layers=1, dense_ffn=16_384, routing={"shared": 1}
    )
    assert split_layers(wide, 300, 2) == [range(0, 1), range(1, 4)], "the dense layer costs more than three of experts"
    for layers, stages in product(range(1, 9), range(1, 9)):
        if stages <= layers:
            stages_layers = split_layers(Model(layers=layers), 300, stages)
            assert all(stages_layers) and [layer for stage in stages_layers for layer in stage] == list(range(layers))


def test_explicit_stages_are_used_unchanged() -> None:
    assert given_layers([3, 5]) == [range(0, 3), range(3, 8)]
    assert given_layers([1, 2, 1, 4]) == [range(0, 1), range(1, 3), range(3, 4), range(4, 8)]


def test_only_explicit_pipeline_stages_are_in_the_plan() -> None:
    """Plans of runs from before the field existed keep their fingerprint."""
    even, uneven = (settings_of(spec.training, spec.parallel, "cpu", 1) for spec in (
        tiny_spec(*overrides_of(*STAGES)), tiny_spec(*overrides_of(*STAGES, "model.layers=4", "parallel.stages=[1, 3]"))
    ))  # fmt: skip
    assert "parallel.stages" not in even and stages_of(even) is None
    assert (uneven["parallel.stages"], stages_of(uneven)) == ("1, 3", (1, 3))


@pytest.mark.slow
def test_stages_of_other_sizes_are_the_same_model_and_another_plan(tmp_path: Path) -> None:
    """A run can resume with other stages if a person requests it, and each time from the saved state."""
    store, base = new_store(tmp_path / "store"), (*STAGES, TIED, "model.layers=4", "training.steps=8")
    uneven, even, other = (
        overrides_of(*base, *more, processes=2) for more in (["parallel.stages=[1, 3]"], [], ["parallel.stages=[3, 1]"])
    )
    runs: Runs = [(uneven, "moved", 2), (uneven, "stayed", 2), (uneven, "stayed", None), (uneven, "whole", None)]
    runs += [(even, "moved", None)]
    ends = ["PreemptedError", "PreemptedError", "", "", "PlanChangedError"]
    assert train_in_ranks(2, store.url, tmp_path / "first", runs) == ends
    moving: Runs = [(even, "moved", 5), (other, "moved", None)]
    assert train_in_ranks(2, store.url, tmp_path / "moved", moving, replan=True) == ["PreemptedError", ""]
    assert train_in_ranks(1, store.url, tmp_path / "one", [(alone(*base), "one", None)]) == [""]
    assert trained(store, tiny_spec(*uneven), "stayed") == trained(store, tiny_spec(*uneven), "whole")
    for salt in ("moved", "whole"):
        require_close(losses(store, uneven, salt), losses(store, alone(*base), "one"))
    segments = read_manifest(store, run_id(tiny_spec(*uneven), DATASET_ID, "moved"), 8).segments
    assert [stages_of(segment.plan.settings) for segment in segments] == [(1, 3), None, (3, 1)]


@pytest.mark.slow
def test_a_mesh_matches_one_process_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    two = list(LAYOUTS.items())[:2]
    runs: Runs = [(overrides_of(*layout), name, None) for name, layout in two]
    ends = ["", "", "PreemptedError", ""]
    stopped, cut = overrides_of(*LAYOUTS["tensor x shards"]), SEQUENCES["context x tensor"]
    runs += [(stopped, "stopped", 2), (stopped, "stopped", None)]
    bubbles = overrides_of(*PIPELINES["zero bubble"])
    runs += [
        (overrides_of(*STAGES), "stages", None),
        (bubbles, "bubbles", None),
        (overrides_of(*cut), "sequences", None),
    ]
    assert train_in_ranks(RANKS, store.url, tmp_path / "ranks", runs) == [*ends, "", "", ""]
    references: Runs = [(alone(), "one", None), (alone(*STAGES), "untied", None), (alone(*cut), "masked", None)]
    assert train_in_ranks(1, store.url, tmp_path / "one", references) == ["", "", ""]
    single = losses(store, alone(), "one")
    require_close(losses(store, overrides_of(*STAGES), "stages"), losses(store, alone(*STAGES), "untied"))
    require_close(losses(store, overrides_of(*cut), "sequences"), losses(store, alone(*cut), "masked"))
    assert single[-1] < single[0]
    for name, layout in two:
        require_close(losses(store, overrides_of(*layout), name), single)
    assert trained(store, tiny_spec(*stopped), "stopped") == trained(store, tiny_spec(*stopped), "tensor x shards")
    assert trained(store, tiny_spec(*bubbles), "bubbles") == trained(store, tiny_spec(*bubbles), "stages")
    placed = read_manifest(store, run_id(tiny_spec(*stopped), DATASET_ID, "stopped"), STEPS).layout
    assert placed == {"engine": "torch", "strategy": "fsdp", "world_size": 4, "shards": 2, "tensor": 2}


@pytest.mark.drill
@pytest.mark.parametrize("first", range(0, len(MATRIX), CASES_PER_TEST))
def test_every_layout_and_form_matches_one_process_and_resumes_with_the_same_bits(tmp_path: Path, first: int) -> None:
    store = new_store(tmp_path / "store")
    matrix = dict(list(MATRIX.items())[first : first + CASES_PER_TEST])
    runs: Runs = []
    for name, layout in matrix.items():
        overrides, stopped = overrides_of(*layout), f"{name} stopped"
        runs += [(overrides, name, None)]
        runs += [(overrides, stopped, 2), (overrides, stopped, None)] if name in STOPPED else []
    ends = ["" if stop is None else "PreemptedError" for _, _, stop in runs]
    assert train_in_ranks(RANKS, store.url, tmp_path / "ranks", runs) == ends
    salts = {alone(*layout): f"alone {name}" for name, layout in matrix.items()}
    references: Runs = [(fields, salt, None) for fields, salt in salts.items()]
    assert train_in_ranks(1, store.url, tmp_path / "one", references) == [""] * len(references)
    for name, layout in matrix.items():
        spec, single = tiny_spec(*overrides_of(*layout)), alone(*layout)
        if name in STOPPED:
            assert trained(store, spec, f"{name} stopped") == trained(store, spec, name)
        last_place = {"bf16": 2.0**-9, "fp16": 2.0**-12}.get(name[-4:], 2.0**-24)
        require_close(losses(store, overrides_of(*layout), name), losses(store, single, salts[single]), last_place)


@pytest.mark.drill
def test_any_layout_takes_over_the_state_of_any_other_bit_for_bit(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    (digests, *others) = in_ranks(RANKS, _take_over, url, tmp_path, seconds=300)
    assert others == [digests] * (RANKS - 1)
    assert len(digests) == len(TAKEN_OVER) ** 2
    assert len(set(digests.values())) == 1, digests
    assert len({read_manifest(open_store(url), name, 1).state_digest for name in ("first", *TAKEN_OVER)}) == 1


def _take_over(rank: int, size: int, url: str, folder: Path) -> dict[str, str]:
    """The digest of each layout's saved state after loading in each layout."""
    from holdfast.engines.interface import build_engine

    join(folder, rank, size, always=True)
    store, gang = open_store(url), Gang()
    model = (*STAGES[3:], "model.layers=4", "model.kv_heads=4")
    engines = {
        name: build_engine(tiny_assignment(*overrides_of(*model, *layout, TIED)), VOCABULARY, 0)
        for name, layout in TAKEN_OVER.items()
    }

    def load(identity: str, target: str) -> None:
        checkpointer = Checkpointer(store, Attempt(identity, 1), Retention(9), describe={})
        engines[target].restored(checkpointer.restore(engines[target].boxes(), _random_state))

    def save(identity: str, source: str) -> None:
        describe = {"dataset_id": DATASET_ID, "layout": engines[source].layout, "random": {}}
        checkpointer = Checkpointer(store, Attempt(identity, 1), Retention(9), describe=describe)
        checkpointer.save(1, engines[source].saved(), {"optimizer.step": 1})
        checkpointer.wait()
        gang.barrier()  # only rank 0 has waited for the commit

    load("first", "shards")  # no part of it is on two ranks: each initializes its own
    save("first", "shards")
    for source in engines:
        load("first", source)
        save(source, source)
    digests = {}
    for source, target in product(engines, engines):
        load(source, target)
        digest = sum(gang.all_gather(digest_of(engines[target].saved()), StateDigest), StateDigest())
        digests[f"{source} to {target}"] = str(digest)
    return digests


def _random_state(boxes: Sequence[TensorBox]) -> None:
    for box in boxes:
        box.data.normal_()


@pytest.mark.drill
def test_a_vocabulary_that_does_not_divide_is_cut_all_the_same(tmp_path: Path) -> None:
    (single,) = in_ranks(1, _first_loss, tmp_path / "one", ())
    losses_of_ranks = in_ranks(2, _first_loss, tmp_path / "two", ("parallel.tensor=2",))
    assert losses_of_ranks[0] == losses_of_ranks[1]
    require_close(np.array(losses_of_ranks[:1], np.float32), np.array([single], np.float32))


def _first_loss(rank: int, size: int, folder: Path, overrides: tuple[str, ...]) -> float:
    from holdfast.engines.interface import build_engine

    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    assignment = tiny_assignment(*overrides_of(*overrides, processes=size))
    engine = build_engine(assignment, VOCABULARY + 1, 0)
    SeededState(assignment.model, 3).fill(engine.boxes())
    engine.restored(0)
    return float(engine.step(torch.arange(8 * 17).view(8, 17) % (VOCABULARY + 1), 0.1).loss)


@pytest.mark.drill
def test_a_run_resumes_with_another_number_of_ranks_and_several_layouts(tmp_path: Path) -> None:
    """Each resume uses `--replan`, and the change of the plan is a segment."""
    store, name, long = new_store(tmp_path / "store"), "moved", "training.steps=8"
    shards, cut = overrides_of(*LAYOUTS["shards"], long), overrides_of("parallel.tensor=2", long, processes=2)
    sequences, single = overrides_of("parallel.context=2", long, processes=2), alone(long)
    steps: list[tuple[int, tuple[str, ...], int | None]]
    steps = [(4, shards, 1), (2, cut, 3), (2, sequences, 5), (1, single, None)]
    for number, (ranks, overrides, stop) in enumerate(steps):
        runs: Runs = [(overrides, name, stop)]
        if number:
            assert train_in_ranks(ranks, store.url, tmp_path / f"refused-{number}", runs) == ["PlanChangedError"]
        ends = train_in_ranks(ranks, store.url, tmp_path / str(number), runs, replan=number > 0)
        assert ends == ["" if stop is None else "PreemptedError"]
    assert train_in_ranks(1, store.url, tmp_path / "one", [(single, "one", None)]) == [""]
    require_close(losses(store, shards, name), losses(store, single, "one"))
    manifest = read_manifest(store, run_id(tiny_spec(*shards), DATASET_ID, name), 8)
    assert [segment.from_step for segment in manifest.segments] == [0, 2, 4, 6]
    assert [segment.plan.settings["parallel.tensor"] for segment in manifest.segments] == [1, 2, 1, 1]
    assert [segment.plan.settings["parallel.context"] for segment in manifest.segments] == [1, 1, 2, 1]


def test_torch_without_its_private_descriptions_of_stages_still_trains_without_a_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_StageForwardMeta", "_StageBackwardMeta", "_TensorMeta"):
        monkeypatch.delattr(f"torch.distributed.pipelining._utils.{name}")
    module_spec = importlib.util.spec_from_file_location("pipeline_again", pipeline.__file__)
    assert module_spec is not None
    assert module_spec.loader is not None
    module_spec.loader.exec_module(importlib.util.module_from_spec(module_spec))
