"""Untrusted model files: their claims are compared with the file, and wrong types are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.model.config.reader import read_config
from holdfast.model.files import Folder
from holdfast.model.tensor_files import read_header
from holdfast.spec.errors import DataError


def tensor(first: int, last: int, shape: Any = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor(0, 16), "b": tensor(0, 16)}, "overlap or leave a gap"),
        ({"a": tensor(0, 8), "b": tensor(4, 16)}, "overlap or leave a gap"),
        ({"a": tensor(0, 4), "b": tensor(8, 16)}, "overlap or leave a gap"),
        ({"a": tensor(4, 16)}, "overlap or leave a gap"),
        ({"a": tensor(0, 8)}, "do not end where it ends"),
        ({"a": tensor(0, 16, [2**62] * 100_000)}, "more than 64 axes"),  # this product took minutes
        ({"a": tensor(0, 16, [True, 4])}, "no sizes"),
        ({"a": tensor(0, 16, "4")}, "no shape"),
        ({"a": []}, "not a whole safetensors file"),
        ([], "not a whole safetensors file"),
        ("[" * 5000, "not a whole safetensors file"),
    ],
)
def test_a_header_that_is_not_of_its_file_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(DataError, match=message):
        read_header(Folder(tmp_path), "m.safetensors")


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta",
        "model_type", "architectures", "layer_types", "rope_scaling", "rope_parameters", "eos_token_id",
        "tie_word_embeddings", "num_key_value_heads", "id2label",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [{"a": [1]}, [[1]], "x", 10**400, float("inf"), True])
def test_a_value_of_another_type_is_refused_with_its_key_or_is_the_value_meant(key: str, value: Any) -> None:
    sound: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 300}
    if key == "id2label":
        sound["architectures"] = ["LlamaForSequenceClassification"]
    try:
        read_config("config.json", sound | {key: value})
    except DataError as error:
        assert key.split("_", 1)[0] in str(error) or "architectures" in str(error)
    else:
        assert key == "tie_word_embeddings" or isinstance(value, dict)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # A list of all layers took 17 GB.
        ({"model_type": "gemma3_text", "num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647"),
        ({"model_type": "qwen2_moe", "moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is None",
        ),
        (
            {
                "rope_theta": 1,
                "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
            },
            "rope_theta = 1.0 gives no frequencies",
        ),
    ],
)
def test_a_number_that_no_model_can_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_config("config.json", settings)


def test_a_factor_of_scores_is_read_only_for_families_that_use_it() -> None:
    """In other families of `transformers`, `mscale_all_dim` changes the factor of cosines and sines alone."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    assert read_config("config.json", {"model_type": "qwen3", "rope_scaling": scaling}).shape.attention_scale is None
    deepseek = read_config("config.json", {"model_type": "deepseek_v3", "rope_scaling": scaling}).shape
    assert deepseek.attention_scale is not None


def test_more_experts_than_a_model_has_are_refused() -> None:
    huge = {"model_type": "mixtral", "num_hidden_layers": 1000, "num_local_experts": 10_000}
    with pytest.raises(DataError, match="1000 layers of 10000 experts"):
        read_config("config.json", huge)


def test_an_error_of_the_byte_reader_is_passed_on_unchanged(tmp_path: Path) -> None:
    """A damaged export has a different remedy: downloading the file does not help."""

    class Damaged(Folder):
        def read_into(self, name: str, start: int, target: memoryview) -> None:
            raise DataError(f"{name}: run the spec again")

    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    with pytest.raises(DataError) as error:
        read_header(Damaged(tmp_path), "model.safetensors")
    assert str(error.value) == "model.safetensors: run the spec again"
