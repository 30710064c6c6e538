"""A small bundle of tasks."""

import json
from pathlib import Path

import yaml

from holdfast.spec.operations import Task

ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
BASE = {
    "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice", "tag": "ours",
    "doc_to_text": "{{question}}\nAnswer:", "doc_to_choice": ["A", "B"], "doc_to_target": "answer",
    "metric_list": [ACC], "fewshot_config": {"sampler": "first_n"}, "fewshot_split": "test",
}  # fmt: skip


def bundle(folder: Path) -> Task:
    """A group in the manner of MMLU: two subjects of 6 and 3 questions that include one base file."""
    (folder / "deep").mkdir(parents=True)
    (folder / "_base.yaml").write_text(yaml.safe_dump(BASE))
    for name, count in (("algebra", 6), ("law", 3)):
        rows = [{"question": f"{name} {'the quick ' * place}", "answer": place % 2} for place in range(count)]
        (folder / "deep" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"include": "../_base.yaml", "task": f"mmlu_{name}",
                "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}  # fmt: skip
        (folder / "deep" / f"{name}.yaml").write_text(yaml.safe_dump(task))
    group = {"group": "mmlu", "task": ["mmlu_law", {"group": "exact", "task": ["ours"]}],
             "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}  # fmt: skip
    (folder / "mmlu.yaml").write_text(yaml.safe_dump(group))
    (folder / "other.yaml").write_text("x: !function utils.x\n")  # belongs to something else
    return Task(uri=f"{folder}/mmlu.yaml")
