"""Mixtures of experts in training: one model at every layout, the same bits after a stop, and experts kept busy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.components.checkpoint import (
    Attempt,
    Checkpointer,
    Retention,
    StateDigest,
    TensorBox,
    digest_of,
    open_checkpoint,
    read_manifest,
)
from holdfast.components.model.experts import CORRECTION
from holdfast.components.model.initialise import initial_tensor
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec import SpecError, run_id
from holdfast.components.store import Store, open_store
from holdfast.components.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, join, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

RANKS = 4
MIXTURE = ("model.family=mixtral", "model.experts=4", "model.ffn=24", "model.routing.coefficient=0.1")
BIASED = (
    "model.family=dots1", "model.experts=4", "model.ffn=24", "model.routing.shared=1", "model.routing.balance=bias",
    "model.routing.bias_step=0.01",
)  # fmt: skip
# The model of each, and how the ranks share it. The first three are run by every test command, the rest by the drill.
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dealt to half": (MIXTURE, ("parallel.strategy=fsdp", "parallel.expert=2")),
    "dealt to all": (BIASED, ("parallel.strategy=ddp", "parallel.expert=4")),
    "shards": (BIASED, ("parallel.strategy=fsdp", "training.activation_checkpointing=full")),
    "copies": (MIXTURE, ("parallel.strategy=ddp",)),
    "biased copies": (BIASED, ("parallel.strategy=ddp",)),
    "partly recomputed": (MIXTURE, ("parallel.strategy=fsdp", "training.activation_checkpointing=selective")),
    "replicas of shards": (MIXTURE, ("parallel.strategy=fsdp", "parallel.replicas=2")),
    "dealt within replicas": (BIASED, ("parallel.strategy=fsdp", "parallel.replicas=2", "parallel.expert=2")),
    "dealt among copies": (MIXTURE, ("parallel.strategy=ddp", "parallel.expert=2")),
    "dealt, recomputed": (
        MIXTURE, ("parallel.strategy=fsdp", "parallel.expert=2", "training.activation_checkpointing=full")
    ),
    "dealt, partly recomputed": (
        BIASED, ("parallel.strategy=fsdp", "parallel.expert=4", "training.activation_checkpointing=selective")
    ),
    "dealt, masked": ((*MIXTURE, "data.document_masks=true"), ("parallel.strategy=fsdp", "parallel.expert=4")),
    "dealt in bf16": ((*MIXTURE, "training.precision=bf16"), ("parallel.strategy=fsdp", "parallel.expert=2")),
    "copies in bf16": ((*MIXTURE, "training.precision=bf16"), ("parallel.strategy=ddp",)),
}  # fmt: skip
FAST = dict(list(LAYOUTS.items())[:3])


def asked(*overrides: str, processes: int = RANKS) -> tuple[str, ...]:
    return (f"parallel.processes={processes}", "training.steps=6", *overrides)


def column(store: Store, overrides: tuple[str, ...], salt: str, name: str = "loss") -> np.ndarray:
    rows = read_history(store, run_id(tiny_spec(*overrides), DATASET_ID, salt))
    return np.array([row[name] for row in rows], np.float32)


def require_close(found: np.ndarray, expected: np.ndarray, last_place: float = 2.0**-24) -> None:
    """The bound of `test_mesh`: each step begins from weights that all before it moved by what sums were off."""
    bound = last_place * np.sqrt(VOCABULARY) * (1 + 2 * np.arange(len(expected)))
    assert len(found) == len(expected)
    assert (np.abs(found - expected) / expected <= bound).all(), (found, expected)


def train_all(tmp_path: Path, layouts: dict[str, tuple[tuple[str, ...], tuple[str, ...]]], stopped: list[str]) -> Store:
    """Train every layout, and those of `stopped` again with a stop, and require one curve of each model's."""
    store = new_store(tmp_path / "store")
    runs: Runs = [(asked(*model, *layout), name, None) for name, (model, layout) in layouts.items()]
    for name in stopped:
        overrides = asked(*layouts[name][0], *layouts[name][1])
        runs += [(overrides, f"{name} stopped", 3), (overrides, f"{name} stopped", None)]
    assert train_in_ranks(RANKS, store.url, tmp_path / "ranks", runs) == [""] * len(layouts) + [
        "PreemptedError", "",
    ] * len(stopped)  # fmt: skip
    models = sorted({model for model, _ in layouts.values()})
    references: Runs = [(asked(*model, processes=1), "one", None) for model in models]
    assert train_in_ranks(1, store.url, tmp_path / "one", references) == [""] * len(models)
    for name, (model, layout) in layouts.items():
        one, found = asked(*model, processes=1), asked(*model, *layout)
        last_place = 2.0**-9 if "bf16" in name else 2.0**-24
        require_close(column(store, found, name), column(store, one, "one"), last_place)
        norms = (column(store, overrides, salt, "grad_norm") for overrides, salt in ((found, name), (one, "one")))
        require_close(*(norm[:1] for norm in norms), last_place)
    for name in stopped:
        spec = tiny_spec(*asked(*layouts[name][0], *layouts[name][1]))
        assert trained(store, spec, f"{name} stopped") == trained(store, spec, name)
    return store


def test_a_mixture_is_one_model_however_its_experts_are_dealt_and_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = train_all(tmp_path, FAST, ["dealt to all"])
    for name in ("dealt to all", "shards"):
        _biases_were_moved(store, asked(*BIASED, *LAYOUTS[name][1]), name)
    _rows_are_read_by_themselves(store, asked(*BIASED, *LAYOUTS["shards"][1]), "shards", monkeypatch)
    manifest = read_manifest(
        store, run_id(tiny_spec(*asked(*BIASED, *LAYOUTS["dealt to all"][1])), DATASET_ID, "dealt to all"), 6
    )
    assert manifest.layout == {"engine": "torch", "strategy": "ddp", "world_size": 4, "replicas": 4, "expert": 4}


@pytest.mark.drill
def test_every_layout_of_a_mixture_is_the_model_of_one_process_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    train_all(tmp_path, LAYOUTS, list(LAYOUTS))


@pytest.mark.drill
def test_any_layout_of_a_mixture_takes_over_the_state_of_any_other_bit_for_bit(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    (digests, *others) = in_ranks(RANKS, _take_over, url, tmp_path, seconds=300)
    assert others == [digests] * (RANKS - 1)
    assert len(digests) == len(TAKEN_OVER) ** 2
    assert len(set(digests.values())) == 1, digests


TAKEN_OVER = {
    "half": ("parallel.strategy=fsdp", "parallel.expert=2"),
    "within replicas": ("parallel.strategy=fsdp", "parallel.replicas=2", "parallel.expert=2"),
    "all": ("parallel.strategy=ddp", "parallel.expert=4"),
    "shards": ("parallel.strategy=fsdp",),
    "copies": (),
}


def _take_over(rank: int, size: int, url: str, folder: Path) -> dict[str, str]:
    """The digest of what each layout has loaded of what each layout has saved."""
    from holdfast.components.train.engine import build_engine

    join(folder, rank, size, always=True)
    store, gang = open_store(url), Gang()
    assignments = {name: tiny_assignment(*asked(*BIASED, *layout)) for name, layout in TAKEN_OVER.items()}
    engines = {name: build_engine(assignment, VOCABULARY, 0) for name, assignment in assignments.items()}

    def first(boxes: Sequence[TensorBox]) -> None:
        """Every tensor as weights begin, moments and biases too, so that each has a content of its own."""
        for box in boxes:
            made = initial_tensor(f"some.{box.name}", (*box.global_shape, 1), assignments["half"].model, 0)[..., 0]
            box.data.copy_(made[tuple(map(slice, box.offset, map(sum, zip(box.offset, box.data.shape, strict=True))))])

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
    found = {}
    for source, target in product(engines, engines):
        load(f"of {source}", target)
        digest = sum(gang.all_gather(digest_of(engines[target].saved())), StateDigest())
        found[f"{source} to {target}"] = str(digest)
    return found


@pytest.mark.drill
def test_a_run_goes_on_with_its_experts_on_fewer_ranks_and_with_none_dealt(tmp_path: Path) -> None:
    store, name = new_store(tmp_path / "store"), "moved"
    steps = [
        (4, asked(*BIASED, "parallel.strategy=fsdp", "parallel.expert=4"), 1),
        (4, asked(*BIASED, "parallel.strategy=fsdp", "parallel.expert=2"), 3),
        (2, asked(*BIASED, "parallel.strategy=ddp", processes=2), None),
    ]
    for number, (ranks, overrides, stop) in enumerate(steps):
        runs: Runs = [(overrides, name, stop)]
        ends = train_in_ranks(ranks, store.url, tmp_path / str(number), runs, replan=number > 0)
        assert ends == ["" if stop is None else "PreemptedError"]
    one = asked(*BIASED, processes=1)
    assert train_in_ranks(1, store.url, tmp_path / "one", [(one, "one", None)]) == [""]
    require_close(column(store, steps[-1][1], name), column(store, one, "one"))


def _rows_are_read_by_themselves(
    store: Store, overrides: tuple[str, ...], salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an export asks for those of one expert."""
    monkeypatch.setattr("holdfast.components.checkpoint.reader.READ_BYTES", 256)
    saved = open_checkpoint(store, run_id(tiny_spec(*overrides), DATASET_ID, salt), 6)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        whole = saved.tensor(name)
        for first, stop in ((0, len(whole)), (24, 48), (len(whole) - 7, len(whole))):
            assert torch.equal(torch.cat(list(saved.rows(name, first, stop))), whole[first:stop])


def _biases_were_moved(store: Store, overrides: tuple[str, ...], salt: str) -> None:
    """By whole bias steps, as many as there were steps at most, and none of them by the optimizer."""
    saved = open_checkpoint(store, run_id(tiny_spec(*overrides), DATASET_ID, salt), 6)
    biases = [name for name in saved.tensors if name.endswith(CORRECTION)]
    assert biases == [f"model.layers.{layer}.mlp.gate.{CORRECTION}" for layer in range(2)]
    reached = {0.0}
    for _ in range(6):
        reached |= {float(np.float32(bias) + np.float32(step)) for bias in reached for step in (0.01, -0.01)}
    for name in biases:
        bias = saved.tensor(name)
        assert bias.any()
        assert set(bias.tolist()) <= reached


def test_experts_with_too_much_to_do_are_preferred_less_whatever_computes_a_layer_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.components.spec.model import Routing
    from holdfast.components.train.engines.recompute import recompute
    from holdfast.components.train.engines.torch.balance import Balance
    from tests.model.tiny_model import decoder, shape

    made = decoder(shape(family="dots1", experts=4, ffn=24, routing={"shared": 1, "balance": "bias"}))
    balance = Balance([made], Routing(balance="bias", bias_step=0.25))
    for layer in made.model.layers:
        recompute(layer, "full")
    tokens = torch.arange(66).view(2, 33) * 7 % 300
    for _ in range(2):  # micro-batches of one step
        made(tokens[:, :-1], tokens[:, 1:]).backward()
    sent = [layer.mlp.gate.tokens_E.clone() for layer in made.model.layers]
    balance.step()
    for (_, bias), tokens_E in zip(balance.state(), sent, strict=True):
        assert tokens_E.sum() == 2 * 64 * 2
        assert bias.tolist() == [0.25 * (each < 64) - 0.25 * (each > 64) for each in tokens_E.tolist()]
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
        ((*MIXTURE, "training.determinism=elastic"), "training.determinism"),
        ((*MIXTURE, "parallel.tensor=2", "parallel.processes=2"), "parallel.tensor"),
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
)
def test_what_experts_do_not_go_with_is_refused_by_its_field(overrides: tuple[str, ...], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        tiny_spec(*overrides)
    assert [problem.field for problem in refused.value.problems] == [field]
    assert refused.value.problems[0].remedy
