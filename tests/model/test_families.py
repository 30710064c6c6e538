"""The supported model families: the same function as in `transformers`, for import, export and training."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration

from holdfast.model.attention.segments import Segments
from holdfast.model.config.reader import read_config
from holdfast.model.config.writer import config
from holdfast.model.decoder import Decoder, document_ids
from holdfast.model.export import published_rows
from holdfast.model.hugging_face import load_exported, read_hugging_face, require_fit
from holdfast.model.initialise import flops_per_token, initial_tensor, parameter_count, parameter_shapes
from holdfast.model.layers import LayerCache
from holdfast.model.published import Rows, published
from holdfast.planning.shape import Architecture
from holdfast.spec.errors import DataError, SpecError
from holdfast.spec.model import Model
from tests.model.tiny_model import decoder, export, shape, tokenizer_json

VOCABULARY, CONTEXT = 300, 48
TOKENS = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
NOT_BALANCED = {"top_k": 2, "balance": "none"}
YARN = {"kind": "yarn", "factor": 4.0, "original_context": 16, "beta_fast": 4.0}
YARN_KEYS = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
YARN_FACTOR = (0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1)
LATENT = {"query": 10, "key_value": 14, "rope": 8, "value": 6}
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
    "olmo2": (
        {"family": "olmo2", "kv_heads": 2, "tie_embeddings": False},
        {"model_type": "olmo2", "num_key_value_heads": 2},
    ),
    "olmo3": (
        {
            "family": "olmo3", "kv_heads": 2, "layers": 4, "sliding_window": 7, "rope_theta": 500.0,
            "rope_scaling": YARN, "tie_embeddings": False,
        },
        {
            "model_type": "olmo3", "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **YARN_KEYS},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "smollm3": (
        {"family": "smollm3", "kv_heads": 2, "layers": 4},
        {"model_type": "smollm3", "num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    ),
    "phi3": (
        {"family": "phi3", "kv_heads": 2, "sliding_window": 20, "tie_embeddings": False},
        {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 20, "pad_token_id": 0},
    ),
    "phi3, longrope": (
        {
            "family": "phi3", "kv_heads": 2, "rotary_fraction": 0.5, "hidden": 64,
            "rope_scaling": {
                "kind": "longrope", "factor": 3.0, "original_context": 16, "short_factors": [1.0, 1.5, 2.0, 2.5],
                "long_factors": [1.0, 2.0, 4.0, 8.0],
            },
        },
        {
            "model_type": "phi3", "num_key_value_heads": 2, "hidden_size": 64, "pad_token_id": 0,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma3_text": (
        {
            "family": "gemma3_text", "kv_heads": 2, "layers": 3, "head_dim": 12, "sliding_window": 7,
            "rope_theta": 1000.0, "rope_local_theta": 100.0, "query_scalar": 20.0,
            "layer_pattern": ["sliding", "full", "sliding"],
            "rope_scaling": {"kind": "linear", "factor": 4.0},
        },
        {
            "model_type": "gemma3_text", "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 12,
            "sliding_window": 7, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt_oss": (
        {
            "family": "gpt_oss", "kv_heads": 2, "head_dim": 12, "experts": 5, "routing": NOT_BALANCED,
            "sliding_window": 7, "rope_theta": 1000.0, "rope_scaling": {**YARN, "truncate": False},
            "tie_embeddings": False,
        },
        {
            "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 5,
            "num_experts_per_tok": 2, "sliding_window": 7,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, **YARN_KEYS, "truncate": False},
        },
    ),
    "glm4_moe": (
        {
            "family": "glm4_moe", "kv_heads": 2, "layers": 3, "experts": 8, "rotary_fraction": 0.5, "head_dim": 12,
            "attention_bias": True, "query_key_norm": True, "dense_layers": 1, "dense_ffn": 56,
            "tie_embeddings": False,
            "routing": {**NOT_BALANCED, "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5},
        },
        {
            "model_type": "glm4_moe", "num_key_value_heads": 2, "num_hidden_layers": 3, "n_routed_experts": 8,
            "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
            "intermediate_size": 56, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v3": (
        {
            "family": "deepseek_v3", "layers": 3, "experts": 8, "head_dim": 12, "dense_layers": 1, "dense_ffn": 56,
            "latent": LATENT, "tie_embeddings": False, "rope_theta": 500.0,
            "rope_scaling": {**YARN, "score_factor": 0.5, "attention_factor": YARN_FACTOR},
            "routing": {**NOT_BALANCED, "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5},
        },
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 3, "n_routed_experts": 8, "num_key_value_heads": 4,
            "q_lora_rank": 10, "kv_lora_rank": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6,
            "first_k_dense_replace": 1, "intermediate_size": 56, "moe_intermediate_size": 40, "n_group": 4,
            "num_experts_per_tok": 2, "topk_group": 2, "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, **YARN_KEYS, "mscale": 1.0, "mscale_all_dim": 0.5,
            },
        },
    ),
    "deepseek_v3, no latent of queries": (
        {
            "family": "deepseek_v3", "experts": 4, "head_dim": 12, "latent": {**LATENT, "query": 0},
            "tie_embeddings": False, "routing": {**NOT_BALANCED, "shared": 1},
        },
        {
            "model_type": "deepseek_v3", "n_routed_experts": 4, "num_key_value_heads": 4, "first_k_dense_replace": 0,
            "q_lora_rank": None, "kv_lora_rank": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6,
            "moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
        },
    ),
}  # fmt: skip
NEW = (
    "deepseek_v3",
    "deepseek_v3, no latent of queries",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "phi3, longrope",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
)


def same_logits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To the bit. For families with eager attention, which adds up in another order, to 1e-5 of the largest."""
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()) if name in NEW else torch.equal(ours, theirs)


def kernel_of(name: str) -> str:
    return "eager" if name in NEW else "sdpa"


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
    settings_of_theirs = AutoConfig.for_model(merged.pop("model_type", "llama"), **merged)
    reference = AutoModelForCausalLM.from_config(
        settings_of_theirs, attn_implementation=kernel_of(name), dtype=torch.float32
    ).eval()
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


@pytest.mark.parametrize("name", NEW)
def test_gradients_are_those_of_eager_transformers(tmp_path: Path, name: str) -> None:
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    ours, _ = load_exported(tmp_path)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    ours(inputs, targets).backward()
    torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    canonical = {key: parameter.grad for key, parameter in ours.named_parameters()}
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


def test_weights_of_gpt_oss_in_four_bits_are_read_exactly(tmp_path: Path) -> None:
    ours = built("gpt_oss")
    folder = tmp_path / "plain"
    export(folder, ours)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        blocks = torch.randint(0, 256, (5, 80, 1, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 130, (5, 80, 1), generator=generator, dtype=torch.uint8)
        tensors[name] = dequantised(blocks, scales).to(torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    expected = {key: value for key, value in tensors.items() if not key.endswith(("_blocks", "_scales"))}
    save_file(expected, folder / "model.safetensors")
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {key: value for key, value in tensors.items() if f"{key}_blocks" not in tensors}, packed / "model.safetensors"
    )
    plain, weights = read_hugging_face(folder), read_hugging_face(packed)
    for key in plain.shapes:
        assert torch.equal(weights.tensor(key), plain.tensor(key)), key
        assert torch.equal(weights.part(key, (slice(3, 9),)), plain.tensor(key)[3:9])


def test_rows_that_are_no_whole_blocks_of_four_bits_are_refused(tmp_path: Path) -> None:
    ours = decoder(shape(family="gpt_oss", experts=4, sliding_window=8, hidden=40), VOCABULARY)
    export(tmp_path, ours)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    experts, _, rows = tensors.pop(name).shape
    tensors[f"{name}_blocks"] = torch.zeros(experts, rows, 1, 16, dtype=torch.uint8)
    tensors[f"{name}_scales"] = torch.zeros(experts, rows, 1, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"gate_up_proj_blocks has rows of 40 numbers; MXFP4 needs multiples of 32"):
        read_hugging_face(tmp_path)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As `transformers` does it: [experts, columns, rows] in bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def test_layers_for_other_purposes_are_not_read(tmp_path: Path) -> None:
    ours = built("glm4_moe")
    export(tmp_path, ours)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 4)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.layers\.3\.eh_proj\.weight is not part of a model"):
        read_hugging_face(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    assert read_hugging_face(tmp_path).shapes.keys() == ours.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only None"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types has 1 layers; num_hidden_layers is 3"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types is 'chunked_attention' in a layer"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is null"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("smollm3", {"no_rope_layers": [1, "0"]}, "no_rope_layers is .*; a list of integers is needed"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_type of sliding_attention"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope' without .*_factor"),
        ("phi3", {"partial_rotary_factor": 0.4, "rope_parameters": None}, "a head rotates 3 of 8"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False; only True"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit is 9.0; only 7.0"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3; 8 experts need groups of one size"),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5, of 4 groups"),
    ],
)
def test_what_the_switches_of_a_family_cannot_express_is_refused_by_key(
    name: str, changes: dict[str, object], message: str
) -> None:
    settings = {**config(ours_of(name), VOCABULARY, 0), **changes}
    with pytest.raises(DataError, match=message):
        read_config("config.json", settings)


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


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."], ids=["written by 5", "by 4"])
def test_the_language_model_of_a_gemma_that_sees_images_is_read(tmp_path: Path, prefix: str) -> None:
    text = theirs_of("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    settings = AutoConfig.for_model(
        "gemma3", text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=1
    )
    both = Gemma3ForConditionalGeneration(settings).eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "language_model." in name]:
        after = name.rpartition("language_model.")[2].removeprefix("model.")
        tensors[prefix + after] = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    require_fit(read_hugging_face(tmp_path), ours_of("gemma3_text"), VOCABULARY)
    ours, _ = load_exported(tmp_path)
    assert same_logits("gemma3_text", ours(TOKENS), text(TOKENS).logits)
    changed = json.loads((tmp_path / "config.json").read_text()) | {"text_config": 3}
    with pytest.raises(DataError, match="text_config is 3; an object is needed"):
        read_config("c", changed)
