"""Runs on conversations and on preferences: interrupted runs end with the bits of undisturbed runs,
and exports load.
"""

import signal
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from holdfast.checkpoint import open_checkpoint, read_manifest
from holdfast.components.train.export import export
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import ID
from holdfast.model.hugging_face import load_exported
from holdfast.objectives.table import build_objective
from holdfast.spec.rules.objective import objective_name
from holdfast.store import Store, layout, local_folder, open_store
from holdfast.telemetry import read_history
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.test_preferences import FILLER, LORA, PAIRS, global_batch, sample
from tests.train.test_worker import write_weights
from tests.train.tiny_run import DATASET_ID, tiny_spec, write_dataset

pytestmark = pytest.mark.slow  # the fixture trains

TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
CHAT = ("data.kind=chat", *PAIRS[1:-1])
KINDS = {"chat": CHAT, "preferences": PAIRS, "adapters": (*PAIRS, *LORA)}
OTHERS = {
    "orpo": (*PAIRS, "training.objective=orpo"),
    "kto": (*PAIRS, "data.kind=unpaired"),
    "reward": (*PAIRS[:-1], "model.head=scalar"),
    "distillation": (*CHAT, "training.objective=distillation", "training.distillation.top_k=8"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, tuple[str, ...]]]:
    """The fields of each kind, and a store with two runs of it: an undisturbed one, and one whose process was killed or
    stopped and then restarted.
    """
    folder, draw = tmp_path_factory.mktemp("tuned"), np.random.default_rng(3)
    store = open_store(f"file://{folder / 'store'}")
    tokens = np.array([*chain(*(sample(draw) for _ in range(60))), FILLER], dtype=np.uint32)
    write_dataset(store, packed=tokens, kind="chat", text=TEMPLATE)
    write_weights(folder / "weights", store, seed=99)
    cases = {
        name: (*overrides, f"model.init_from={folder / 'weights'}", "training.steps=6")
        for name, overrides in KINDS.items()
    }
    first: Runs = [(fields, "", None) for fields in cases.values()]
    first += [(cases["adapters"], "stopped", 4)]
    assert train_in_ranks(1, store.url, folder / "1", first) == ["", "", "", "PreemptedError"]
    for name in ("chat", "preferences"):
        killed_runs: Runs = [(cases[name], "stopped", 4)]
        assert train_in_ranks(1, store.url, folder / name, killed_runs, number=signal.SIGKILL) is None
    assert (
        train_in_ranks(1, store.url, folder / "2", [(fields, "stopped", None) for fields in cases.values()]) == [""] * 3
    )
    return store, cases


@pytest.mark.parametrize("name", KINDS)
def test_a_disturbed_run_ends_with_the_bits_of_one_that_was_not_and_its_export_loads_in_transformers(
    tmp_path: Path, runs: tuple[Store, dict[str, tuple[str, ...]]], name: str
) -> None:
    store, spec = runs[0], tiny_spec(*runs[1][name])
    assert trained(store, spec, "stopped") == trained(store, spec)

    manifest = read_manifest(store, identity_of(spec), 6)
    assert (manifest.base is None) == (name == "chat")
    export(spec, manifest, Dataset.open(store, DATASET_ID, tmp_path), store)
    folder = local_folder(store, layout.export(manifest.run_id, 6, manifest.state_digest), tmp_path)
    assert folder is not None
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokens = global_batch(9)[:, :-1] & ID
    with torch.no_grad():
        assert torch.equal(reference(tokens).logits, load_exported(folder)[0](tokens))
    weight = "model.layers.0.mlp.up_proj.weight"
    if name == "adapters":
        assert (folder / "adapter" / "adapter_config.json").exists()
    else:
        assert torch.equal(reference.state_dict()[weight], open_checkpoint(store, manifest.run_id, 6).tensor(weight))
    if name == "chat":
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "user:aassistant:b"


def test_every_objective_resumes_to_the_same_bits_with_its_terms_in_the_history_and_exports(tmp_path: Path) -> None:
    store, draw = open_store(f"file://{tmp_path / 'store'}"), np.random.default_rng(3)
    tokens = np.array([*chain(*(sample(draw) for _ in range(60))), FILLER], dtype=np.uint32)
    write_dataset(store, packed=tokens, kind="chat", text=TEMPLATE)
    write_weights(tmp_path / "weights", store, seed=99)
    cases = {
        name: (*overrides, f"model.init_from={tmp_path / 'weights'}", "training.steps=6")
        + ((f"training.distillation.teacher={tmp_path / 'weights'}",) if name == "distillation" else ())
        for name, overrides in OTHERS.items()
    }
    first: Runs = [run for fields in cases.values() for run in ((fields, "", None), (fields, "stopped", 4))]
    assert train_in_ranks(1, store.url, tmp_path / "1", first) == ["", "PreemptedError"] * 4
    again: Runs = [(fields, "stopped", None) for fields in cases.values()]
    assert train_in_ranks(1, store.url, tmp_path / "2", again) == [""] * 4
    for name, fields in cases.items():
        spec = tiny_spec(*fields)
        assert trained(store, spec, "stopped") == trained(store, spec), name
        manifest = read_manifest(store, identity_of(spec), 6)
        terms = build_objective(objective_name(spec), spec.training).terms
        rows = read_history(store, manifest.run_id)
        assert all(isinstance(row[f"objective.{term}"], float) for row in rows for term in terms), name
        assert len(rows) == 6
        export(spec, manifest, Dataset.open(store, DATASET_ID, tmp_path / name), store)
        folder = local_folder(store, layout.export(manifest.run_id, 6, manifest.state_digest), tmp_path / name)
        assert folder is not None
        tokens_of_text = global_batch(9)[:1, :-1] & ID
        ours = load_exported(folder)[0](tokens_of_text)
        with torch.no_grad():
            if name == "reward":
                theirs = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa")
                assert torch.equal(theirs(tokens_of_text).logits[0], ours[0, -1:])
            else:
                theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
                assert torch.equal(theirs(tokens_of_text).logits, ours)
