"""Frozen weights in bf16 and NF4: the values that are stored, what a step keeps, and what is exported."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from holdfast.checkpoint import TensorBox, open_checkpoint, read_manifest
from holdfast.components.train.export import export
from holdfast.dataset import Dataset
from holdfast.engines.interface import build_engine
from holdfast.engines.packed_base import PackedBase
from holdfast.engines.torch.frozen import base_boxes
from holdfast.engines.weights import ImportedState
from holdfast.model import nf4
from holdfast.model.decoder import Decoder
from holdfast.model.hugging_face import read_hugging_face
from holdfast.model.initialise import initialise
from holdfast.model.lora import FrozenLinear, add_adapters, frozen_matrices, is_adapter, scale_of
from holdfast.spec.training import Lora
from holdfast.store import layout, local_folder
from tests.checkpoint.ranks import in_ranks
from tests.model.exporting import write_hugging_face
from tests.train.ranks import Steps, identity_of, join_exactly, steps_of, train_in_ranks, trained
from tests.train.test_lora import part
from tests.train.test_reference import END, STEPS, global_batch
from tests.train.tiny_run import DATASET_ID, END_OF_TEXT, VOCABULARY, new_store, tiny_assignment, tiny_spec

SHAPE = ("model.hidden=64", "model.ffn=192", "training.lora.rank=3", "model.init_from=x")
RATE = 0.02
HALVES = ("model.hidden=128", "model.ffn=384", "training.lora.rank=8", "model.init_from=x")
MIXTURE = (*HALVES, "model.family=qwen2_moe", "model.experts=4", "model.routing.shared=1")
TENSOR, EXPERT = "parallel.tensor=2", "parallel.expert=2"
Parts = list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]  # name, offset, whole shape and values of each


def by_table(values: list[float]) -> tuple[bytes, float]:
    """A block of a row as bitsandbytes stores it, element by element."""
    scale = max(map(abs, values))
    scaled = [value / scale if scale else 0.0 for value in values]
    codes = [min(range(16), key=lambda code: (abs(nf4.CODES[code] - value), code)) for value in scaled]
    return bytes(high << 4 | low for high, low in zip(codes[0::2], codes[1::2], strict=True)), scale


def test_nf4_stores_what_a_search_in_its_table_finds_in_the_published_layout() -> None:
    matrix = torch.randn(6, 192, generator=torch.Generator().manual_seed(1))
    matrix[2, 64:128] = 0
    packed, scale = nf4.quantise(matrix)
    assert (packed.shape, packed.dtype, scale.shape) == ((6, 96), torch.uint8, (6, 3))
    for row, block in ((row, block) for row in range(6) for block in range(3)):
        expected, largest = by_table(matrix[row, 64 * block : 64 * block + 64].tolist())
        assert bytes(packed[row, 32 * block : 32 * block + 32].tolist()) == expected
        assert scale[row, block] == largest
    again = nf4.dequantise(packed, scale)
    assert all(torch.equal(one, other) for one, other in zip(nf4.quantise(again), (packed, scale), strict=True))
    assert (again - matrix).abs().max() <= 0.16 * scale.max()
    assert not again[2, 64:128].any()


def stored(matrix: Tensor, base: str) -> Tensor:
    return matrix.bfloat16().float() if base == "bf16" else nf4.dequantise(*nf4.quantise(matrix))


def pair(base: str) -> tuple[Decoder, Decoder]:
    """A model with a base that is stored so, and the same one in fp32 with the values that are stored."""
    model, lora = tiny_spec(*SHAPE).model, Lora(rank=3)
    plain, narrow = Decoder.empty(model, VOCABULARY), Decoder.empty(model, VOCABULARY)
    for decoder in (plain, narrow):
        initialise(decoder, 1)
    names = frozen_matrices(model, VOCABULARY, lora)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in names:
                parameter.copy_(stored(parameter, base))
    whole = dict(narrow.named_parameters())
    for decoder, kind in ((plain, "fp32"), (narrow, base)):
        add_adapters(decoder, lora.model_copy(update={"base": kind}))
        for name, parameter in decoder.named_parameters():
            if is_adapter(name):
                parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    for name, module in narrow.named_modules():
        if isinstance(module, FrozenLinear) and base == "nf4":
            codes, scales = nf4.quantise(whole[f"{name}.weight"].detach())
            module.packed.copy_(codes)
            module.block_scale.copy_(scales)
    return plain, narrow


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_narrow_base_computes_with_its_stored_values_and_keeps_no_wide_copy(base: str) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    rows = global_batch(0, ignored=False)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for decoder in pair(base):
        kept.clear()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = decoder(rows[:, :-1], rows[:, 1:])
        loss.backward()
        gradients = {name: each.grad for name, each in decoder.named_parameters() if each.grad is not None}
        assert all(map(is_adapter, gradients))
        results.append((loss.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-7)
    matrices = {(64, 64), (32, 64), (192, 64), (64, 192)}
    assert [tensor for tensor in kept if tensor.dtype == torch.float32 and tuple(tensor.shape) in matrices] == []


def weights(folder: Path, base: str = "", shape: tuple[str, ...] = SHAPE) -> Path:
    """A base, or with `base` the values that are stored of it."""
    model, names = tiny_spec(*shape).model, frozen_matrices(tiny_spec(*shape).model, VOCABULARY, Lora(rank=8))
    decoder = Decoder.empty(model, VOCABULARY)
    initialise(decoder, 1)
    tokenizer = new_store(folder / "store").get(f"datasets/{DATASET_ID}/tokenizer.json").decode()
    tensors = {
        name: stored(each, base) if base and name in names else each for name, each in decoder.state_dict().items()
    }
    write_hugging_face(
        folder / "base", model, VOCABULARY, tensors.items(), tokenizer_json=tokenizer, end_of_text=END_OF_TEXT
    )
    return folder / "base"


def filled(base: Path, kept: PackedBase | None) -> dict[str, Tensor]:
    """The boxes of the frozen weights, filled from a base and its packed matrices."""
    spec = tiny_spec(*SHAPE)
    narrow = Decoder.empty(spec.model, VOCABULARY)
    add_adapters(narrow, spec.training.lora.model_copy(update={"base": "nf4"}))
    source = ImportedState(str(base), spec.model, VOCABULARY, kept)
    boxes = list(base_boxes([narrow]))
    for box in boxes:
        source.fill([box])
    return {box.name: box.data.clone() for box in boxes}


def test_a_base_is_quantised_once_and_read_afterwards_unless_an_object_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, store = weights(tmp_path), new_store(tmp_path / "runs")
    names = frozen_matrices(tiny_spec(*SHAPE).model, VOCABULARY, Lora(rank=3))
    expected, quantised = filled(base, None), list[Tensor]()
    assert expected.keys() >= {f"{name}{suffix}" for name in names for suffix in (".codes", ".scales")}

    def counting(matrix: Tensor) -> tuple[Tensor, Tensor]:
        quantised.append(matrix)
        return quantise(matrix)

    quantise = nf4.quantise
    monkeypatch.setattr(nf4, "quantise", counting)

    def start(copy: int = 0, copies: int = 1) -> int:
        """The number of matrices that a start quantises."""
        quantised.clear()
        found = filled(base, PackedBase(store, "d", copy, copies))
        assert all(torch.equal(found[name], each) for name, each in expected.items())
        return len(quantised)

    assert [start(copy, 2) for copy in (0, 0, 1, 1)] == [14, 7, 4, 2], "each rank writes every second missing matrix"
    assert (start(), start()) == (1, 0)
    file = layout.packed_base("d", min(names))
    content = bytearray(store.get(file))
    content[40] ^= 1
    store.put(file, bytes(content))
    assert (start(), start()) == (1, 0)
    assert [record.message for record in caplog.records if "is damaged" in record.message]
    store.put(file, bytes(content[:-1]))
    assert (start(), start()) == (1, 0)


def test_a_base_that_is_quantised_some_rows_at_a_time_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = weights(tmp_path)
    expected = filled(base, None)
    most, quantise = list[int](), nf4.quantise
    monkeypatch.setattr("holdfast.model.hugging_face.SLAB_BYTES", 5 * 4 * 192)

    def counted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        most.append(matrix.numel())
        return quantise(matrix)

    monkeypatch.setattr(nf4, "quantise", counted)
    found = filled(base, None)
    assert max(most) <= 5 * 192
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def _steps(rank: int, size: int, folder: Path, runs: list[tuple[Path, tuple[str, ...]]]) -> list[Steps]:
    join_exactly(folder, rank, size, always=True)
    results = []
    for base, overrides in runs:
        settings = (
            *SHAPE,
            "parallel.strategy=ddp",
            *overrides,
            f"model.init_from={base}",
            f"parallel.processes={size}",
        )
        spec = tiny_assignment(*settings)
        engine, first = build_engine(spec, VOCABULARY, END), ImportedState(str(base), spec.model, VOCABULARY)
        for box in engine.frozen():
            first.fill([box])
        for number, box in enumerate(engine.boxes()):
            whole = torch.randn(box.global_shape, generator=torch.Generator().manual_seed(number)) * 0.1
            box.data.copy_(part(whole, box) if "optimizer" not in box.name else torch.zeros(()))
        engine.restored(0)
        batches = (global_batch(step, ignored=False) for step in range(STEPS))
        results.append(steps_of(engine, spec, rank, size, batches, RATE))
    return results


def _parts(rank: int, size: int, folder: Path, base: Path, runs: list[tuple[str, ...]]) -> list[Parts]:
    """This rank's parts of the packed matrices of some layouts."""
    join_exactly(folder, rank, size, always=True)
    results = []
    for fields in runs:
        spec = tiny_assignment(*fields, f"model.init_from={base}", f"parallel.processes={size}")
        boxes = list(build_engine(spec, VOCABULARY, END).frozen())
        ImportedState(str(base), spec.model, VOCABULARY).fill(boxes)
        packed = [box for box in boxes if box.name.endswith((".codes", ".scales"))]
        results.append([(box.name, box.offset, box.global_shape, box.data.numpy()) for box in packed])
    return results


def test_the_parts_of_ranks_are_those_of_the_matrix_that_one_process_quantises(tmp_path: Path) -> None:
    base = weights(tmp_path, shape=MIXTURE)
    fields, layouts = (
        (*MIXTURE, "training.lora.base=nf4", "parallel.strategy=fsdp"),
        ((TENSOR,), (EXPERT,), (TENSOR, EXPERT)),
    )
    ((alone,),) = in_ranks(1, _parts, tmp_path / "one", base, [fields])
    whole, source = {name: torch.from_numpy(values) for name, _, _, values in alone}, read_hugging_face(base)
    for name, values in whole.items():
        expected = nf4.quantise(source.tensor(name.rpartition(".")[0]))[name.endswith(".scales")]
        assert torch.equal(values, expected)
    of_experts = {name for name in whole if ".mlp.experts." in name}
    runs = [(*fields, *fields_of_layout) for fields_of_layout in layouts]
    for of_ranks, given in zip(
        zip(*in_ranks(2, _parts, tmp_path / "two", base, runs), strict=True), layouts, strict=True
    ):
        found, split = dict[str, Tensor](), set[str]()
        for name, offset, shape, values in chain(*of_ranks):
            box = TensorBox(name, shape, offset, torch.from_numpy(values))
            assert torch.equal(box.data, part(whole[name], box))
            split |= {name} if values.shape != shape else set()
            part(found.setdefault(name, torch.zeros(shape, dtype=box.data.dtype)), box).copy_(box.data)
        assert found.keys() == whole.keys() and all(torch.equal(found[name], each) for name, each in whole.items())
        expected_split = of_experts if EXPERT in given else set()
        assert split == expected_split | (whole.keys() - of_experts if TENSOR in given else set())


@pytest.mark.drill
def test_nf4_gives_the_losses_of_its_values_in_fp32_whole_and_sharded(tmp_path: Path) -> None:
    values, base = weights(tmp_path / "values", "nf4"), weights(tmp_path / "original")
    bf16, nf4_base, sharded = "training.precision=bf16", "training.lora.base=nf4", "parallel.strategy=fsdp"
    pairs = [
        ((values, ()), (base, (nf4_base,)), 1e-4),
        ((values, ()), (base, (nf4_base, sharded)), 1e-4),
        ((values, (bf16,)), (base, (nf4_base, bf16)), 1e-3),
        ((values, (bf16, sharded)), (base, (nf4_base, bf16, sharded)), 1e-3),
        ((base, (bf16, sharded)), (base, ("training.lora.base=bf16", bf16, sharded)), 1e-3),
    ]
    runs = [each for one, other, _ in pairs for each in (one, other)]
    for results in in_ranks(2, _steps, tmp_path / "ranks", runs, seconds=300):
        curves = [curve for curve, _ in results]
        for expected, actual, (*_, bound) in zip(curves[0::2], curves[1::2], pairs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=bound, atol=0)


@pytest.mark.slow
def test_nf4_that_is_split_or_distributed_has_the_bits_of_its_values_in_fp32(tmp_path: Path) -> None:
    runs = []
    for fields, layouts in ((HALVES, ((TENSOR,),)), (MIXTURE, ((TENSOR,), (EXPERT,), (TENSOR, EXPERT)))):
        folder = tmp_path / str(len(fields))
        values, base = weights(folder / "values", "nf4", fields), weights(folder / "original", shape=fields)
        for given in layouts:
            for precision in ("fp32", "bf16"):
                settings = (*fields, *given, f"training.precision={precision}", "parallel.strategy=fsdp")
                runs += [(values, settings), (base, (*settings, "training.lora.base=nf4"))]
    for results in in_ranks(2, _steps, tmp_path / "ranks", runs, seconds=300):
        curves = [curve for curve, _ in results]
        assert curves[0::2] == curves[1::2]


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_run_resumes_to_the_same_bits_and_its_export_is_the_stored_base_with_the_adapters(
    tmp_path: Path, base: str
) -> None:
    dtype = torch.bfloat16 if base == "nf4" else torch.float32  # `base`: config.json of the base says float32
    settings: Any = (
        *SHAPE,
        f"model.export_dtype={'bf16' if base == 'nf4' else 'base'}",
        "training.steps=4",
        f"training.lora.base={base}",
        f"model.init_from={weights(tmp_path)}",
    )
    store, spec = new_store(tmp_path / "runs"), tiny_spec(*settings)
    assert train_in_ranks(1, store.url, tmp_path / "a", [(settings, "", None), (settings, "stopped", 2)]) == [
        "",
        "PreemptedError",
    ]
    assert train_in_ranks(1, store.url, tmp_path / "b", [(settings, "stopped", None)]) == [""]
    assert trained(store, spec, "stopped") == trained(store, spec)

    manifest = read_manifest(store, identity_of(spec), 4)
    export(spec, manifest, Dataset.open(store, DATASET_ID, tmp_path), store)
    folder = local_folder(store, layout.export(manifest.run_id, 4, manifest.state_digest), tmp_path)
    assert folder is not None
    exported, published = load_file(folder / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    checkpoint = open_checkpoint(store, manifest.run_id, 4)
    stem = "model.layers.1.self_attn.v_proj"
    low, high = (checkpoint.tensor(f"{stem}.lora_{which}.weight").double() for which in "AB")
    whole = stored(published[f"{stem}.weight"], base).double() + high @ low * scale_of(spec.training.lora)
    bound = 2**-8 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(exported[f"{stem}.weight"], whole.to(dtype), rtol=bound, atol=1e-7)
    assert not torch.equal(exported[f"{stem}.weight"], published[f"{stem}.weight"].to(dtype))
    assert torch.equal(exported["model.embed_tokens.weight"], published["model.embed_tokens.weight"].to(dtype))
