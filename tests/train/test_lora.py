"""Adapters: the same results as peft, saved without their base, the same bits after a kill, and
files that peft loads.
"""

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.checkpoint import TensorBox, open_checkpoint, read_manifest
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.components.train.export import export
from holdfast.dataset import Dataset
from holdfast.engines.weights import MOMENTS
from holdfast.model.hub import weights_digest
from holdfast.model.hugging_face import load_exported
from holdfast.model.layers import Linear
from holdfast.model.lora import (
    AdaptedLinear,
    adapter_shapes,
    add_adapters,
    is_adapter,
    merging_rows,
    without_adapters,
)
from holdfast.spec import Spec
from holdfast.spec.errors import DataError
from holdfast.spec.training import Lora
from holdfast.store import Store, layout, local_folder
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Steps, identity_of, join_exactly, steps_of, train_in_ranks, trained
from tests.train.test_reference import END, STEPS, global_batch
from tests.train.test_worker import write_weights
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

LORA = ("training.lora.rank=3", "training.lora.alpha=6", 'training.lora.targets=["q_proj", "v_proj", "down_proj"]')
RATE = 0.02
MERGED_BOUND = 1e-5  # for logits: weights are rounded once more, and two sums become one
LAYOUTS = (
    (1, ("parallel.strategy=ddp",)),
    (2, ("parallel.strategy=ddp",)),
    (2, ("parallel.strategy=fsdp",)),
    (2, ("parallel.strategy=fsdp", "training.activation_checkpointing=full")),
    (2, ("parallel.strategy=ddp", "training.determinism=elastic")),
    (2, ("parallel.strategy=fsdp", "training.determinism=elastic")),
    (2, ("parallel.strategy=fsdp", "training.lora.base=bf16")),
    (2, ("parallel.strategy=fsdp", "parallel.tensor=2", "training.lora.base=bf16")),
    (2, ("parallel.strategy=fsdp", "parallel.pipeline=2")),
    (2, ("parallel.strategy=fsdp", "parallel.context=2")),
    (2, ("parallel.strategy=ddp", "training.lora.base=bf16", "training.determinism=elastic")),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights to adapt, whose values bf16 has too."""
    folder = tmp_path_factory.mktemp("base")
    write_weights(folder / "weights", new_store(folder / "store"), seed=99)
    file = folder / "weights" / "model.safetensors"
    narrow = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
    save_file(narrow, file, metadata={"format": "pt"})
    return folder / "weights"


def adapters(seed: int = 5) -> dict[str, Tensor]:
    """Nonzero adapters, by their canonical names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(tiny_spec().model, VOCABULARY, tiny_spec(*LORA, "model.init_from=x").training.lora)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def with_peft(base: Path) -> Any:
    """The same adapters on the same weights, in peft."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    lora = tiny_spec(*LORA, "model.init_from=x").training.lora
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    assert lora.rank is not None
    rank, alpha, targets = lora.rank, int(lora.alpha), list[str](lora.targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    peft_model = get_peft_model(model, config)
    own_adapters = adapters()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(own_adapters.pop(canonical(name)))
    assert not own_adapters
    return peft_model


def canonical(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def reference(base: Path) -> list[Any]:
    """(loss, gradient norm) of every step of peft with AdamW, and the final adapters."""
    model, settings = with_peft(base), tiny_spec().training.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, weight_decay=settings.weight_decay, betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )  # fmt: skip
    curve: list[Any] = []
    for step in range(STEPS):
        rows = global_batch(step, ignored=False)
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return [
        curve,
        {
            canonical(name): parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
    ]


def _steps(rank: int, size: int, folder: Path, base: Path, runs: list[tuple[str, ...]]) -> list[Steps]:
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import ImportedState

    join_exactly(folder, rank, size, always=True)
    results = []
    for overrides in runs:
        spec = tiny_assignment(*overrides, *LORA, f"model.init_from={base}", f"parallel.processes={size}")
        engine = build_engine(spec, VOCABULARY, END)
        imported = ImportedState(str(base), spec.model, VOCABULARY)
        for box in engine.frozen():
            imported.fill([box])
        before, values = [box.data.clone() for box in engine.frozen()], adapters()
        for box in engine.boxes():
            assert is_adapter(box.name)
            box.data.copy_(part(values[box.name], box) if box.name in values else torch.zeros(()))
        engine.restored(0)
        batches = (global_batch(step, ignored=False) for step in range(STEPS))
        results.append(steps_of(engine, spec, rank, size, batches, RATE))
        assert all(torch.equal(tensor, box.data) for tensor, box in zip(before, engine.frozen(), strict=True))
    return results


def part(whole: Tensor, box: TensorBox) -> Tensor:
    return whole[tuple(slice(low, low + size) for low, size in zip(box.offset, box.data.shape, strict=True))]


@pytest.mark.drill
def test_every_layout_computes_what_peft_does_and_leaves_the_base_alone(tmp_path: Path, base: Path) -> None:
    losses, trained = reference(base)
    for size in (1, 2):
        runs = [fields for ranks, fields in LAYOUTS if ranks == size]
        for ranks in zip(*in_ranks(size, _steps, tmp_path / str(size), base, runs, seconds=300), strict=True):
            whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in trained.items()}
            for curve, boxes in ranks:
                torch.testing.assert_close(curve, losses, rtol=1e-5, atol=0)
                for name, offset, array in boxes:
                    data = torch.from_numpy(array)
                    part(whole[name], TensorBox(name, tuple(whole[name].shape), offset, data)).copy_(data)
            for name, tensor in trained.items():
                torch.testing.assert_close(whole[name], tensor, rtol=0, atol=3e-4, msg=name)


@pytest.fixture(scope="module")
def base_overrides(base: Path) -> tuple[str, ...]:
    """The overrides of a run with adapters."""
    return (*LORA, f"model.init_from={base}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, base_overrides: tuple[str, ...]) -> Store:
    """A store with two runs of adapters: an undisturbed one, and one whose only process was killed and restarted."""
    folder = tmp_path_factory.mktemp("runs")
    store = new_store(folder / "store")
    assert train_in_ranks(1, store.url, folder / "first", [(base_overrides, "", None)]) == [""]
    prompt = (*base_overrides, "checkpoint.max_lag_steps=3")  # step 6 waits for the commit of step 3
    assert train_in_ranks(1, store.url, folder / "killed", [(prompt, "killed", 7)], number=signal.SIGKILL) is None
    assert 0 < max(checkpoint_steps(store, identity_of(tiny_spec(*base_overrides), "killed"))) < 8
    assert train_in_ranks(1, store.url, folder / "again", [(base_overrides, "killed", None)]) == [""]
    return store


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(store: Store, base_overrides: tuple[str, ...]) -> None:
    spec = tiny_spec(*base_overrides)
    assert trained(store, spec, "killed") == trained(store, spec)


def test_a_checkpoint_has_adapters_and_their_moments_and_names_its_base(
    store: Store, base_overrides: tuple[str, ...]
) -> None:
    spec = tiny_spec(*base_overrides)
    checkpoint = open_checkpoint(store, identity_of(spec), spec.training.steps)
    names = {prefix + name for name in adapters() for prefix in ("", *MOMENTS.values())}
    assert checkpoint.tensors.keys() == names
    base = checkpoint.manifest.base
    assert base is not None
    assert (base.location, base.digest) == (spec.model.init_from, weights_digest(spec.model.init_from))


def exported(store: Store, spec: Spec, cache: Path) -> Path:
    """The export of the undisturbed run."""
    manifest = read_manifest(store, identity_of(spec), spec.training.steps)
    export(spec, manifest, Dataset.open(store, DATASET_ID, cache), store)
    folder = local_folder(store, layout.export(manifest.run_id, manifest.step, manifest.state_digest), cache)
    assert folder is not None
    return folder


def test_peft_and_transformers_load_the_export_to_our_logits(
    tmp_path: Path, store: Store, base: Path, base_overrides: tuple[str, ...]
) -> None:
    from peft import PeftModel  # takes seconds

    spec, tokens = tiny_spec(*base_overrides), global_batch(0, ignored=False)[:, :16]
    folder = exported(store, spec, tmp_path)
    ours, _ = load_exported(base)
    add_adapters(ours, spec.training.lora)
    checkpoint = open_checkpoint(store, identity_of(spec), spec.training.steps)
    for name, parameter in ours.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(checkpoint.tensor(name))
    start = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    with torch.no_grad():
        plain = start(tokens).logits
        theirs = PeftModel.from_pretrained(start, folder / "adapter")
        assert torch.equal(theirs(tokens).logits, ours(tokens))
        assert not torch.equal(plain, ours(tokens))
        with without_adapters(ours):
            assert torch.equal(plain, ours(tokens))
        merged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        assert not isinstance(merged, PeftModel)
        assert torch.equal(merged(tokens).logits, load_exported(folder)[0](tokens))
        torch.testing.assert_close(merged(tokens).logits, ours(tokens), rtol=0, atol=MERGED_BOUND)
        united = theirs.merge_and_unload()
    for name, weight in united.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weight, rtol=2**-23, atol=2**-24, msg=name)


def test_a_base_that_has_changed_is_not_merged(tmp_path: Path, store: Store, base_overrides: tuple[str, ...]) -> None:
    write_weights(tmp_path / "other", store, seed=98)
    spec = tiny_spec(*base_overrides)
    other = tiny_spec(*LORA, f"model.init_from={tmp_path / 'other'}")
    manifest = read_manifest(store, identity_of(spec), spec.training.steps)
    with pytest.raises(DataError, match="other weights"):
        export(other, manifest, Dataset.open(store, DATASET_ID, tmp_path), store)


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        (Lora(rank=5, alpha=7.0), 7 / 5),
        (Lora(rank=5, alpha=7.0, rslora=True), 7 / math.sqrt(5)),
        (Lora(rank=1, alpha=3.0, rslora=True), 3.0),
        (Lora(rank=4, alpha=0.5, rslora=True), 0.25),
    ],
)
def test_merged_rows_are_those_of_exact_arithmetic_however_they_are_cut(lora: Lora, scale: float) -> None:
    rank, generator = lora.rank or 0, torch.Generator().manual_seed(1)
    weight, low, high = (torch.randn(*size, generator=generator) for size in ((6, 9), (rank, 9), (6, rank)))
    matrices = {"x.lora_A.weight": low, "x.lora_B.weight": high}
    exact = [
        [
            w + scale * math.fsum(h * a for h, a in zip(wide, narrow, strict=True))
            for w, narrow in zip(row, low.T.tolist(), strict=True)
        ]
        for row, wide in zip(weight.tolist(), high.tolist(), strict=True)
    ]
    merged = torch.tensor(exact, dtype=torch.float64)
    shapes = {name: tuple(tensor.shape) for name, tensor in matrices.items()}
    for cut in (1, 4, 6):

        def rows_of(name: str, first: int = 0, stop: int | None = None, cut: int = cut) -> Iterator[Tensor]:
            return iter(matrices.get(name, weight)[first:stop].split(cut))

        rows = merging_rows(rows_of, shapes, rows_of, lora)
        assert torch.equal(torch.cat(list(rows("x.weight"))), merged.float())
        assert torch.equal(torch.cat(list(rows("x.weight", 1, 5))), merged[1:5].float())  # of a fused matrix
        assert torch.equal(torch.cat(list(rows("y.weight"))), weight)  # has no adapter
    trained = AdaptedLinear(Linear(9, 6, bias=False), lora).double()
    for parameter, value in ((trained.weight, weight), (trained.lora_A.weight, low), (trained.lora_B.weight, high)):
        parameter.data.copy_(value)
    inputs = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(trained(inputs), inputs @ merged.T)  # the export equals the trained model
