"""Fields are written into a spec's file where a user would write them, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.pipelines.documents import write_fields

HEAD = "name: a\nstore: s3://b/c\ndata: {sources: [{uri: x}]}\n"


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("training:\n  micro_batch: 2  # mine\n\n# end\n", {"training.micro_batch": 4},
         "training:\n  micro_batch: 4  # mine\n\n# end\n"),
        ("training:\n  steps: 9  # few\n\n# end\n", {"training.micro_batch": 4},
         "training:\n  steps: 9  # few\n  micro_batch: 4\n\n# end\n"),
        ("cluster: {nodes: {min: 1}}  # here\n", {"cluster.nodes.min": 2, "cluster.nodes.max": 2},
         "cluster: {nodes: {min: 2, max: 2}}  # here\n"),
        ("cluster:\n  queue: q\n  scheduler: volcano\n", {"cluster.nodes.min": 2, "cluster.nodes.max": 2},
         "cluster:\n  queue: q\n  scheduler: volcano\n  nodes: {min: 2, max: 2}\n"),
        ("", {"parallel.processes": 8, "parallel.strategy": "fsdp"}, 
         "\nparallel:\n  processes: 8\n  strategy: fsdp\n"),
        ("training: {steps: 9}", {"training.micro_batch": 4, "parallel.tensor": 1},
         "training: {steps: 9, micro_batch: 4}"),
        ("parallel: {stages: [1, 3]}  # mine\n", {"parallel.stages": [2, 2]},
         "parallel: {stages: [2, 2]}  # mine\n"),
        ("parallel:\n  stages:\n    - 1\n    - 3  # mine\n  tensor: 1\n", {"parallel.stages": None},
         "parallel:\n  stages:\n    null  # mine\n  tensor: 1\n"),
    ],
    ids=["there", "in a block", "in braces", "nodes", "no section", "no end of line, and a default", "a list",
         "a list in lines"],
)  # fmt: skip
def test_a_field_is_written_where_it_belongs(tmp_path: Path, text: str, fields: dict[str, Any], expected: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(HEAD + text)
    write_fields(path, fields, check=False)
    assert path.read_text() == HEAD + expected
    tree = yaml.safe_load(path.read_text())
    for field, value in fields.items():
        node = tree
        for name in field.split("."):
            node = node.get(name, {})
        assert node in (value, {})
    assert write_fields(path, fields, check=False) == []
