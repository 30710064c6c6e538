"""Mixtures of experts in training: one model at every layout, the same bits after a stop, and balanced experts."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

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
    open_checkpoint,
    read_manifest,
)
from holdfast.collectives import Gang
from holdfast.engines.mesh import Mesh
from holdfast.model.experts import CORRECTION
from holdfast.model.initialise import initial_tensor
from holdfast.planning import ACCELERATORS, Architecture, memory, practice_here
from holdfast.planning.auto import layout_of
from holdfast.spec import SpecError, run_id
from holdfast.spec.parallel import Parallel
from holdfast.store import Store, open_store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, join, train_in_ranks, trained
from tests.train.test_mesh import STEPS, overrides_of, require_close
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

RANKS = 4
MIXTURE = ("model.family=mixtral", "model.experts=4", "model.ffn=24", "model.routing.coefficient=0.1")
BIASED = (
    "model.family=dots1", "model.experts=4", "model.ffn=24", "model.routing.shared=1", "model.routing.balance=bias",
    "model.routing.bias_step=0.01",
)  # fmt: skip
FOUR = ("model.layers=4", "model.tie_embeddings=false")
# The model of each case, and its layout. `FAST` runs in every test run, the rest in the drill.
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "expert parallel 2": (MIXTURE, ("parallel.strategy=fsdp", "parallel.expert=2")),
    "expert parallel 4": (BIASED, ("parallel.strategy=ddp", "parallel.expert=4")),
    "shards": (BIASED, ("parallel.strategy=fsdp", "training.activation_checkpointing=full")),
    "expert parallel within replicas": (BIASED, ("parallel.strategy=fsdp", "parallel.replicas=2", "parallel.expert=2")),
    "expert parallel among copies": (MIXTURE, ("parallel.strategy=ddp", "parallel.expert=2")),
    "expert parallel, partly recomputed": (
        BIASED, ("parallel.strategy=fsdp", "parallel.expert=4", "training.activation_checkpointing=selective")
    ),
    "expert parallel in bf16": ((*MIXTURE, "training.precision=bf16"), ("parallel.strategy=fsdp", "parallel.expert=2")),
}  # fmt: skip
STAGES = ("parallel.pipeline=2", "parallel.strategy=fsdp", "training.micro_batch=1")
LAYOUTS |= {
    "stages x expert parallel copies": (BIASED, (*STAGES, "parallel.strategy=ddp", "parallel.expert=2")),
    "zero bubble x expert parallel": (
        BIASED, (*STAGES, "parallel.schedule=zero_bubble", "parallel.reshard=never", "parallel.expert=2")
    ),
    "recomputed stages x expert parallel": (
        MIXTURE, (*STAGES, "parallel.expert=2", "training.activation_checkpointing=full")
    ),
    "interleaved": ((*BIASED, *FOUR), (*STAGES, "parallel.schedule=interleaved", "parallel.expert=2")),
    "four stages": ((*BIASED, *FOUR), (*STAGES, "parallel.pipeline=4")),
    "masked stages": ((*MIXTURE, "data.document_masks=true"), (*STAGES, "parallel.expert=2")),
}  # fmt: skip
SHARED = (
    "model.family=qwen2_moe", "model.experts=4", "model.ffn=24", "model.routing.shared=2",
    "model.routing.normalise=false", "model.routing.coefficient=0.1",
)  # fmt: skip
TENSOR, CONTEXT = "parallel.tensor=2", "parallel.context=2"
LAYOUTS |= {
    "tensor x expert parallel 4": (SHARED, ("parallel.strategy=fsdp", TENSOR, "parallel.expert=4")),
    "tensor": ((*MIXTURE, "model.kv_heads=4"), ("parallel.strategy=fsdp", "parallel.tensor=4")),
    "stages x tensor": (SHARED, (*STAGES, TENSOR)),
    "stages x tensor x expert parallel": (MIXTURE, (*STAGES, TENSOR, "parallel.expert=2")),
    "context x expert parallel": (BIASED, ("parallel.strategy=fsdp", CONTEXT, "parallel.expert=4")),
    "context x tensor": (MIXTURE, (CONTEXT, TENSOR, "parallel.expert=2")),
    "stages x context": (MIXTURE, (*STAGES, CONTEXT, "parallel.expert=2")),
    "partly recomputed context": (
        SHARED, ("parallel.strategy=fsdp", CONTEXT, "training.activation_checkpointing=selective")
    ),
}  # fmt: skip
FAST = {
    name: LAYOUTS[name]
    for name in ("expert parallel 4", "shards", "stages x tensor x expert parallel", "context x tensor")
}
SLOW = {name: layout for name, layout in LAYOUTS.items() if name not in FAST}
STOPPED = {  # of the drill; for resuming, another test loads every layout's state in every other layout
    "expert parallel among copies", "expert parallel, partly recomputed", "expert parallel in bf16",
    "zero bubble x expert parallel", "interleaved", "four stages", "tensor x expert parallel 4", "stages x tensor",
    "context x expert parallel", "stages x context",
}  # fmt: skip
CASES_PER_TEST = 8  # drill cases per test: `train_in_ranks` has a limit of minutes


def column(store: Store, overrides: tuple[str, ...], salt: str, name: str = "loss") -> np.ndarray:
    rows = read_history(store, run_id(tiny_spec(*overrides), DATASET_ID, salt))
    return np.array([row[name] for row in rows], np.float32)


def train_all(tmp_path: Path, layouts: dict[str, tuple[tuple[str, ...], tuple[str, ...]]], stopped: list[str]) -> Store:
    """Train every layout, and those in `stopped` again with a stop. Require one loss curve per model."""
    store = new_store(tmp_path / "store")
    runs: Runs = [(overrides_of(*model, *layout), name, None) for name, (model, layout) in layouts.items()]
    for name in stopped:
        overrides = overrides_of(*layouts[name][0], *layouts[name][1])
        runs += [(overrides, f"{name} stopped", 2), (overrides, f"{name} stopped", None)]
    assert train_in_ranks(RANKS, store.url, tmp_path / "ranks", runs) == [""] * len(layouts) + [
        "PreemptedError", "",
    ] * len(stopped)  # fmt: skip
    models = sorted({model for model, _ in layouts.values()})
    references: Runs = [(overrides_of(*model, processes=1), "one", None) for model in models]
    assert train_in_ranks(1, store.url, tmp_path / "one", references) == [""] * len(models)
    for name, (model, layout) in layouts.items():
        single, fields = overrides_of(*model, processes=1), overrides_of(*model, *layout)
        last_place = 2.0**-9 if "bf16" in name else 2.0**-24
        require_close(column(store, fields, name), column(store, single, "one"), last_place)
        found, expected = (column(store, *run, "grad_norm")[:1] for run in ((fields, name), (single, "one")))
        require_close(found, expected, last_place)
    for name in stopped:
        spec = tiny_spec(*overrides_of(*layouts[name][0], *layouts[name][1]))
        assert trained(store, spec, f"{name} stopped") == trained(store, spec, name)
    return store


@pytest.mark.slow
def test_a_mixture_is_the_same_model_for_any_expert_placement_and_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = train_all(tmp_path, FAST, ["expert parallel 4"])
    for name in ("expert parallel 4", "shards"):
        _biases_were_moved(store, overrides_of(*BIASED, *LAYOUTS[name][1]), name)
    _rows_are_read_by_themselves(store, overrides_of(*BIASED, *LAYOUTS["shards"][1]), "shards", monkeypatch)
    manifest = read_manifest(
        store,
        run_id(tiny_spec(*overrides_of(*BIASED, *LAYOUTS["expert parallel 4"][1])), DATASET_ID, "expert parallel 4"),
        STEPS,
    )
    assert manifest.layout == {"engine": "torch", "strategy": "ddp", "world_size": 4, "replicas": 4, "expert": 4}


@pytest.mark.drill
@pytest.mark.parametrize("first", range(0, len(SLOW), CASES_PER_TEST))
def test_every_layout_of_a_mixture_matches_one_process_and_resumes_with_the_same_bits(
    tmp_path: Path, first: int
) -> None:
    some = dict(list(SLOW.items())[first : first + CASES_PER_TEST])
    train_all(tmp_path, some, [name for name in some if name in STOPPED])


def test_ranks_with_parts_of_one_sequence_are_shards_to_experts() -> None:
    def of(ranks: int, **parallel: Any) -> tuple[int, ...]:
        return tuple(Mesh.of(Parallel(**parallel), ranks).of_experts.values())

    assert of(8, strategy="fsdp", expert=2) == (1, 1, 4, 2)  # of: pipeline, replicas, shards, expert
    assert of(8, strategy="fsdp", tensor=2, expert=8) == (1, 1, 1, 8)
    assert of(8, strategy="fsdp", replicas=2, tensor=2, expert=2) == (1, 2, 2, 2)
    assert of(8, tensor=2) == (1, 4, 2, 1)
    assert of(8, tensor=2, expert=4) == (1, 2, 1, 4)
    assert of(8, pipeline=2, context=2, expert=4) == (2, 1, 1, 4)


@pytest.mark.drill
def test_any_layout_of_a_mixture_takes_over_the_state_of_any_other_bit_for_bit(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    results = in_ranks(RANKS, _take_over, url, tmp_path, seconds=300)
    digests, _ = results[0]
    assert all(of_each == digests for of_each, _ in results)
    assert len(digests) == len(TAKEN_OVER) ** 2
    assert len(set(digests.values())) == 1, digests
    for name, layout in TAKEN_OVER.items():
        element_counts = {elements[name] for _, elements in results}
        assert planned(*DEEP, *layout) in element_counts
        assert max(element_counts) - min(element_counts) < 0.01 * max(element_counts), "stages are divided evenly here"


def planned(*overrides: str) -> int:
    """The planner's count of weight elements on the fullest rank."""
    spec = tiny_spec(*overrides_of(*overrides))
    layout = layout_of(spec)
    estimate = memory(
        Architecture.of(spec.model, VOCABULARY), layout, ACCELERATORS["H100"], global_batch=8, precision="fp32",
        practice=practice_here("fp32", layout, "nvidia"),
    )  # fmt: skip
    return round(estimate.terms["weights"] / 4)


DEEP = (*BIASED, *FOUR, STAGES[2])
TAKEN_OVER = {
    "half": ("parallel.strategy=fsdp", "parallel.expert=2"),
    "within replicas": ("parallel.strategy=fsdp", "parallel.replicas=2", "parallel.expert=2"),
    "all": ("parallel.strategy=ddp", "parallel.expert=4"),
    "shards": ("parallel.strategy=fsdp",),
    "interleaved": (*STAGES, "parallel.schedule=interleaved"),
    "stages x tensor": (*STAGES, TENSOR),
    "tensor": ("parallel.strategy=fsdp", TENSOR, "parallel.expert=4"),
    "copies": (),
    "context": ("parallel.strategy=fsdp", CONTEXT, "parallel.expert=2"),
}


def _take_over(rank: int, size: int, url: str, folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """The digests of each layout's saved state after loading in each layout, and the number of weight elements on this
    rank.
    """
    from holdfast.engines.interface import build_engine

    join(folder, rank, size, always=True)
    store, gang = open_store(url), Gang()
    assignments = {name: tiny_assignment(*overrides_of(*DEEP, *layout)) for name, layout in TAKEN_OVER.items()}
    engines = {name: build_engine(assignment, VOCABULARY, 0) for name, assignment in assignments.items()}

    def first(boxes: Sequence[TensorBox]) -> None:
        """Initialize every tensor like weights, moments and biases too, so that contents differ."""
        for box in boxes:
            content = initial_tensor(f"some.{box.name}", (*box.global_shape, 1), assignments["half"].model, 0)[..., 0]
            box.data.copy_(
                content[tuple(map(slice, box.offset, map(sum, zip(box.offset, box.data.shape, strict=True))))]
            )

    def load(identity: str, target: str) -> None:
        checkpointer = Checkpointer(store, Attempt(identity, 1), Retention(9), describe={})
        engines[target].restored(checkpointer.restore(engines[target].boxes(), first))

    for name, engine in engines.items():
        load(f"of {name}", name)
        describe = {"dataset_id": DATASET_ID, "layout": engine.layout, "random": {}}
        checkpointer = Checkpointer(store, Attempt(f"of {name}", 1), Retention(9), describe=describe)
        checkpointer.save(1, engine.saved(), {"optimizer.step": 1})
        checkpointer.wait()
        gang.barrier()  # only rank 0 has waited for the commit
    digests = {}
    for source, target in product(engines, engines):
        load(f"of {source}", target)
        digest = sum(gang.all_gather(digest_of(engines[target].saved()), StateDigest), StateDigest())
        digests[f"{source} to {target}"] = str(digest)
    weights = {
        name: sum(box.data.numel() for box in engine.boxes() if box.name.endswith(("weight", "proj")) and
                  not box.name.startswith("optimizer."))
        for name, engine in engines.items()
    }  # fmt: skip
    return digests, weights


def _rows_are_read_by_themselves(
    store: Store, overrides: tuple[str, ...], salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows load separately, as an export reads the rows of one expert."""
    monkeypatch.setattr("holdfast.checkpoint.reader.READ_BYTES", 256)
    checkpoint = open_checkpoint(store, run_id(tiny_spec(*overrides), DATASET_ID, salt), STEPS)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        whole = checkpoint.tensor(name)
        for first, stop in ((0, len(whole)), (24, 48), (len(whole) - 7, len(whole))):
            assert torch.equal(torch.cat(list(checkpoint.rows(name, first, stop))), whole[first:stop])


def _biases_were_moved(store: Store, overrides: tuple[str, ...], salt: str) -> None:
    """Biases moved by whole bias steps, at most one per step, and the optimizer did not change them."""
    checkpoint = open_checkpoint(store, run_id(tiny_spec(*overrides), DATASET_ID, salt), STEPS)
    biases = [name for name in checkpoint.tensors if name.endswith(CORRECTION)]
    assert biases == [f"model.layers.{layer}.mlp.gate.{CORRECTION}" for layer in range(2)]
    reachable = {0.0}
    for _ in range(STEPS):
        reachable |= {float(np.float32(bias) + np.float32(step)) for bias in reachable for step in (0.01, -0.01)}
    for name in biases:
        bias = checkpoint.tensor(name)
        assert bias.any()
        assert set(bias.tolist()) <= reachable


def test_overloaded_experts_get_a_lower_bias_also_with_activation_checkpointing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.engines.recompute import recompute
    from holdfast.engines.torch.balance import Balance
    from holdfast.spec.model import Routing
    from tests.model.tiny_model import decoder, shape

    model = decoder(shape(family="dots1", experts=4, ffn=24, routing={"shared": 1, "balance": "bias"}))
    balance = Balance([model], Routing(balance="bias", bias_step=0.25))
    layers: Any = model.model.layers
    for layer in layers:
        recompute(layer, "full")
    tokens = torch.arange(66).view(2, 33) * 7 % 300
    for _ in range(2):  # micro-batches of one step
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    loads = [layer.mlp.gate.tokens_E.clone() for layer in layers]
    balance.step()
    for (_, bias), tokens_E in zip(balance.state(), loads, strict=True):
        assert tokens_E.sum() == 2 * 64 * 2
        assert bias.tolist() == [0.25 * (load < 64) - 0.25 * (load > 64) for load in tokens_E.tolist()]
    before = [bias.clone() for _, bias in balance.state()]
    balance.step()
    assert all(torch.equal(bias, was) for (_, bias), was in zip(balance.state(), before, strict=True)), "counted once"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("model.experts=4",), "model.experts"),
        (("model.family=mixtral",), "model.experts"),
        (("model.routing.top_k=3",), "model.routing.top_k"),
        ((*MIXTURE, "model.routing.top_k=5"), "model.routing.top_k"),
        ((*MIXTURE, "model.routing.shared=1"), "model.routing.shared"),
        ((*BIASED, "model.routing.shared=0"), "model.routing.shared"),
        ((*MIXTURE, "model.routing.normalise=false"), "model.routing.normalise"),
        ((*MIXTURE, "model.routing.balance=bias"), "model.routing.balance"),
        (
            (*MIXTURE, "training.determinism=elastic", "parallel.expert=2", "parallel.processes=2"), "parallel.expert"
        ),
        ((*MIXTURE, "parallel.tensor=2", "parallel.processes=4", "parallel.expert=3"), "parallel.expert"),
        ((*MIXTURE, "parallel.strategy=zero2"), "model.experts"),
        ((*MIXTURE, "training.compile=true"), "training.compile"),
        (("parallel.expert=2", "parallel.processes=2"), "parallel.expert"),
        ((*MIXTURE, "parallel.expert=3", "parallel.processes=3", "training.global_batch=12"), "parallel.expert"),
        ((*MIXTURE, "parallel.expert=4", "parallel.processes=2"), "parallel.expert"),
        (
            (*MIXTURE, "parallel.expert=4", "parallel.processes=4", "parallel.strategy=fsdp", "parallel.replicas=2"),
            "parallel.expert",
        ),
    ],
)  # fmt: skip
def test_options_incompatible_with_experts_are_refused_by_field(overrides: tuple[str, ...], field: str) -> None:
    with pytest.raises(SpecError) as error:
        tiny_spec(*overrides)
    assert [problem.field for problem in error.value.problems] == [field]
    assert error.value.problems[0].remedy
