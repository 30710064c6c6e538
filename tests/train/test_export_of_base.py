"""The export of a tuned model keeps the tokens, templates, sampling and context of its base, as transformers reads
them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig

from holdfast.checkpoint import read_manifest
from holdfast.components.train.export import export
from holdfast.dataset import Dataset
from holdfast.model.config.base import Base
from holdfast.model.exported import exported_files
from holdfast.model.generate import generate
from holdfast.model.hugging_face import load_exported
from holdfast.store import Store, layout, local_folder
from tests.train.test_export import RUN, STEP, saved
from tests.train.tiny_run import DATASET_ID, END_OF_TEXT, tiny_spec, write_dataset

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
TOOL_USE = "{{ tools | tojson }}" + TEMPLATE
TOKENS = {"bos_token": "word260", "eos_token": "word261", "pad_token": "word262"}
SAMPLING = {"bos_token_id": 260, "eos_token_id": [261, 263], "pad_token_id": 262, "temperature": 0.6, "top_p": 0.9,
            "do_sample": True}  # fmt: skip
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write_base(folder: Path, **tokenizer: Any) -> Path:
    folder.mkdir()
    LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=300,
        max_position_embeddings=131072, bos_token_id=260, eos_token_id=[261, 263], pad_token_id=262, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    GenerationConfig(**SAMPLING).save_pretrained(folder)
    settings = {
        **TOKENS,
        "model_max_length": 131072,
        "padding_side": "left",
        "extra_special_tokens": ["word264"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": "code.Mine"},
        **tokenizer,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(TOKENS))
    return folder


def exported(store: Store, tmp_path: Path, base: Path, kind: str) -> Path:
    chat: dict[str, Any] = {"text": TEMPLATE, "kind": "chat"} if kind == "chat" else {}
    write_dataset(store, packed=np.arange(1, 2000, dtype=np.uint32) % 250 if chat else None, **chat)
    tokenizer_fields = (
        "data.document_masks=true",
        "data.tokenizer.kind=file",
        f"data.tokenizer.path={base}/tokenizer.json",
    )
    spec = tiny_spec(
        "model.layers=1", f"model.init_from={base}", *(("data.kind=chat", *tokenizer_fields) if chat else ())
    )
    manifest = saved(store)
    export(spec, manifest, Dataset.open(store, DATASET_ID, tmp_path / "cache"), store)
    folder = local_folder(store, layout.export(RUN, STEP, manifest.state_digest), tmp_path / "export")
    assert folder is not None
    return folder


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_an_export_keeps_the_tokens_sampling_context_and_template_of_its_base(
    store: Store, tmp_path: Path, kind: str
) -> None:
    folder = exported(store, tmp_path, write_base(tmp_path / "base", chat_template=TEMPLATE), kind)
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (260, [0, 261, 263], 262)
    assert (config.max_position_embeddings, str(config.dtype)) == (131072, "torch.bfloat16")
    sampling = GenerationConfig.from_pretrained(folder)
    assert {key: getattr(sampling, key) for key in SAMPLING} == {**SAMPLING, "eos_token_id": [0, 261, 263]}
    reloaded = AutoTokenizer.from_pretrained(folder)
    assert {key: getattr(reloaded, key) for key in TOKENS} == TOKENS
    assert (reloaded.model_max_length, reloaded.padding_side) == (131072, "left")
    assert reloaded.apply_chat_template(TALK, tokenize=False) == "word260user:aword261assistant:bword261"
    assert json.loads((folder / "special_tokens_map.json").read_text()) == TOKENS
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    manifest = read_manifest(store, RUN, STEP)
    decoder, tokenizer = load_exported(exported_files(store, layout.export(RUN, STEP, manifest.state_digest)))
    assert (decoder.shape.context, decoder.end_of_text, decoder.stops) == (16, 0, (0, 261, 263))
    assert generate(decoder, tokenizer, "a", tokens=2, temperature=0) is not None


def test_named_templates_of_a_base_are_kept_and_chosen_from(store: Store, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_USE}]
    tokenizer = AutoTokenizer.from_pretrained(
        exported(store, tmp_path, write_base(tmp_path / "base", chat_template=templates), "text")
    )
    assert tokenizer.apply_chat_template(TALK, tokenize=False).startswith("word260user")
    assert tokenizer.apply_chat_template(TALK, tools=[{"z": 1, "a": 2}], tokenize=False).startswith(
        '[{"z": 1, "a": 2}]'
    )


def test_a_model_without_a_base_is_exported_with_the_end_of_its_documents_alone(store: Store, tmp_path: Path) -> None:
    own = {"bos_token_id": 5, "eos_token_id": 5, "max_position_embeddings": 16}
    documents = Base().documents(own, END_OF_TEXT, 5)
    assert documents["config.json"] == own
    assert documents["generation_config.json"] == {"bos_token_id": 5, "eos_token_id": 5, "do_sample": True}
    assert (
        documents["tokenizer_config.json"]["bos_token"]
        == documents["tokenizer_config.json"]["eos_token"]
        == END_OF_TEXT
    )
    assert "special_tokens_map.json" not in documents


@pytest.mark.parametrize(
    ("base", "expected"), [(261, [0, 261]), ([261, 0], [261, 0]), (0, 0), (None, 0), ([], 0), ([7], [0, 7])]
)
def test_the_end_tokens_of_a_base_stay_and_that_of_the_run_is_among_them(base: Any, expected: Any) -> None:
    own = {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 16, "dtype": "float32"}
    base_model = Base(config={"eos_token_id": base, "quantization_config": {}, "auto_map": {}})
    documents = base_model.documents(own, END_OF_TEXT, 0)
    assert documents["config.json"]["eos_token_id"] == expected
    assert documents["generation_config.json"]["eos_token_id"] == expected
    assert not {"quantization_config", "auto_map", "bos_token_id"} & documents["config.json"].keys()
