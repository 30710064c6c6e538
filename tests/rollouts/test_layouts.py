"""Answers under layouts that divide the model or each sequence: those of one process, and equal bits after a stop.

The first answers come from the same weights by the same arithmetic, so their records are equal. The updates on them
add the same numbers in another order. The bound is that of `tests/train/test_mesh.py`: terms of the loss have about the
size 1, which is that of an advantage.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from holdfast.rollouts.records import records_of_step
from holdfast.spec import Spec
from holdfast.store import Store
from holdfast.telemetry import read_history
from tests.rollouts.prompt_run import FIELDS, prompt_spec
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.test_worker import write_weights
from tests.train.tiny_run import VOCABULARY

COMMON = ("training.grpo.group=2", "training.global_batch=8", "training.micro_batch=2", "training.steps=3",
          "training.grpo.updates=2", "training.grpo.rewards=[{kind: regex}]")  # fmt: skip
UNTIED = ("model.tie_embeddings=false", "parallel.strategy=fsdp")
MIXTURE = ("model.family=mixtral", "model.experts=4", "parallel.expert=2", "parallel.strategy=fsdp")
STAGES = ("parallel.pipeline=2", *UNTIED)
LAST_PLACE = {"fp32": 2.0**-24, "bf16": 2.0**-9}
FAST: dict[str, tuple[str, ...]] = {"tensor": ("parallel.tensor=2",), "stages": STAGES}
TWO_RANKS: dict[str, tuple[str, ...]] = {
    "context": ("parallel.context=2", "training.grpo.normalization=grpo"),
    "tied stages": (*STAGES, "model.tie_embeddings=true"),
    "older weights in stages": (*STAGES, "training.grpo.updates=1", "training.grpo.lag=1"),
    "experts": MIXTURE,
    "balanced experts": (*MIXTURE, "model.family=glm4_moe", "model.routing.shared=1", "model.routing.balance=bias"),
    "older weights in shards": ("parallel.strategy=fsdp", "training.grpo.updates=1", "training.grpo.lag=1"),
}
FOUR_RANKS: dict[str, tuple[str, ...]] = {
    "tensor x shards": ("parallel.tensor=2", "parallel.strategy=fsdp"),
    "context x tensor": ("parallel.context=2", "parallel.tensor=2"),
    "stages x tensor": (*STAGES, "parallel.tensor=2"),
    "stages x context": (*STAGES, "parallel.context=2"),
}


def fields_of(layout: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """The overrides of a run. One rank has no layout."""
    own = layout if ranks > 1 else (field for field in layout if not field.startswith("parallel."))
    return (*FIELDS, *COMMON, f"parallel.processes={ranks}", *own)


def values(store: Store, spec: Spec, salt: str, name: str) -> np.ndarray:
    """A column of the history, for the steps with the first answers."""
    return np.array([row[name] for row in read_history(store, identity_of(spec, salt))][: spec.training.grpo.updates])


def require_equal_to_one_process(store: Store, folder: Path, layouts: dict[str, tuple[str, ...]], ranks: int) -> None:
    """Train each layout, whole and stopped after a step, and the same model in one process."""
    runs: Runs = []
    for name, layout in layouts.items():
        fields = fields_of(layout, ranks)
        runs += [(fields, name, None), (fields, f"{name} stopped", 1), (fields, f"{name} stopped", None)]
    assert train_in_ranks(ranks, store.url, folder / "ranks", runs) == ["", "PreemptedError", ""] * len(layouts)
    alone: Runs = [(fields_of(layout, 1), f"{name} alone", None) for name, layout in layouts.items()]
    assert train_in_ranks(1, store.url, folder / "one", alone) == [""] * len(alone)
    for name, layout in layouts.items():
        spec, single = (prompt_spec(*fields_of(layout, count)) for count in (ranks, 1))
        assert trained(store, spec, f"{name} stopped") == trained(store, spec, name)
        first = list(records_of_step(store, identity_of(spec, name), 1))
        assert len(first) == 2
        assert first == list(records_of_step(store, identity_of(single, f"{name} alone"), 1))
        growth = 1 + 2 * np.arange(spec.training.grpo.updates)
        bound = LAST_PLACE[spec.training.precision] * math.sqrt(VOCABULARY) * growth
        found, expected = (
            values(store, each, salt, "loss") for each, salt in ((spec, name), (single, f"{name} alone"))
        )
        assert (np.abs(found - expected) <= bound).all(), (name, found, expected)
        norms, expected = (
            values(store, each, salt, "grad_norm") for each, salt in ((spec, name), (single, f"{name} alone"))
        )
        assert expected.min() > 0
        assert (np.abs(norms / expected - 1) <= bound).all(), (name, norms, expected)


@pytest.mark.slow
def test_a_divided_model_learns_like_one_process_and_resumes_with_the_same_bits(store: Store, tmp_path: Path) -> None:
    require_equal_to_one_process(store, tmp_path, FAST, 2)


def test_another_layout_learns_from_the_recorded_answers_of_older_weights(store: Store, tmp_path: Path) -> None:
    """The weights of the answers are gone at the change, so that these and their log-probabilities must be found."""
    older = ("training.grpo.updates=1", "training.grpo.lag=1", "model.tie_embeddings=false", "model.context=32")
    alone, divided = (fields_of((*older, *layout), ranks) for ranks, layout in ((1, ()), (2, STAGES)))
    assert train_in_ranks(1, store.url, tmp_path / "one", [(alone, "", 1)]) == ["PreemptedError"]
    assert train_in_ranks(2, store.url, tmp_path / "two", [(divided, "", None)], replan=True) == [""]
    assert len(read_history(store, identity_of(prompt_spec(*divided)))) == 3


@pytest.mark.drill
def test_adapters_and_bf16_learn_in_parts_like_in_one_process(store: Store, tmp_path: Path) -> None:
    write_weights(tmp_path / "weights", store, seed=3)
    adapters = (f"model.init_from={tmp_path / 'weights'}", "training.lora.rank=4", "training.grpo.kl_weight=0.05")
    layouts = {
        "adapters in stages": (*STAGES, "model.tie_embeddings=true", *adapters),
        "adapters in parts, in bf16": ("parallel.tensor=2", *adapters, "training.precision=bf16"),
        "bf16 in stages": (*STAGES, "training.precision=bf16"),
    }
    require_equal_to_one_process(store, tmp_path, layouts, 2)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_learns_like_one_process_and_resumes_with_the_same_bits(
    store: Store, tmp_path: Path, ranks: int
) -> None:
    require_equal_to_one_process(store, tmp_path, TWO_RANKS if ranks == 2 else FOUR_RANKS, ranks)
