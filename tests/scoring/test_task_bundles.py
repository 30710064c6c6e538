"""Bundles of tasks, tasks in turns and tests of code: the figures of the library, from files alone."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer

from holdfast.corpus.chat import ChatTemplate
from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate, sample
from holdfast.runtime.logs import log
from holdfast.scoring.task_files import find_task
from holdfast.scoring.task_model import library_model, likelihoods
from holdfast.scoring.tasks import _library_tasks, score_tasks
from holdfast.spec.errors import DataError, UnhealthyNodeError
from holdfast.spec.operations import Task
from tests.model.tiny_model import decoder, shape, tokenizer_json
from tests.scoring.task_bundle import BASE, bundle

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    {},
)


def scored(task: Task, **options: Any) -> Any:
    (score,) = score_tasks(decoder(shape(context=64)), tokenizer(), [find_task(task)], **options)
    return score


def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def test_a_group_is_the_mean_of_its_questions(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    group = scored(task)
    parts = [scored(Task(uri=f"{tmp_path}/flat-{name}.yaml")) for name in flattened(tmp_path)]
    assert [part.examples for part in parts] == [6, 3]
    assert (group.task, group.examples, group.higher_is_better) == ("mmlu", 9, True)
    assert group.value == pytest.approx(sum(part.value * part.examples for part in parts) / 9, abs=1e-12)


def test_data_may_be_in_folders_of_any_name(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    (tmp_path / "deep").rename(tmp_path / "index")
    manager, wanted = _library_tasks(find_task(task), tmp_path / "local")
    assert wanted == "mmlu" and {"mmlu_law", "mmlu_algebra"} <= set(manager.all_tasks)


def flattened(folder: Path) -> list[str]:
    """The same tasks as whole files without `include`."""
    for name in ("algebra", "law"):
        task = {**BASE, "task": name, "dataset_kwargs": {"data_files": {"test": f"deep/{name}.jsonl"}}}
        (folder / f"flat-{name}.yaml").write_text(yaml.safe_dump(task))
    return ["algebra", "law"]


def test_the_digest_covers_every_file_that_takes_part_and_no_other(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    first = find_task(task)
    assert set(first.contents) == {"deep/algebra.jsonl", "deep/law.jsonl"}
    (tmp_path / "unused.yaml").write_text("task: unused\n")
    assert find_task(task).digest == first.digest
    digests = {first.digest}
    for name in ("_base.yaml", "deep/law.yaml", "deep/law.jsonl", "mmlu.yaml"):
        path = tmp_path / name
        path.write_text(path.read_text() + "\n")
        digests.add(find_task(task).digest)
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": ["hellaswag"]}, "no file in its folder has the task or group 'hellaswag'"),
        ({"task": [{"task": "mmlu_law", "dataset_path": "hellaswag"}]}, "name a task, a group or a tag"),
        ({"dataset_path": "hellaswag"}, "sets `dataset_path`; set it in the files of its tasks"),
        ({"aggregate_metric_list": [{"metric": "f1"}]}, "has no metric 'acc'; it has f1"),
        ({"aggregate_metric_list": "acc"}, "list entries with `metric`"),
        ({"task": []}, "the group has no task"),
    ],
)
def test_a_group_that_would_fetch_something_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    task = bundle(tmp_path)
    path = tmp_path / "mmlu.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    with pytest.raises(DataError, match=words):
        find_task(task)


@pytest.mark.parametrize("multiturn", [True, False])
def test_a_task_in_turns_asks_through_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, multiturn: bool
) -> None:
    bundle(tmp_path)
    flattened(tmp_path)
    task = Task(uri=f"{tmp_path}/flat-law.yaml", shots=2, chat_template=True, system="Be short.",
                fewshot_as_multiturn=multiturn)  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "deep/law.jsonl").read_text().splitlines()]
    texts = [f"{row['question']}\nAnswer:" for row in rows]
    built, tokens = decoder(shape(context=256)), tokenizer()
    right, prompts = 0, []
    for number, row in enumerate(rows):
        shots = [place for place in range(3) if place != number]  # without the question itself
        prompt = "<|system|>Be short.<|end|>"
        if multiturn:
            for place in shots:
                prompt += f"<|user|>{texts[place]}<|end|><|assistant|>{'AB'[rows[place]['answer']]}<|end|>"
            prompt += f"<|user|>{texts[number]}<|end|><|assistant|>"
        else:
            solved = "".join(f"{texts[place]} {'AB'[rows[place]['answer']]}\n\n" for place in shots)
            prompt += f"<|user|>{solved}{texts[number]}<|end|><|assistant|>"
        context = tokens.encode(prompt).ids
        prompts += [context, context]
        nats = [value for value, _ in likelihoods(built, [(context, tokens.encode(choice).ids) for choice in "AB"])]
        right += nats.index(max(nats)) == row["answer"]
    read: list[list[int]] = []

    def recorded(model: Decoder, requests: Any, progress: Any) -> Any:
        read.extend(context for context, _ in requests)
        return likelihoods(model, requests, progress)

    monkeypatch.setattr("holdfast.scoring.task_model.likelihoods", recorded)
    (score,) = score_tasks(built, tokens, [find_task(task)], TEMPLATE)
    assert [tokens.decode(context) for context in read] == [tokens.decode(context) for context in prompts]
    assert score.value == right / 3


def test_how_the_model_is_asked_is_part_of_the_digest(tmp_path: Path) -> None:
    plain = bundle(tmp_path)
    asked: list[dict[str, object]] = [
        {}, {"chat_template": True}, {"chat_template": True, "system": "x"}, {"filter": "none"},
        {"chat_template": True, "fewshot_as_multiturn": False},
    ]  # fmt: skip
    assert len({find_task(plain.model_copy(update=changes)).digest for changes in asked}) == len(asked)


def test_a_task_in_turns_needs_a_template(tmp_path: Path) -> None:
    task = bundle(tmp_path).model_copy(update={"chat_template": True})
    with pytest.raises(DataError, match="the model has no chat template; set chat_template: false"):
        scored(task)


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    """Let the model answer the prompts with these texts."""
    monkeypatch.setattr(
        "holdfast.scoring.task_model.generate", lambda _decoder, _tokenizer, prompt, **_: answers[prompt]
    )


def code_task(folder: Path) -> tuple[Task, list[str]]:
    """A task of four functions with tests, and its prompts."""
    rows = [{"prompt": f"def f{number}(x):\n", "test": f"assert f{number}(2) == 4", "number": number}
            for number in range(4)]  # fmt: skip
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": "code", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "code.jsonl"}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{prompt}}<answer>\n{{test}}",
        "generation_kwargs": {"until": ["\nclass"], "do_sample": False},
        "metric_list": [{"metric": "pass_at_1"}],
    }  # fmt: skip
    (folder / "code.yaml").write_text(yaml.safe_dump(config))
    prompts = [str(row["prompt"]) for row in rows]
    return Task(uri=f"{folder}/code.yaml", metric="pass_at_1"), prompts


def test_code_of_answers_runs_with_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, prompts = code_task(tmp_path)
    answering(monkeypatch, {
        prompts[0]: "    return x * 2\nclass X: syntax error",  # continues the prompt
        prompts[1]: "Here:\n```python\ndef f1(x):\n    return x + x\n```\nDone.",  # a block replaces it
        prompts[2]: "    return 5",
        prompts[3]: "    import sys; sys.exit(0)",
    })  # fmt: skip
    score = scored(task)
    assert (score.value, score.examples, score.higher_is_better) == (0.5, 4, True)


@pytest.mark.slow
def test_a_timeout_of_tests_is_a_wrong_answer_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task, prompts = code_task(tmp_path)
    answering(
        monkeypatch, dict.fromkeys(prompts, "    return x * 2") | {prompts[1]: "    pass\nimport time\ntime.sleep(99)"}
    )
    monkeypatch.setattr(log, "propagate", True)
    assert scored(task).value == 0.75
    assert "1 of 4 answers took more than 10 s with their tests; they count as wrong" in caplog.text


@pytest.mark.parametrize("broken", ["worker", "start", "fork"])
def test_tests_that_cannot_run_are_no_wrong_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    task, prompts = code_task(tmp_path)
    answer = "    return 1\nimport os\nos.kill(os.getppid(), 9)" if broken == "worker" else "    return x * 2"
    answering(monkeypatch, dict.fromkeys(prompts, answer))
    if broken == "start":
        (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr("holdfast.rewards.process.sys.executable", str(tmp_path / "python"))
    if broken == "fork":
        monkeypatch.setattr("holdfast.rewards.process.sys.executable", str(tmp_path / "none"))
    with pytest.raises(
        UnhealthyNodeError, match=r"evaluation\.tasks: the process that runs the tests of pass_at_1 failed"
    ):
        scored(task)


def test_the_number_of_an_answer_counts_by_the_filter_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "one", "answer": "so\n#### 1,200"}, {"question": "two", "answer": "#### 7"}]
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    number = {"function": "regex", "group_select": -1, "regex_pattern": "(-?[0-9.,]+)"}
    strict = {"function": "regex", "regex_pattern": "#### (-?[0-9.,]+)"}
    config = {
        "task": "gsm", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "gsm.jsonl"}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "Question: {{question}}",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}", "generation_kwargs": {"until": ["Question:"]},
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [","]}],
        "filter_list": [{"name": name, "filter": [pattern, {"function": "take_first"}]}
                        for name, pattern in (("flexible", number), ("strict", strict))],
    }  # fmt: skip
    (tmp_path / "gsm.yaml").write_text(yaml.safe_dump(config))
    answering(monkeypatch, {"Question: one": "600 + 600 is 1200", "Question: two": "#### 7\nQuestion: #### 8"})
    task = Task(uri=f"{tmp_path}/gsm.yaml", metric="exact_match")
    values = {name: scored(task.model_copy(update={"filter": name})).value for name in (None, "flexible", "strict")}
    assert values == {None: 0.5, "flexible": 1.0, "strict": 0.5}
    with pytest.raises(DataError, match="has no metric 'exact_match' of filter 'other'"):
        scored(task.model_copy(update={"filter": "other"}))


def test_an_answer_ends_where_the_template_ends_a_turn() -> None:
    built, tokens = decoder(shape(context=64)), tokenizer()
    request = Instance("generate_until", {}, ("the quick", {"until": [], "max_gen_toks": 12}), 0)
    whole = library_model(built, tokens, lambda *_: None).generate_until([request])[0]
    letter = next(letter for letter in reversed(whole) if letter.isalpha())
    template = ChatTemplate("{% for m in messages %}{{ m.content }}" + letter + "{% endfor %}", {})
    (ended,) = library_model(built, tokens, lambda *_: None, template).generate_until([request])
    assert ended == whole.partition(letter)[0] and ended != whole
    prompt = tokens.encode("the quick").ids
    ids = list(islice(sample(built, prompt, temperature=0, seed=0), 12))
    cut = generate(built, tokens, "the quick", tokens=12, temperature=0, ends=(ids[5],))
    assert tokens.decode(prompt + ids[: ids.index(ids[5])]) == "the quick" + cut
