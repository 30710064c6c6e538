"""Published files of the families: what is read exactly, what is left out, and what is refused by key."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from holdfast.model.config.reader import read_config
from holdfast.model.config.writer import config
from holdfast.model.hugging_face import load_exported, read_hugging_face, require_fit
from holdfast.spec.errors import DataError, SpecError
from tests.model.families import (
    TOKENS,
    VOCABULARY,
    built,
    ours_of,
    same_logits,
    theirs_of,
)
from tests.model.tiny_model import decoder, export, shape, tokenizer_json


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
    written = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(DataError, match="text_config is 3; an object is needed"):
        read_config("c", written | {"text_config": 3})
    with pytest.raises(DataError, match=r"quantization_config\.quant_method is 'gptq'"):
        read_config("c", written | {"quantization_config": {"quant_method": "gptq"}})
