"""`model.from`: a spec that names a model is the spec with the model's fields written out."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from holdfast.api import load_spec as api_load_spec
from holdfast.model.config.fixed_fields import fixed_fields
from holdfast.model.config.writer import config
from holdfast.model.hub import weights_digest
from holdfast.pipelines.cli import app
from holdfast.pipelines.documents import write_fields
from holdfast.pipelines.paths import load_filled, load_spec
from holdfast.spec import SpecError, dump_spec, parse_spec, run_id, strict_yaml
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.model import Model
from holdfast.store import open_store
from tests.model.test_hub import COMMIT, Hub, hub

__all__ = ["hub"]

TURNS = ("<|endoftext|>", "<eos>", "<end_of_turn>")
TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + ' ' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant ' }}{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "kv_heads": 2, "tie_embeddings": False, "rope_theta": 5e5,
        "rope_scaling": {"kind": "llama3", "factor": 8, "low_frequency_factor": 1, "high_frequency_factor": 4,
                         "original_context": 64},
    },
    "mistral": {"head_dim": 12, "sliding_window": 16},
    "qwen2": {"ffn": 88},
    "qwen3": {"kv_heads": 1, "head_dim": 16},
    "mixtral": {"experts": 4},
    "qwen2_moe": {"experts": 4, "routing": {"top_k": 3, "normalise": False, "shared": 2}},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "gpt_oss": {"experts": 4, "head_dim": 16, "sliding_window": 16},
    "glm4_moe": {"experts": 4, "head_dim": 16, "dense_layers": 1, "routing": {"top_k": 2, "shared": 1}},
    "dots1": {"experts": 4, "routing": {"top_k": 2, "shared": 1}},
}  # fmt: skip


def shape_of(family: str) -> Model:
    return Model.model_validate(
        {"family": family, "layers": 2, "hidden": 32, "heads": 4, "ffn": 40, "context": 128, **SHAPES[family]}
    )


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer of 259 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["a"], trainers.BpeTrainer(special_tokens=list(TURNS), initial_alphabet=alphabet, show_progress=False)
    )
    return str(tokenizer.to_str())


def write_model(folder: Path, family: str = "qwen3", rows: int = 259, template: str = "", **changes: Any) -> Path:
    """What a published model consists of, apart from the content of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**config(shape_of(family), rows, end_id=0), **changes}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    (folder / "model.safetensors").write_bytes(b"weights")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_spec(folder: Path, **model: Any) -> Path:
    tree = {"name": "tuned", "data": {"sources": [{"uri": "x.txt"}]}, "model": model}
    path = folder / "spec.yaml"
    path.write_text(strict_yaml.write(tree))
    return path


@pytest.mark.parametrize("family", SHAPES)
def test_a_named_model_gives_its_fields_and_the_run_id_of_a_spec_with_them_written_out(
    tmp_path: Path, family: str
) -> None:
    folder = write_model(tmp_path / "base", family)
    spec, filled = load_filled(write_spec(tmp_path, **{"from": str(folder)}))
    written = parse_spec(
        {
            "name": "tuned",
            "data": {
                "sources": [{"uri": "x.txt"}],
                "tokenizer": {"kind": "file", "path": f"{folder}/tokenizer.json", "end_of_text": "<eos>"},
            },
            "model": {"family": family, "layers": 2, "hidden": 32, "heads": 4, "ffn": 40, "context": 128,
                      "init_from": str(folder), **SHAPES[family]},
        }
    )  # fmt: skip
    assert fixed_fields(spec.model) == fixed_fields(written.model)
    assert spec.data == written.data
    weights = weights_digest(spec.model.init_from)
    assert run_id(spec, "dataset", "", weights) == run_id(written, "dataset", "", weights)
    assert filled["model.family"] == family
    assert filled["data.tokenizer.path"] == f"{folder}/tokenizer.json"
    assert parse_spec(dump_spec(spec)) == spec  # a step reads a plain spec


def test_a_default_that_is_written_out_is_the_same_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", "qwen2")
    specs = [
        load_spec(write_spec(tmp_path, **{"from": str(folder)}), overrides)
        for overrides in ((), ("model.kv_heads=4",), ("model.kv_heads=null", "model.ffn=88"))
    ]
    assert len({run_id(spec, "dataset", "", "weights") for spec in specs}) == 1


@pytest.mark.parametrize(
    ("override", "field", "value", "remedy"),
    [
        ("model.hidden=64", "model.hidden", 64, "remove the field"),
        ("model.head_dim=8", "model.head_dim", 8, "remove the field"),
        ("model.family=qwen2", "model.family", "qwen2", "remove the field"),
        ("model.rope_scaling={kind: linear, factor: 2}", "model.rope_scaling.kind", "linear", "remove the field"),
        ("model.init_from=elsewhere", "model.init_from", "elsewhere", "remove one of them"),
        ("model.context=256", "model.context", 256, "use at most 128"),
        ("data.tokenizer.rows=99", "data.tokenizer.rows", 99, "remove the field"),
        ("data.tokenizer.kind=bpe", "data.tokenizer.kind", "bpe", "remove the field"),
        ("data.tokenizer.end_of_text=</s>", "data.tokenizer.end_of_text", "</s>", "remove the field"),
        ("model.rope_scaling=5", "model.rope_scaling", 5, "group of fields"),
        ("model.from=3", "model.from", 3, "hf://owner/name"),
    ],
)  # fmt: skip
def test_a_field_that_contradicts_the_model_is_refused_with_its_value_and_the_remedy(
    tmp_path: Path, override: str, field: str, value: object, remedy: str
) -> None:
    path = write_spec(tmp_path, **{"from": str(write_model(tmp_path / "base"))})
    with pytest.raises(SpecError) as error:
        load_spec(path, [override, "training.steps=0"])
    problems = {problem.field: problem for problem in error.value.problems}
    assert problems.keys() == {field, "training.steps"}
    assert (problems[field].value, problems[field].place) == (value, "--set")
    assert remedy in problems[field].remedy


def test_a_shorter_context_and_fields_that_the_weights_do_not_fix_are_kept(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base")
    changes = ("model.context=64", "model.hidden=32", "model.init_std=0.5", "data.tokenizer.end_of_text=<|endoftext|>")
    spec, filled = load_filled(write_spec(tmp_path, **{"from": str(folder)}), changes)
    assert (spec.model.context, spec.model.init_std, spec.data.tokenizer.end_of_text) == (64, 0.5, "<|endoftext|>")
    assert not filled.keys() & {"model.context", "model.hidden", "model.init_std", "data.tokenizer.end_of_text"}


def test_an_embedding_with_more_rows_than_tokens_fills_in_the_rows_and_one_with_fewer_is_refused(
    tmp_path: Path,
) -> None:
    assert (
        load_spec(write_spec(tmp_path, **{"from": str(write_model(tmp_path / "a", rows=264))})).data.tokenizer.rows
        == 264
    )
    path = write_spec(tmp_path, **{"from": str(write_model(tmp_path / "b", rows=200))})
    with pytest.raises(SpecError, match=r"has 259 tokens, and the embedding of model\.from .* has 200 rows"):
        load_spec(path)


def test_conversations_end_with_the_token_that_the_template_ends_turns_with(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", template=TEMPLATE)
    path = write_spec(tmp_path, **{"from": str(folder)})
    chat = ("data.kind=chat", "data.document_masks=true")
    assert load_spec(path, chat).data.tokenizer.end_of_text == "<end_of_turn>"
    assert load_spec(path).data.tokenizer.end_of_text == "<eos>"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="there is no chat template in"):
        load_spec(path, chat)


def test_a_wrong_key_of_the_data_is_the_only_problem_of_a_spec_that_names_a_model(tmp_path: Path) -> None:
    path = write_spec(tmp_path, **{"from": str(write_model(tmp_path / "base", template=TEMPLATE))})
    chat = ("data.kind=chat", "data.document_masks=true", "data.shufle=1")
    with pytest.raises(SpecError) as error:
        load_spec(path, chat)
    assert [problem.field for problem in error.value.problems] == ["data.shufle"]


def test_a_reward_model_gives_its_head(tmp_path: Path) -> None:
    scalar = config(shape_of("qwen3").model_copy(update={"head": "scalar"}), 259, end_id=0)
    folder = write_model(tmp_path / "base", template=TEMPLATE, **scalar)
    pairs = ("data.kind=preferences", "data.document_masks=true")
    assert load_spec(write_spec(tmp_path, **{"from": str(folder)}), pairs).model.head == "scalar"


def test_an_export_of_a_run_gives_its_context_and_end_of_documents(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", holdfast={"context": 48, "end_of_text_id": 2})
    spec = load_spec(write_spec(tmp_path, **{"from": str(folder)}))
    assert (spec.model.context, spec.data.tokenizer.end_of_text) == (48, "<end_of_turn>")


@pytest.mark.parametrize(
    ("changes", "missing", "error", "message"),
    [
        ({"model_type": "mamba"}, "", DataError, "model_type is 'mamba'"),
        ({"hidden_act": "relu"}, "", DataError, "hidden_act is 'relu'"),
        ({}, "config.json", MissingError, "has no config.json; name a folder"),
        ({}, "tokenizer.json", MissingError, "has no tokenizer.json; save"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_by_key_value_and_remedy(
    tmp_path: Path, changes: dict[str, Any], missing: str, error: type[Exception], message: str
) -> None:
    folder = write_model(tmp_path / "base", **changes)
    if missing:
        (folder / missing).unlink()
    with pytest.raises(error, match=message):
        load_spec(write_spec(tmp_path, **{"from": str(folder)}))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"model\.from: \S*gone is no folder; name a folder"):
        load_spec(write_spec(tmp_path, **{"from": str(tmp_path / "gone")}))


def test_a_missing_model_is_reported_with_every_refused_field(tmp_path: Path) -> None:
    gone = str(tmp_path / "a; b: gone")
    path = write_spec(tmp_path, **{"from": gone, "layers": -1})
    with pytest.raises(SpecError) as caught:
        load_spec(path, ["training.steps=0", "training.optimizer.learning_rat=1"])
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["model.from", "model.layers", "training.steps", "training.optimizer.learning_rat"]
    first = caught.value.problems[0]
    assert (first.value, first.message) == (gone, "is no folder")
    assert first.remedy.startswith("name a folder") and first.place


def test_a_missing_tokenizer_is_reported_with_every_refused_field(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a; b")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(tmp_path, **{"from": str(folder)}), ["training.steps=0"])
    first, second = caught.value.problems
    assert (first.field, first.value, first.message) == ("model.from", str(folder), "has no tokenizer.json")
    assert first.remedy.startswith("save the model's fast tokenizer") and second.field == "training.steps"


def test_a_repository_that_the_hub_lacks_is_reported_with_every_refused_field(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(tmp_path, **{"from": "hf://tiny/gone"}), ["training.steps=0"])
    first, second = caught.value.problems
    assert (first.field, first.value, second.field) == ("model.from", "hf://tiny/gone", "training.steps")
    assert first.message == "is missing: the Hub has no such repository or revision"
    assert first.remedy == "check the name, and whether HF_TOKEN may see it"


@pytest.mark.usefixtures("s3_endpoint")
def test_a_bucket_that_does_not_exist_is_reported_with_every_refused_field(tmp_path: Path) -> None:
    gone = "s3://holdfast-has-no-such-bucket/base"
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(tmp_path, **{"from": gone}), ["training.steps=0"])
    first, second = caught.value.problems
    assert (first.field, first.value, second.field) == ("model.from", gone, "training.steps")
    assert first.message == "is in a bucket that does not exist"
    assert first.remedy.startswith("name a folder in the Hugging Face layout")


def test_a_step_refuses_a_spec_that_names_a_model_instead_of_its_fields(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)model\.from: is replaced by fields .*`holdfast run`"):
        parse_spec(write_spec(tmp_path, **{"from": "base"}).read_text())


def test_a_model_of_the_hub_is_pinned_to_the_commit_that_was_read(tmp_path: Path, hub: Hub) -> None:
    spec = load_spec(write_spec(tmp_path, **{"from": "hf://tiny/llama"}))
    assert spec.model.init_from == f"hf://tiny/llama@{COMMIT}"
    assert spec.data.tokenizer.path == f"hf://tiny/llama@{COMMIT}/tokenizer.json"
    assert (spec.model.hidden, spec.model.context) == (32, 32)
    assert weights_digest(spec.model.init_from) == weights_digest("hf://tiny/llama")
    assert not any(request.endswith(".safetensors") for request in hub.requests)


def test_a_model_in_a_bucket_is_read_there(tmp_path: Path, s3_url: str) -> None:
    folder = write_model(tmp_path / "base")
    store = open_store(f"{s3_url}/base")
    for file in folder.iterdir():
        store.put(file.name, file.read_bytes())
    spec = load_spec(write_spec(tmp_path, **{"from": f"{s3_url}/base/"}))
    assert spec.model.init_from == f"{s3_url}/base"
    assert fixed_fields(spec.model) == fixed_fields(shape_of("qwen3"))


def test_validate_prints_what_was_filled_in_and_the_api_reads_the_same_spec(tmp_path: Path) -> None:
    path = write_spec(tmp_path, **{"from": str(write_model(tmp_path / "base")), "context": 64})
    text = CliRunner().invoke(app, ["validate", str(path)]).output
    assert "filled in by model.from:\n  " in text
    assert 'model.init_from: "' in text
    assert "model.hidden: 32" in text
    assert "model.context" not in text
    assert json.loads(CliRunner().invoke(app, ["validate", str(path), "--json"]).output)["filled"]["model.heads"] == 4
    assert api_load_spec(path) == load_spec(path)
    assert write_fields(path, {"training.micro_batch": 4}) == ["training.micro_batch: 4"]
    assert "from:" in path.read_text()


def written_out(tmp_path: Path, place: str) -> Path:
    shape = shape_of("qwen3").model_dump(mode="json", exclude_unset=True)
    return write_spec(tmp_path, **{**shape, "init_from": place})


def test_a_directly_named_start_is_compared_with_its_config_when_the_spec_is_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base")
    path = written_out(tmp_path, f"file://{folder}")
    load_spec(path)
    rows = f"data.tokenizer={{kind: file, path: {folder}/tokenizer.json, end_of_text: <eos>, rows: 300}}"
    with pytest.raises(SpecError) as refused:
        load_spec(path, ["model.hidden=64", "model.ffn=48", rows])
    found = {problem.field: (problem.value, problem.remedy, problem.place) for problem in refused.value.problems}
    assert found["model.hidden"] == (64, "write hidden: 32", "--set")
    assert found["model.ffn"] == (48, "write ffn: 40", "--set")
    assert found["data.tokenizer.rows"] == (300, "write rows: 259", "--set")
    write_model(folder, hidden_act="relu")
    with pytest.raises(DataError, match=r"config\.json: hidden_act is 'relu'"):
        load_spec(path)
    load_spec(written_out(tmp_path, "/only/in/pods"))  # the train step checks it


@pytest.mark.usefixtures("hub")
def test_a_start_on_the_hub_is_compared_when_the_run_is_identified(tmp_path: Path) -> None:
    from holdfast.corpus.starting_model import require_start

    spec = load_spec(written_out(tmp_path, f"hf://tiny/llama@{COMMIT}"), ["model.hidden=64"])
    with pytest.raises(SpecError, match=r"(?s)model\.hidden: is 32 in the weights.*write hidden: 32"):
        require_start(spec)
