"""A chat fine-tune of a published model: from its folder to a registered model that `transformers` loads."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.corpus.test_starting_model import tokenizer_json
from tests.faults.nodes import PATIENCE, kill_family
from tests.whole.small import held, holdfast, objects, only, start

TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end_of_turn>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end_of_turn>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant ' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128, "sliding_window": 24,
    "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


def write_published(folder: Path, family: str) -> None:
    """A tiny random model, as `transformers` saves one."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, **SHAPE, **MODELS[family])
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_conversations(path: Path) -> None:
    records = [
        {"messages": [
            {"role": "user", "content": f"What follows {number}?"},
            {"role": "assistant", "content": str(number + 1)},
        ]}
        for number in range(120)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def prepare(folder: Path, family: str) -> None:
    """The folder of a user: a published model, conversations and a spec that names both."""
    folder.mkdir()
    write_published(folder / "base", family)
    write_conversations(folder / "conversations.jsonl")
    spec = {
        "name": "chat",
        "data": {
            "kind": "chat",
            "document_masks": True,
            "sources": [{"uri": "conversations.jsonl"}],
            "validation_fraction": 0.1,
            "workers": 1,
        },
        "model": {"from": "base"},
        "training": {"steps": 8, "global_batch": 2, "micro_batch": 2, "log_every": 1},
        "checkpoint": {"every_steps": 3},
        "evaluation": {"max_tokens": 2000, "max_perplexity": 10_000},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))


@pytest.mark.drill
@pytest.mark.parametrize("family", MODELS)
def test_a_run_that_was_killed_registers_the_model_of_an_undisturbed_one(tmp_path: Path, family: str) -> None:
    digests = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        prepare(folder, family)
        if name == "killed":
            with start(folder, "spec.yaml", **held(folder, 5)) as process:
                deadline = time.monotonic() + PATIENCE
                while not objects(folder, "runs/*/checkpoints/step-000000003.json"):
                    assert process.poll() is None, process.communicate()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                kill_family(process)
        result = holdfast(folder, "spec.yaml")
        assert result.returncode == 0, result.stdout + result.stderr
        digests.append(only(folder, "runs/*/result.json")["state_digest"])
    assert digests[0] == digests[1]
    assert len(objects(tmp_path / "killed", "runs/*/attempts/??????.json")) == 2

    (export,) = {path.parent for path in objects(tmp_path / "killed", "**/model.safetensors")}
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, attn_implementation="eager")
    assert model.config.model_type == family
    tokenizer = AutoTokenizer.from_pretrained(export)
    text = [{"role": "user", "content": "What follows 3?"}]
    tokens = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert torch.isfinite(model(**tokens).logits).all()
