"""Export and import: the same function as transformers' Llama on the same weights, in both directions."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from holdfast.model.export import export_files
from holdfast.model.hugging_face import (
    load_exported,
    open_weights,
    read_hugging_face,
    require_fit,
)
from holdfast.spec.errors import DataError, MissingError, SpecError
from tests.model.tiny_model import END, decoder, export, shape, tokenizer_json

TOKENS = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
EAGER_BOUND = 2e-5  # for logits with a standard deviation above 1: the order of attention's sums is the only difference


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SHAPES = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "tie_embeddings": False, "rope_theta": 500_000.0, "norm_epsilon": 1e-6, "ffn": 40},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_an_export_has_the_logits_of_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    built = decoder(shape(**changes))
    export(tmp_path, built)
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="sdpa")
    eager = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    ours = built(TOKENS)
    assert ours.std() > 1, "the comparison must mean something"
    assert torch.equal(ours, theirs(TOKENS).logits), "the same kernels in the same order"
    assert (ours - eager(TOKENS).logits).abs().max() < EAGER_BOUND


@pytest.mark.parametrize("changes", SHAPES)
def test_a_checkpoint_of_transformers_gives_the_same_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    model = shape(**changes)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=model.ffn_width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=model.key_value_heads,
            max_position_embeddings=32,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tie_embeddings,
            initializer_range=0.3,
            eos_token_id=0,
        )
    )
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    ours, _ = load_exported(tmp_path)
    require_fit(read_hugging_face(tmp_path), model, 300)
    assert torch.equal(ours(TOKENS), theirs(TOKENS).logits)
    assert {name: tensor.tolist() for name, tensor in ours.state_dict().items()} == {
        name: tensor.tolist()
        for name, tensor in theirs.state_dict().items()
        if name != "lm_head.weight" or not model.tie_embeddings
    }


def test_an_export_read_back_is_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    built = decoder(shape(kv_heads=2))
    export(tmp_path, built)
    loaded, tokenizer = load_exported(tmp_path)
    assert loaded.shape.model_dump(exclude={"ffn"}) == built.shape.model_dump(exclude={"ffn"})
    assert (loaded.end_of_text, loaded.training) == (0, False)
    assert torch.equal(loaded(TOKENS), built(TOKENS))
    assert tokenizer.decode(tokenizer.encode("äöü ß € 你好 🙂").ids) == "äöü ß € 你好 🙂"


def test_the_exported_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    export(tmp_path, decoder(shape()))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    _, ours = load_exported(tmp_path)
    text = "def add(a, b):\n    return a  + b  # äöü 你好"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token, theirs.bos_token, theirs.eos_token_id) == (END, END, 0)
    assert theirs.model_max_length == 32


def test_exporting_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(tmp_path / name, decoder(shape()), max_shard_bytes=40_000)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_large_model_is_cut_into_shards_that_transformers_reads(tmp_path: Path) -> None:
    built = decoder(shape())
    names = export(tmp_path, built, max_shard_bytes=20_000)
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for shard in shards:
        tensors = load_file(tmp_path / shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, built(TOKENS))
    assert torch.equal(load_exported(tmp_path)[0](TOKENS), built(TOKENS))


def test_half_precision_weights_are_read_as_fp32(tmp_path: Path) -> None:
    export(tmp_path, decoder(shape()))
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    name, tensor = next(read_hugging_face(tmp_path).tensors())
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, decoder(shape()).state_dict()[name].bfloat16().float())


def test_a_tied_checkpoint_may_repeat_the_head_if_it_is_the_embedding(tmp_path: Path) -> None:
    export(tmp_path, decoder(shape()))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert "lm_head.weight" not in dict(read_hugging_face(tmp_path).tensors())
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(DataError, match=r"lm_head\.weight is not the embedding"):
        read_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "not .'LlamaForCausalLM'. of llama; that is of model_type mistral"),
        (
            {"architectures": ["OlmoForCausalLM"]},
            "OlmoForCausalLM.*LlamaForCausalLM, .*DeepseekV3ForCausalLM can be read",
        ),
        (
            {"model_type": "olmo"},
            "model_type is 'olmo'; only llama, mistral, qwen2, qwen3, mixtral, .*deepseek_v3 can be read",
        ),
        ({"model_type": "qwen3"}, "not .'Qwen3ForCausalLM'. of qwen3; that is of model_type llama"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0.0 can be read; set it to 0.0 to train"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'; only weights of 16 and 32 bits"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method is 'mxfp4'.*of gpt_oss"),
        (
            {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
            "quantization_config is .*load_in_4bit.*; only weights of 16 and 32 bits .* use weights that are not",
        ),
        ({"quantization_config": {"quant_method": None, "bits": 4}}, "quantization_config is .*bits.: 4.*; only"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config is .*int-quantized.*; only"),
        ({"compression_config": {"quant_method": "mxfp4"}}, "compression_config.quant_method is 'mxfp4'; only"),
        ({"compression_config": [4]}, "compression_config is .4.; an object is needed"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; an object is needed"),
        (
            {"model_type": "deepseek_v3", "architectures": None, "scoring_func": "softmax"},
            "scoring_func is 'softmax'; only 'sigmoid' can be read; use another model",
        ),
        (
            {"model_type": "deepseek_v3", "architectures": None, "topk_method": "greedy"},
            "topk_method is 'greedy'; only 'noaux_tc' can be read; use another model",
        ),
        (
            {"model_type": "gpt_oss", "architectures": None, "attention_bias": True, "swiglu_limit": 9.0},
            "swiglu_limit is 9.0; only 7.0 can be read; use another model",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_type 'llama3' without low_freq_factor"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_type is 'dynamic'; only default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"head_dim": 64}, "q_proj.weight has the shape .32, 32.; the config asks for .256, 32."),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need pairs"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 5}, "5 heads do not divide"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_hidden_layers": 3}, "and 6 more are missing; the config asks for 29 tensors"),
        ({"num_hidden_layers": 1}, "and 6 more are not part of a model"),
        ({"intermediate_size": 64}, "gate_proj.weight has the shape .96, 32.; the config asks for .64, 32."),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    export(tmp_path, decoder(shape()))
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(DataError, match=message):
        read_hugging_face(tmp_path)


def test_damaged_and_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json: no such file"):
        read_hugging_face(tmp_path)
    export(tmp_path, decoder(shape()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        read_hugging_face(tmp_path)
    path.unlink()
    with pytest.raises(MissingError, match=r"neither model\.safetensors nor"):
        read_hugging_face(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
    with pytest.raises(DataError, match="not a plain file name"):
        read_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_hugging_face(tmp_path)


def test_weights_of_another_shape_than_the_spec_are_refused_with_every_field(tmp_path: Path) -> None:
    export(tmp_path, decoder(shape()))
    weights = open_weights(str(tmp_path), tmp_path / "cache")
    require_fit(weights, shape(context=8, init_std=1.0), 300)  # neither is a property of the weights
    with pytest.raises(SpecError) as error:
        require_fit(weights, shape(layers=3, kv_heads=1), 301)
    fields = {problem.field: problem.remedy for problem in error.value.problems}
    assert fields.keys() == {"model.layers", "model.kv_heads", "data.tokenizer"}
    assert fields["model.layers"] == "write layers: 2"


def test_a_shard_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    built = decoder(shape(kv_heads=2, tie_embeddings=False))
    export(tmp_path, built, max_shard_bytes=40_000)
    for path in tmp_path.glob("*.safetensors"):
        save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_exported_in_another_type_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    built, name = decoder(shape(tie_embeddings=False)), str(dtype).removeprefix("torch.")
    export(tmp_path, built, dtype=name, max_shard_bytes=20_000)
    for path in tmp_path.glob("*.safetensors"):
        for tensor_name, tensor in load_file(path).items():
            assert torch.equal(tensor, built.state_dict()[tensor_name].to(dtype))
        save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    assert LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype is dtype
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert files["total_size"] == 2 * files["total_parameters"]


def test_tensors_that_do_not_match_the_model_are_refused() -> None:
    built = decoder(shape())
    tensors = built.state_dict()

    def write(changed: dict[str, torch.Tensor], end: str = END) -> None:
        source = {**tensors, **changed}
        for file in export_files(
            built.shape, 300, lambda name: iter([source[name]]), tokenizer_json=tokenizer_json(), end_of_text=end
        ):
            assert sum(len(data) for data in file.content()) == file.size

    write({})
    for width in (31, 33):
        with pytest.raises(DataError, match=r"model\.norm\.weight: the model needs \[32\], and 3. rows came"):
            write({"model.norm.weight": torch.ones(width)})
    with pytest.raises(DataError, match=r"embed_tokens\.weight: the model needs \[300, 32\], and rows of \[16\] came"):
        write({"model.embed_tokens.weight": torch.ones(600, 16)})
    with pytest.raises(DataError, match="has no token '<end>'"):
        write({}, "<end>")
