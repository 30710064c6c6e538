"""JSON that others can write goes through one reader: nothing else of the product calls `json.loads`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What they read: text whose digest was compared before and whose every failure is caught, what this very process or its
# parent wrote, and records of a corpus, where a line that is no JSON is data to be counted.
ELSEWHERE = {
    "components/checkpoint/catalogue.py": "part of an index, under its digest",
    "components/checkpoint/root.py": "the root, whose digest is over the exact text",
    "components/checkpoint/tree.py": "part of a node, under its digest",
    "components/launch/warm.py": "a message of the parent process",
    "components/corpus/chat.py": "records of a corpus",
    "components/corpus/cleaning.py": "records of a corpus",
    "components/corpus/encode.py": "a tokenizer that was made here",
    "components/corpus/prepare.py": "a template that was made here",
    "components/corpus/records.py": "records of a corpus",
    "components/corpus/tokenizer.py": "a tokenizer, with its own words for what is none",
    "components/corpus/units.py": "records of a corpus",
    "components/rendering/chat.py": "records of a corpus, in a child process with limits",
    "components/rendering/process.py": "an answer of the child process of this one",
    "components/rendering/task.py": "a document of a task, in a child process with limits",
    "components/rendering/worker.py": "a message of the parent process",
    # with words or bounds of their own
    "components/launch/node/board.py": "what nodes of this gang say to each other",
    "components/model/hugging_face.py": "files of a model",
    "components/model/tensor_files.py": "headers of a model's files, bounded, with their own words",
    "components/runtime/gang.py": "objects that torch's collectives carry between the ranks of this gang, bounded",
    "components/simulation/traces.py": "a trace of a cluster",
}


def calls_of_loads(path: Path) -> list[int]:
    """The lines of a module that call json.loads or json.load."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("loads", "load")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "json"
    ]


def test_no_module_but_the_reader_calls_json_loads_on_what_others_wrote() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("components", "pipelines")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := calls_of_loads(path))
    }
    assert ELSEWHERE.keys() <= found.keys(), "the list names what needs no exception any more"
    assert {path: lines for path, lines in found.items() if path not in ELSEWHERE} == {}, (
        "use parse_json of spec/json_parsing.py or read_json of store/json_reading.py"
    )


def test_no_module_takes_the_functions_of_json_by_another_name() -> None:
    for folder in ("components", "pipelines"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "from json import" not in path.read_text(encoding="utf-8"), path
