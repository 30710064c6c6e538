"""Downstream tasks: the library's own figures for the same model, and no code of a task file runs."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from blake3 import blake3
from tokenizers import Tokenizer
from torch.utils import collect_env

from holdfast.scoring.task_configs import DEFAULT_METRICS, LOWER_IS_BETTER, METRICS, PASSED_TESTS
from holdfast.scoring.task_files import DATA_BYTES, Content, find_task, require_tasks
from holdfast.scoring.task_model import likelihoods
from holdfast.scoring.tasks import score_tasks
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.operations import Task
from tests.model.tiny_model import decoder, export, shape, tokenizer_json

CHOICES: dict[str, Any] = {
    "task": "continue", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "continue.jsonl"}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"question": "the quick brown", "choices": [" fox", " dog", " äöü ß € over the lazy"], "answer": place % 3}
    | {"question": ("the quick " * (place % 9))[: -1 - place % 2] or "return"}
    for place in range(24)
]


def write(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> Task:
    (folder / "continue.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(yaml.safe_dump(config))
    return Task(uri=f"{folder}/task.yaml")


def test_the_figures_are_those_of_the_librarys_own_model_of_the_export(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    built = decoder(shape(context=32))
    export(tmp_path / "export", built)
    reference = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tmp_path / "export"),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "export"), batch_size=3, max_length=32, device="cpu",
    )  # fmt: skip
    tokenizer = Tokenizer.from_str(tokenizer_json())
    pairs = [
        (tokenizer.encode(row["question"]).ids, tokenizer.encode(choice).ids)
        for row in ROWS
        for choice in row["choices"]
    ]
    # Of some, only the end is read.
    assert max(len(context) + len(continuation) for context, continuation in pairs) > 33
    progress: list[tuple[int, int]] = []
    actual = list(likelihoods(built, pairs, lambda done, total: progress.append((done, total))))
    expected = reference._loglikelihood_tokens([(("", ""), *pair) for pair in pairs], disable_tqdm=True)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert [nats for nats, _ in actual] == pytest.approx([nats for nats, _ in expected], rel=2e-6)
    assert progress[-1] == (len(pairs), len(pairs))


def test_a_task_has_one_figure_from_local_files_and_runs_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[object] = []  # of the library's description of the environment

    def run(command: object) -> tuple[int, str, str]:
        commands.append(command)
        return 1, "", ""

    monkeypatch.setattr(collect_env, "run", run)
    built, tokenizer = decoder(shape(context=64)), Tokenizer.from_str(tokenizer_json())
    task = find_task(write(tmp_path, CHOICES))
    (score,) = score_tasks(built, tokenizer, [task])
    assert not commands
    assert (score.task, score.metric, score.examples, score.higher_is_better) == ("continue", "acc", 24, True)
    right = 0
    for row in ROWS:
        parts = [
            (tokenizer.encode(row["question"]).ids, tokenizer.encode(f" {choice}").ids) for choice in row["choices"]
        ]
        nats = [value for value, _ in likelihoods(built, parts)]
        right += nats.index(max(nats)) == row["answer"]
    assert score.value == right / 24
    (part,) = score_tasks(built, tokenizer, [find_task(task.task.model_copy(update={"examples": 5, "shots": 1}))])
    assert part.examples == 5
    assert score_tasks(built, tokenizer, [task]) == (score,)


def test_generated_and_whole_texts_are_scored_too(tmp_path: Path) -> None:
    built, tokenizer = decoder(shape(context=64)), Tokenizer.from_str(tokenizer_json())
    rows = [{"text": "the quick brown fox jumps over the lazy dog " * 9}, {"text": "return a + b"}]
    base = {key: CHOICES[key] for key in ("task", "dataset_path", "dataset_kwargs", "test_split")}
    rolling = {**base, "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
               "metric_list": [{"metric": "bits_per_byte"}]}  # fmt: skip
    task = write(tmp_path, rolling, rows).model_copy(update={"metric": "bits_per_byte"})
    (whole,) = score_tasks(built, tokenizer, [find_task(task)])
    assert not whole.higher_is_better and 0 < whole.value < 20
    settings = {**base, "output_type": "generate_until", "doc_to_text": "the quick", "doc_to_target": "",
             "generation_kwargs": {"until": ["\n", "o"], "do_sample": False, "max_gen_toks": 4},
             "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    task = write(tmp_path, settings, rows).model_copy(update={"metric": "exact_match"})
    (score,) = score_tasks(built, tokenizer, [find_task(task)])
    assert score.value == 0.0


def test_the_digest_of_a_task_follows_its_content(tmp_path: Path) -> None:
    digests = {find_task(write(tmp_path, CHOICES)).digest}
    digests.add(find_task(write(tmp_path, CHOICES, ROWS[:-1])).digest)
    digests.add(find_task(write(tmp_path, {**CHOICES, "doc_to_text": "{{question}}?"})).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_path": "hellaswag"}, "local data are read by one of json"),
        ({"include": "../base.yaml"}, "only files in the folder of the task"),
        ({"include": "task.yaml"}, r"task\.yaml includes task\.yaml, which includes"),
        ({"fewshot_config": {"samples": "!x"}}, "fewshot_config may have sampler, split only"),
        ({"dataset_kwargs": {"data_files": {"test": "../secret.jsonl"}}}, "must lie next to the task file"),
        ({"dataset_kwargs": {"data_files": "https://example.com/a.jsonl"}}, "must lie next to the task file"),
        (
            {"dataset_kwargs": {"data_files": "continue.jsonl", "trust_remote_code": True}},
            "data_files, and nothing else",
        ),
        ({"metric_list": [{"metric": "another/theirs"}]}, "is none of the library's own"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "is none of the library's own"),
        ({"dataset_kwargs": {"data_files": None}}, "data_files, and nothing else"),
        ({"task": None}, "has no `task`"),
    ],
)
def test_a_task_that_fetches_or_runs_other_code_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        find_task(write(tmp_path, {**CHOICES, **changes}))


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ("1000000000000", "1000000000000"),
        (f"0x{'f' * 5000}", "a number with too many digits"),
        ("65", "65"),
        ("0", "0"),
        ("'9'", "'9'"),
        ("true", "True"),
        ("null", "None"),
    ],
    ids=["huge", "unprintable", "above", "zero", "text", "bool", "null"],
)
def test_a_task_cannot_want_answers_beyond_the_context_of_the_model(tmp_path: Path, tokens: str, shown: str) -> None:
    task = write(tmp_path, {**CHOICES, "generation_kwargs": {"max_gen_toks": "TOKENS"}})
    path = Path(task.uri)
    path.write_text(path.read_text().replace("TOKENS", tokens))
    built, tokenizer = decoder(shape(context=64)), Tokenizer.from_str(tokenizer_json())
    for check in (
        lambda: require_tasks([task], 64),
        lambda: score_tasks(built, tokenizer, [find_task(task)]),
    ):
        with pytest.raises(DataError, match=rf"max_gen_toks is {shown}; use a whole number from 1 to 64, the model's"):
            check()


def test_python_of_a_task_file_is_not_run(tmp_path: Path) -> None:
    task = write(tmp_path, CHOICES)
    path = Path(task.uri)
    path.write_text(path.read_text() + "process_docs: !function utils.process\n")
    with pytest.raises(DataError, match="`!function` runs Python that the file brings"):
        find_task(task)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ question.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ question * 1000000000 }}", r"task\.yaml: rendering a record .* takes more than"),
    ],
)
def test_a_template_reaches_neither_the_process_nor_its_memory(tmp_path: Path, template: str, words: str) -> None:
    task = find_task(write(tmp_path, {**CHOICES, "doc_to_text": template}))
    with pytest.raises(DataError, match=words):
        score_tasks(decoder(shape()), Tokenizer.from_str(tokenizer_json()), [task])


def test_a_missing_metric_or_file_of_a_task_is_reported(tmp_path: Path) -> None:
    task = write(tmp_path, CHOICES)
    built, tokenizer = decoder(shape()), Tokenizer.from_str(tokenizer_json())
    with pytest.raises(DataError, match="has no metric 'f1'; it has acc"):
        score_tasks(built, tokenizer, [find_task(task.model_copy(update={"metric": "f1"}))])
    (tmp_path / "continue.jsonl").unlink()
    with pytest.raises(MissingError, match=r"there is no data file continue.jsonl"):
        find_task(task)
    with pytest.raises(MissingError, match=r"there is no task file .*other.yaml"):
        find_task(Task(uri=f"{tmp_path}/other.yaml"))


def test_data_that_change_between_looking_and_fetching_are_refused(tmp_path: Path) -> None:
    built, tokenizer = decoder(shape(context=64)), Tokenizer.from_str(tokenizer_json())
    task = find_task(write(tmp_path, CHOICES))
    data = tmp_path / "continue.jsonl"
    before = data.read_bytes()
    data.write_bytes(before.replace(b"quick", b"quiet"))
    with pytest.raises(DataError, match=r"continue\.jsonl has changed since the evaluation began"):
        score_tasks(built, tokenizer, [task])
    data.write_bytes(before + before)  # later additions are not read
    (score,) = score_tasks(built, tokenizer, [task])
    assert score.examples == len(ROWS)


def test_data_of_any_size_are_looked_at_in_little_memory_and_too_many_are_refused_unread(tmp_path: Path) -> None:
    task = write(tmp_path, CHOICES)
    with (tmp_path / "continue.jsonl").open("ab") as file:
        file.truncate(64 * 2**20)
    tracemalloc.start()
    try:
        found_task = find_task(task)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * 2**20
    content = found_task.contents["continue.jsonl"]
    assert content == Content(64 * 2**20, blake3((tmp_path / "continue.jsonl").read_bytes()).hexdigest())
    half = DATA_BYTES // 2 + 1
    for name in ("one.jsonl", "two.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(half)  # holes take no disk space
    config = {**CHOICES, "dataset_kwargs": {"data_files": {"test": ["one.jsonl", "two.jsonl"]}}}
    with pytest.raises(DataError, match=f"its data have {2 * half:,} bytes"):
        find_task(write(tmp_path, config))


def test_the_metrics_of_tasks_are_those_of_the_library() -> None:
    from lm_eval.api import registry

    registry.get_metric("acc")  # imports its own metrics first
    assert {name: list(names) for name, names in DEFAULT_METRICS.items()} == registry.DEFAULT_METRIC_REGISTRY
    lower = {name for name in METRICS if name != PASSED_TESTS and not registry.is_higher_better(name)}
    assert lower == set(LOWER_IS_BETTER)
