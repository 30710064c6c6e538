"""The supported model families: the same function as in `transformers`, for import, export and training."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder, LayerCache, document_ids
from holdfast.model.hugging_face import load_exported, read_hugging_face, require_fit
from holdfast.model.initialise import flops_per_token, initial_tensor, parameter_shapes
from holdfast.spec.errors import SpecError
from holdfast.spec.model import Model
from tests.model.tiny_model import decoder, export, shape, tokenizer_json

VOCABULARY, CONTEXT = 300, 48
TOKENS = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
NOT_BALANCED = {"top_k": 2, "balance": "none"}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_context": 16}

# The model fields of a spec, and the names in `transformers`.
FAMILIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "linear rope": (
        {"rope_scaling": {"kind": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama 3": (
        {"rope_scaling": LLAMA3, "rope_theta": 500.0, "kv_heads": 2},
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": (
        {"family": "mistral", "kv_heads": 2, "head_dim": 12, "tie_embeddings": False},
        {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None},
    ),
    "mistral, window": (
        {"family": "mistral", "kv_heads": 2, "sliding_window": 7, "tie_embeddings": False},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7},
    ),
    "qwen2": ({"family": "qwen2", "kv_heads": 2}, {"model_type": "qwen2", "num_key_value_heads": 2}),
    "qwen3": (
        {"family": "qwen3", "kv_heads": 2, "head_dim": 20, "hidden": 36},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 36},
    ),
    "mixtral": (
        {"family": "mixtral", "kv_heads": 2, "experts": 4, "routing": NOT_BALANCED, "tie_embeddings": False},
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        {"family": "qwen3_moe", "kv_heads": 2, "head_dim": 20, "hidden": 36, "experts": 6, "routing": NOT_BALANCED},
        {
            "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 36, "num_experts": 6,
            "moe_intermediate_size": 40, "num_experts_per_tok": 2, "norm_topk_prob": True, "intermediate_size": 96,
        },
    ),
    "qwen2_moe": (
        {
            "family": "qwen2_moe", "kv_heads": 2, "experts": 5,
            "routing": {**NOT_BALANCED, "shared": 3, "normalise": False, "top_k": 3},
        },
        {
            "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 5, "moe_intermediate_size": 40,
            "num_experts_per_tok": 3, "shared_expert_intermediate_size": 120, "norm_topk_prob": False,
        },
    ),
    "dots1": (
        {"family": "dots1", "kv_heads": 2, "experts": 6, "routing": {**NOT_BALANCED, "shared": 1}},
        {
            "model_type": "dots1", "num_key_value_heads": 2, "n_routed_experts": 6, "moe_intermediate_size": 40,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True, "sliding_window": None,
        },
    ),
}  # fmt: skip


def ours_of(name: str) -> Model:
    return shape(context=CONTEXT, ffn=40, **FAMILIES[name][0])


def built(name: str) -> Decoder:
    """A decoder with random vectors: initially, norms and biases have no effect."""
    model = decoder(ours_of(name))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.state_dict().values():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def theirs_of(name: str) -> torch.nn.Module:
    """A random model, created by `transformers`."""
    overrides = FAMILIES[name][1]
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "eos_token_id": 0, "bos_token_id": 0,
        "tie_word_embeddings": FAMILIES[name][0].get("tie_embeddings", True), "num_key_value_heads": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    merged = {**settings, **overrides}
    config = AutoConfig.for_model(merged.pop("model_type", "llama"), **merged)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.state_dict().values():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return reference


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_the_logits_of_transformers_to_the_bit(tmp_path: Path, name: str) -> None:
    ours = built(name)
    export(tmp_path, ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(theirs).__name__]
    assert type(theirs).__name__.lower().startswith(ours.shape.family.replace("_", ""))
    logits = ours(TOKENS)
    assert logits.std() > 1, "the comparison must mean something"
    assert torch.equal(logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_transformers_gives_the_same_bits_under_the_spec(tmp_path: Path, name: str) -> None:
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    require_fit(read_hugging_face(tmp_path), ours_of(name), VOCABULARY)
    ours, _ = load_exported(tmp_path)
    assert torch.equal(ours(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_walks_with_transformers_and_what_is_exported_then_is_still_its_model(
    tmp_path: Path, name: str
) -> None:
    theirs = theirs_of(name).train()
    theirs.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "tokenizer.json").write_text(tokenizer_json())
    ours = load_exported(tmp_path / "first")[0].train()
    # With a mask, transformers repeats keys and values. It also sorts the tokens of one expert in any order. So
    # gradients
    # add up differently. AdamW would divide a gradient of pure rounding errors by itself.
    exact = "window" not in name and ours.shape.experts == 1
    optimizer_of = partial(torch.optim.AdamW, lr=1e-3) if exact else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [optimizer_of(model.parameters()) for model in (ours, theirs)]
    losses = []
    for step in range(4):
        rows = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(step))
        loss = ours(rows[:, :-1], rows[:, 1:])
        reference = torch.nn.functional.cross_entropy(theirs(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        for optimizer, value in zip(optimizers, (loss, reference), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append((loss.item(), reference.item()))
    assert max(abs(first - second) for first, second in losses) <= (0 if exact else 1e-5), losses
    export(tmp_path / "last", ours.eval())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "last", attn_implementation="sdpa")
    assert torch.equal(reloaded(TOKENS).logits, ours(TOKENS))
    apart = (ours(TOKENS) - theirs.eval()(TOKENS).logits).abs().max()
    assert apart <= (0 if exact else 1e-3), "on logits of standard deviation above 1"


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


def test_weights_of_another_family_are_refused_with_every_field_of_it(tmp_path: Path) -> None:
    export(tmp_path, built("llama 3"))
    with pytest.raises(SpecError) as error:
        require_fit(read_hugging_face(tmp_path), ours_of("qwen3"), VOCABULARY)
    remedies = {problem.field: problem.remedy for problem in error.value.problems}
    assert remedies == {
        "model.family": "write family: llama",
        "model.hidden": "write hidden: 32",
        "model.head_dim": "write head_dim: 8",
        "model.rope_theta": "write rope_theta: 500.0",
        "model.rope_scaling.kind": "write kind: llama3",
        "model.rope_scaling.factor": "write factor: 8.0",
        "model.rope_scaling.original_context": "write original_context: 16",
    }


def test_biases_begin_at_zero_and_are_counted() -> None:
    model = ours_of("qwen2")
    shapes = parameter_shapes(model, VOCABULARY)
    name = "model.layers.0.self_attn.k_proj.bias"
    assert shapes[name] == (16,)
    assert not initial_tensor(name, shapes[name], model, 0).any()
    wide = ours_of("qwen3")
    assert flops_per_token(wide, VOCABULARY) - flops_per_token(wide, VOCABULARY, 1) == 12 * 2 * 4 * 20 * (CONTEXT - 1)
