"""Adapters of mixtures of experts: the model that they describe, every layout, and the bits after a stop."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.checkpoint import open_checkpoint
from holdfast.engines.weights import MOMENTS
from holdfast.model import nf4
from holdfast.model.decoder import Decoder
from holdfast.model.export import peft_files, published_rows
from holdfast.model.initialise import initialise
from holdfast.model.lora import (
    FrozenExperts,
    FrozenLinear,
    adapter_shapes,
    add_adapters,
    frozen_matrices,
    is_adapter,
    merging_rows,
    scale_of,
    stored_rows,
    without_adapters,
)
from holdfast.model.published import published
from holdfast.spec.training import Lora
from holdfast.store import Store
from tests.model.exporting import write_hugging_face
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.test_experts import column
from tests.train.test_mesh import overrides_of, require_close
from tests.train.test_reference import global_batch
from tests.train.tiny_run import DATASET_ID, END_OF_TEXT, VOCABULARY, new_store, tiny_spec

WIDE = ("model.hidden=64", "model.ffn=64", "model.experts=4")
MIXTRAL = (*WIDE, "model.family=mixtral")
SHARED = (*WIDE, "model.family=qwen2_moe", "model.routing.shared=1")
GPT_OSS = (*WIDE, "model.family=gpt_oss", "model.sliding_window=4")
DEEPSEEK = (
    *WIDE, "model.family=deepseek_v3", "model.routing.shared=1", "model.dense_layers=1", "model.dense_ffn=128",
    "model.latent={query: 64, key_value: 64, rope: 8, value: 16}", "model.head_dim=24", "model.kv_heads=4",
    "model.routing.balance=none",
)  # fmt: skip
GLM = (*WIDE, "model.family=glm4_moe", "model.routing.shared=1", "model.dense_layers=1", "model.routing.balance=none")
PHI3 = ("model.hidden=64", "model.ffn=64", "model.family=phi3", "model.tie_embeddings=false")  # fused when published
CASES = {"mixtral": MIXTRAL, "shared": SHARED, "oss": GPT_OSS, "latent": DEEPSEEK, "fused": PHI3}
RANK = 4
TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj")  # that latent attention has too


def random_adapters(overrides: tuple[str, ...], lora: Lora) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = adapter_shapes(tiny_spec(*overrides).model, VOCABULARY, lora)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def adapted(overrides: tuple[str, ...], lora: Lora, adapters: dict[str, Tensor]) -> Decoder:
    """A decoder with these adapters, and a base as it is stored."""
    decoder = Decoder.empty(tiny_spec(*overrides).model, VOCABULARY)
    initialise(decoder, 1)
    whole = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    add_adapters(decoder, lora)
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(adapters[name])
    for name, module in decoder.named_modules():
        if isinstance(module, FrozenLinear | FrozenExperts):
            for matrix, *packed in module.packed_matrices():
                for target, part in zip(packed, nf4.quantise(whole[f"{name}.{matrix}"]), strict=True):
                    target.copy_(part)
    return decoder


def merged(overrides: tuple[str, ...], lora: Lora, adapters: dict[str, Tensor]) -> Decoder:
    """The model that an export has: read from its published tensors."""
    model = tiny_spec(*overrides).model
    decoder = Decoder.empty(model, VOCABULARY)
    initialise(decoder, 1)
    whole = decoder.state_dict()

    def of(tensors: dict[str, Tensor], name: str, *bounds: int) -> Iterator[Tensor]:
        yield from tensors[name][slice(*bounds) if bounds else slice(None)].split(7)

    base = stored_rows(lambda *at: of(whole, *at), frozen_matrices(model, VOCABULARY, lora), lora.base)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapters.items()}
    rows = merging_rows(base, shapes, lambda *at: of(adapters, *at), lora)
    parts: dict[str, list[Tensor]] = {}
    for name, places in published(model, VOCABULARY).items():
        for place in places:
            tensor = torch.cat(list(published_rows(name, place, rows)))
            if place.experts:
                tensor = (tensor.transpose(1, 2) if tensor.dim() > 2 else tensor).flatten(0, 1)
            parts.setdefault(place.tensor, []).append(tensor)
    decoder.load_state_dict({name: torch.cat(tensors) for name, tensors in parts.items()})
    return decoder


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_adapted_experts_compute_and_learn_what_their_merged_model_does(overrides: tuple[str, ...], base: str) -> None:
    lora = Lora(rank=RANK, alpha=12, base=base, targets=TARGETS)
    adapters, rows = random_adapters(overrides, lora), global_batch(0, ignored=False)
    ours, whole = adapted(overrides, lora, adapters), merged(overrides, lora, adapters)
    losses = [decoder(rows[:, :-1], rows[:, 1:]) for decoder in (ours, whole)]
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-6, atol=0)
    for loss in losses:
        loss.backward()
    experts, gradients = tiny_spec(*overrides).model.experts, dict(whole.named_parameters())
    assert {name for name, each in ours.named_parameters() if each.grad is not None} == set(adapters)
    for name, parameter in ours.named_parameters():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            count = experts if ".mlp.experts." in name else 1
            weight = gradients[f"{stem}_proj" if count > 1 else f"{stem}.weight"].grad
            assert weight is not None
            other = f"{stem}.lora_B.weight"
            low, high, full = (each.unflatten(0, (count, -1)) for each in (adapters[name], adapters[other], weight))
            for actual, expected in (
                (parameter.grad, high.transpose(1, 2) @ full * scale_of(lora)),
                (ours.get_parameter(other).grad, full @ low.transpose(1, 2) * scale_of(lora)),
            ):
                assert actual is not None
                bound = 2e-5 * float(expected.abs().max())
                torch.testing.assert_close(actual, expected.flatten(0, 1), rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize(
    "overrides", [MIXTRAL, SHARED, GPT_OSS, DEEPSEEK, GLM], ids=["mixtral", "shared", "oss", "latent", "glm"]
)
def test_peft_loads_the_adapters_of_experts_to_our_logits(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    from peft import PeftModel

    targets = TARGETS if overrides is DEEPSEEK else Lora().targets
    lora, tokens = Lora(rank=RANK, alpha=12, rslora=True, targets=targets), global_batch(0, ignored=False)[:, :16]
    adapters = random_adapters(overrides, lora)
    write_base(tmp_path / "base", overrides)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapters.items()}
    files = peft_files(shapes, {}, lambda name: iter(adapters[name].split(3)), lora, str(tmp_path / "base"))
    (tmp_path / "adapter").mkdir()
    for file in files:
        (tmp_path / file.name).write_bytes(b"".join(file.content()))
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    with torch.no_grad():
        plain = start(tokens).logits
        theirs = PeftModel.from_pretrained(start, tmp_path / "adapter")(tokens).logits
        ours = adapted(overrides, lora, adapters)
        torch.testing.assert_close(ours(tokens), theirs, rtol=0, atol=2e-5)
        assert (plain - theirs).abs().max() > 1e-2
        with without_adapters(ours):
            torch.testing.assert_close(ours(tokens), plain, rtol=0, atol=2e-5)


def write_base(folder: Path, overrides: tuple[str, ...]) -> None:
    """The first weights of a model, in the Hugging Face layout."""
    decoder = Decoder.empty(tiny_spec(*overrides).model, VOCABULARY)
    initialise(decoder, 1)
    store = new_store(folder.with_name(f"{folder.name}-store"))
    write_hugging_face(
        folder,
        decoder.shape,
        VOCABULARY,
        decoder.state_dict().items(),
        tokenizer_json=store.get(f"datasets/{DATASET_ID}/tokenizer.json").decode(),
        end_of_text=END_OF_TEXT,
    )


DEEPSEEK_LORA = (*DEEPSEEK, 'training.lora.targets=["o_proj", "gate_proj", "up_proj", "down_proj"]')
FSDP, EXPERT = "parallel.strategy=fsdp", "parallel.expert=2"
NF4 = "training.lora.base=nf4"
HALVES = ("model.hidden=128", "model.ffn=128")  # of the columns that two ranks split, whole blocks of NF4
SHARED_HALVES = (*SHARED, *HALVES, NF4)
DEEPSEEK_HALVES = (
    *DEEPSEEK_LORA, "model.ffn=128", "model.latent={query: 64, key_value: 64, rope: 8, value: 32}", NF4,
)  # fmt: skip
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the model of each case, and its layout on two ranks
    "expert parallel": (SHARED, (FSDP, EXPERT)),
    "expert parallel copies": (MIXTRAL, ("parallel.strategy=ddp", EXPERT)),
    "tensor parallel": (GPT_OSS, (FSDP, "parallel.tensor=2")),
    "tensor and expert parallel": (SHARED, (FSDP, "parallel.tensor=2", EXPERT)),
    "narrow stages": ((*MIXTRAL, "training.lora.base=bf16"), (FSDP, "parallel.pipeline=2", "training.micro_batch=1")),
    "packed shards": ((*MIXTRAL, "training.lora.base=nf4"), (FSDP, "training.activation_checkpointing=full")),
    "context": (DEEPSEEK_LORA, (FSDP, "parallel.context=2")),
    "latents, tensor parallel": ((*DEEPSEEK_LORA, "training.lora.base=bf16"), (FSDP, "parallel.tensor=2")),
    "sums": ((*MIXTRAL, "training.determinism=elastic"), ("parallel.strategy=ddp",)),
    "packed, expert parallel": ((*SHARED, NF4), (FSDP, EXPERT)),
    "packed copies, expert parallel": ((*MIXTRAL, NF4), ("parallel.strategy=ddp", EXPERT)),
    "packed, tensor parallel": (SHARED_HALVES, (FSDP, "parallel.tensor=2")),
    "packed, tensor and expert parallel": (SHARED_HALVES, (FSDP, "parallel.tensor=2", EXPERT)),
    "packed, tensor parallel, biases": ((*GPT_OSS, *HALVES, NF4), (FSDP, "parallel.tensor=2")),
    "packed latents, tensor parallel": (DEEPSEEK_HALVES, (FSDP, "parallel.tensor=2")),
    "packed stages": ((*SHARED, NF4), (FSDP, "parallel.pipeline=2", "training.micro_batch=1")),
    "packed context": ((*MIXTRAL, NF4), (FSDP, "parallel.context=2")),
    "packed sums": ((*MIXTRAL, NF4, "training.determinism=elastic"), ("parallel.strategy=ddp",)),
    "packed sums of shards": ((*SHARED, NF4, "training.determinism=elastic", FSDP), ()),
}  # fmt: skip
FAST = ("expert parallel",)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Weights of each model, by its fields."""
    folder, found = tmp_path_factory.mktemp("bases"), {}
    for number, fields in enumerate(sorted({model_fields(*model) for model, _ in LAYOUTS.values()})):
        write_base(folder / str(number), fields)
        found[fields] = str(folder / str(number))
    return found


def model_fields(*overrides: str) -> tuple[str, ...]:
    return tuple(field for field in overrides if field.startswith("model."))


def settings(bases: dict[tuple[str, ...], str], *overrides: str, processes: int = 1) -> tuple[str, ...]:
    """The overrides of a run with adapters."""
    weights = bases[model_fields(*overrides)]
    lora = (f"training.lora.rank={RANK}", "training.lora.alpha=8", f"model.init_from={weights}")
    return overrides_of(*lora, *overrides, "training.steps=4", processes=processes)


def train_all(tmp_path: Path, bases: dict[tuple[str, ...], str], names: Sequence[str]) -> Store:
    """Train layouts, the first of them again with a stop. Every one has the losses of one process."""
    store = new_store(tmp_path / "store")
    fields = {name: settings(bases, *chain(*LAYOUTS[name]), processes=2) for name in names}
    first = fields[names[0]]
    runs: Runs = [(overrides, name, None) for name, overrides in fields.items()]
    runs += [(first, "stopped", 2), (first, "stopped", None)]
    endings = train_in_ranks(2, store.url, tmp_path / "ranks", runs)
    assert endings == ["", *("" for _ in names[1:]), "PreemptedError", ""]
    models = {LAYOUTS[name][0] for name in names}
    alone: Runs = [(settings(bases, *model), "one", None) for model in sorted(models)]
    assert train_in_ranks(1, store.url, tmp_path / "one", alone) == [""] * len(models)
    for name, overrides in fields.items():
        single = settings(bases, *LAYOUTS[name][0])
        require_close(column(store, overrides, name), column(store, single, "one"))
        found, expected = (column(store, *run, "grad_norm")[:1] for run in ((overrides, name), (single, "one")))
        require_close(found, expected)
        if "elastic" in " ".join(overrides):
            assert trained(store, tiny_spec(*overrides), name) == trained(store, tiny_spec(*single), "one")
    assert trained(store, tiny_spec(*first), "stopped") == trained(store, tiny_spec(*first), names[0])
    return store


def test_adapters_of_experts_train_alike_when_they_are_distributed_and_resume_with_their_bits(
    tmp_path: Path, bases: dict[tuple[str, ...], str]
) -> None:
    store = train_all(tmp_path, bases, FAST)
    spec = tiny_spec(*settings(bases, *chain(*LAYOUTS[FAST[0]]), processes=2))
    checkpoint = open_checkpoint(store, identity_of(spec, FAST[0]), 4)
    shapes = adapter_shapes(spec.model, VOCABULARY, spec.training.lora)
    assert checkpoint.tensors.keys() == {prefix + name for name in shapes for prefix in ("", *MOMENTS.values())}
    moved = checkpoint.tensor("model.layers.1.mlp.experts.down.lora_B.weight").unflatten(0, (4, -1))
    assert all(matrix.any() for matrix in moved), "each expert has learned"


@pytest.mark.drill
def test_adapters_of_experts_train_alike_in_every_other_layout(
    tmp_path: Path, bases: dict[tuple[str, ...], str]
) -> None:
    train_all(tmp_path, bases, [name for name in LAYOUTS if name not in FAST])
