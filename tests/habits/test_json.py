"""JSON from untrusted sources has one reader: no other code of the product calls `json.loads`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What they read: text whose digest was compared before and whose every failure is caught, what this process or its
# parent wrote, and records of a corpus, where a line that is not JSON is data to be counted.
ELSEWHERE = {
    "holdfast/checkpoint/catalogue.py": "part of an index, under its digest",
    "holdfast/checkpoint/root.py": "the root, whose digest is over the exact text",
    "holdfast/checkpoint/tree.py": "part of a node, under its digest",
    "holdfast/launch/processes.py": "a message of the parent process",
    "holdfast/corpus/chat.py": "records of a corpus",
    "holdfast/corpus/units.py": "records of a corpus",
    "holdfast/corpus/cleaning.py": "records of a corpus",
    "holdfast/corpus/field_maps.py": "records of a corpus",
    "holdfast/corpus/archives.py": "records of a corpus",
    "holdfast/corpus/encode.py": "a tokenizer that was made here",
    "holdfast/corpus/prepare.py": "a template that was made here",
    "holdfast/corpus/record_types.py": "records of a corpus",
    "holdfast/corpus/tokenizer.py": "a tokenizer, with its own words for what is none",
    "holdfast/rendering/chat.py": "records of a corpus, in a child process with limits",
    "holdfast/rendering/process.py": "an answer of the child process of this one",
    "holdfast/rendering/worker.py": "a document of a task, in a child process with limits",
    "holdfast/rewards/builtin.py": "answers of a model, in a child process with limits",
    "holdfast/rewards/worker.py": "requests of the parent process",
    "holdfast/launch/kubernetes/schemas/__init__.py": "a schema in this package",
    # with words or bounds of their own
    "holdfast/launch/node/hang_consensus.py": "what nodes of this gang say to each other",
    "holdfast/model/hugging_face.py": "files of a model",
    "holdfast/model/tensor_files.py": "headers of a model's files, bounded, with their own words",
    "holdfast/components/register/serving_code.py": "a file of the model; Holdfast need not be installed there",
    "holdfast/collectives.py": "objects that torch's collectives carry between the ranks of this gang, bounded",
    "holdfast/simulation/traces.py": "a trace of a cluster",
}


def calls_of_loads(path: Path) -> list[int]:
    """The lines of a module that call json.loads or json.load."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    method_calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return [
        call.lineno
        for call in method_calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("loads", "load")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "json"
    ]


def test_no_module_but_the_reader_calls_json_loads_on_what_others_wrote() -> None:
    by_file = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "holdfast").rglob("*.py"))
        if (lines := calls_of_loads(path))
    }
    assert ELSEWHERE.keys() <= by_file.keys(), "the list names what needs no exception any more"
    assert {path: lines for path, lines in by_file.items() if path not in ELSEWHERE} == {}, (
        "use parse_json of spec/json_parsing.py or read_json of store/json_reading.py"
    )


def test_no_module_takes_the_functions_of_json_by_another_name() -> None:
    for path in (ROOT / "holdfast").rglob("*.py"):
        assert "from json import" not in path.read_text(encoding="utf-8"), path
