"""The supported model families: the same function as in `transformers`, for import, export and training."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import document_ids
from holdfast.model.export import published_rows
from holdfast.model.hugging_face import load_exported, read_hugging_face, require_fit
from holdfast.model.initialise import flops_per_token, initial_tensor, parameter_count, parameter_shapes
from holdfast.model.layers import LayerCache
from holdfast.model.published import Rows, published
from holdfast.planning.shape import Architecture
from tests.model.families import (
    CONTEXT,
    FAMILIES,
    NEW,
    TOKENS,
    VOCABULARY,
    built,
    kernel_of,
    ours_of,
    same_logits,
    theirs_of,
)
from tests.model.tiny_model import decoder, export, shape, tokenizer_json

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_the_logits_of_transformers_to_the_bit(tmp_path: Path, name: str) -> None:
    ours = built(name)
    export(tmp_path, ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation=kernel_of(name)
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(theirs).__name__]
    assert type(theirs).__name__.lower().startswith(ours.shape.family.replace("_text", "").replace("_", ""))
    logits = ours(TOKENS)
    assert logits.std() > 1, "the comparison must mean something"
    assert same_logits(name, logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_transformers_gives_the_same_bits_under_the_spec(tmp_path: Path, name: str) -> None:
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    require_fit(read_hugging_face(tmp_path), ours_of(name), VOCABULARY)
    ours, _ = load_exported(tmp_path)
    assert same_logits(name, ours(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEW])
def test_training_walks_with_transformers_and_what_is_exported_then_is_still_its_model(
    tmp_path: Path, name: str
) -> None:
    theirs = theirs_of(name).train()
    theirs.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "tokenizer.json").write_text(tokenizer_json())
    ours = load_exported(tmp_path / "first")[0].train()
    # With a mask, transformers repeats keys and values. It also sorts the tokens of one expert in any order, and the
    # newer families have eager attention. So gradients add up differently. AdamW would divide a gradient of pure
    # rounding errors by itself.
    exact = "window" not in name and ours.shape.experts == 1 and name not in NEW
    optimizer_of = partial(torch.optim.AdamW, lr=1e-3) if exact else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [optimizer_of(model.parameters()) for model in (ours, theirs)]
    losses = []
    for step in range(4):
        rows = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(step))
        # The loss in chunks, which adds up in another order, is compared below.
        logits = ours(rows[:, :-1]), theirs(rows[:, :-1]).logits
        values = [torch.nn.functional.cross_entropy(each.flatten(0, 1), rows[:, 1:].flatten()) for each in logits]
        with torch.no_grad():
            assert abs(ours(rows[:, :-1], rows[:, 1:]) - values[0]) <= 1e-6 * values[0]
        for optimizer, value in zip(optimizers, values, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append(tuple(value.item() for value in values))
    assert max(abs(first - second) for first, second in losses) <= (0 if exact else 1e-5), losses
    export(tmp_path / "last", ours.eval())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "last", attn_implementation="sdpa")
    assert torch.equal(reloaded(TOKENS).logits, ours(TOKENS))
    apart = (ours(TOKENS) - theirs.eval()(TOKENS).logits).abs().max()
    assert apart <= (0 if exact else 1e-3), "on logits of standard deviation above 1"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_bf16_are_as_close_to_those_in_fp32_as_those_of_eager_transformers(
    tmp_path: Path, name: str, device: str
) -> None:
    """The error of bf16 is the sum of many roundings of equal size. One more rounding of each value would double its
    variance, which makes the error 1.41 times as large. So the bound is 1.5, plus one rounding of the logits.

    A rounding can send a token to another expert, in any of the models. Such a token has a large error, and the median
    of the tokens does not depend on it. Rows of 16 bytes are needed for products of experts.
    """
    theirs = theirs_of(name, hidden_size=64)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.copy_(tensor.bfloat16())  # no model rounds weights
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    rows = torch.randint(0, VOCABULARY, (8, CONTEXT), generator=torch.Generator().manual_seed(1)).to(device)

    def logits_of_theirs(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").to(device)
        assert next(model.parameters()).dtype is dtype
        return model(rows).logits

    ours = load_exported(tmp_path)[0].to(device)
    with torch.no_grad():
        expected, theirs_in_bf16 = logits_of_theirs(torch.float32), logits_of_theirs(torch.bfloat16)
        with torch.autocast(device, torch.bfloat16):
            whole_replicas = ours(rows)
        for parameter in ours.parameters():  # as FSDP2 does
            parameter.data = parameter.bfloat16()
        sharded = ours(rows)

    def error(logits: torch.Tensor) -> float:
        assert logits.dtype is torch.bfloat16
        return float((logits.float() - expected).square().mean(-1).sqrt().median())

    bound = 1.5 * error(theirs_in_bf16) + 2**-9 * float(expected.std())
    assert expected.std() > 1, "the comparison must mean something"
    assert error(whole_replicas) <= bound
    assert error(sharded) <= bound


@pytest.mark.parametrize("name", NEW)
def test_gradients_are_those_of_eager_transformers(tmp_path: Path, name: str) -> None:
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    ours, _ = load_exported(tmp_path)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    ours(inputs, targets).backward()
    torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    canonical = {key: p.grad for key, p in ours.named_parameters() if p.grad is not None}
    compared = 0
    for key, parameter in theirs.named_parameters():
        places = published(ours.shape, VOCABULARY).get(key) or [Rows(key, 0, canonical[key].shape)]
        parts = [
            torch.cat(
                list(
                    published_rows(key, place, lambda tensor, *rows: iter([canonical[tensor][slice(*rows or (None,))]]))
                )
            )
            for place in places
        ]
        found, expected = torch.cat(parts).reshape(parameter.shape), parameter.grad
        compared += found.numel()
        assert expected is not None, key
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), key
    assert compared == parameter_count(ours.shape, VOCABULARY)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_computed_as_if_each_were_alone(name: str) -> None:
    model = built(name)
    tokens = TOKENS[:1].clamp(min=1)
    tokens[0, [9, 30]] = 0  # the ends of two documents
    packed = model(tokens, segments=Segments.of_documents(document_ids(tokens, 0)))
    # Positions of a document alone start at 0: rotation depends on differences only.
    alone = torch.cat([model(part) for part in tokens.split([10, 21, 17], dim=1)], dim=1)
    assert (packed - alone).abs().max() <= 1e-4 * alone.abs().max()
    cache = [LayerCache() for _ in range(model.shape.layers)]  # and one token at a time
    cached = [model(tokens[:, :5], cache=cache)] + [model(tokens[:, at : at + 1], cache=cache) for at in range(5, 20)]
    whole = model(tokens[:, :20])
    assert (torch.cat(cached, dim=1) - whole).abs().max() <= 1e-4 * whole.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_planner_counts_the_parameters_of_the_real_module(name: str) -> None:
    model = ours_of(name)
    assert Architecture.of(model, VOCABULARY).parameters == parameter_count(model, VOCABULARY)


def test_a_window_hides_what_lies_before_it_with_documents_and_in_generation() -> None:
    model = shape(family="mistral", sliding_window=7, layers=1)
    built = decoder(model)
    tokens = TOKENS[:, :32]
    changed = tokens.clone()
    changed[:, :12] = 9
    logits, other = built(tokens), built(changed)
    assert torch.equal(logits[:, 18:], other[:, 18:]), "token 18 sees 12 to 18"
    assert not torch.equal(logits[:, 17], other[:, 17])
    one_document = Segments.of_documents(document_ids(tokens.clamp(min=1), 0))
    assert (built(tokens, segments=one_document) - logits).abs().max() < 1e-5
    cache = [LayerCache()]
    cached_logits = [built(tokens[:, :10], cache=cache)] + [
        built(tokens[:, at : at + 1], cache=cache) for at in range(10, 32)
    ]
    assert (torch.cat(cached_logits, dim=1) - logits).abs().max() < 1e-5


def test_biases_begin_at_zero_and_are_counted() -> None:
    model = ours_of("qwen2")
    shapes = parameter_shapes(model, VOCABULARY)
    name = "model.layers.0.self_attn.k_proj.bias"
    assert shapes[name] == (16,)
    assert not initial_tensor(name, shapes[name], model, 0).any()
    wide = ours_of("qwen3")
    assert flops_per_token(wide, VOCABULARY) - flops_per_token(wide, VOCABULARY, 1) == 12 * 2 * 4 * 20 * (CONTEXT - 1)
