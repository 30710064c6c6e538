"""No function has more parameters than a reader can remember: related options are one typed object."""

import ast
from collections.abc import Iterator
from pathlib import Path

MOST = 8
LIBRARY = Path(__file__).parents[2] / "holdfast"
MIRRORS = {  # functions whose parameters another interface dictates
    "components/notify/__main__.py:body": "the inputs of the step's component",
    "pipelines/cli/audit.py:replay": "the options of the command",
    "pipelines/cli/kubeflow.py:schedule": "the options of the command",
}


def _wide(node: ast.AST, method: bool = False) -> Iterator[tuple[str, int]]:
    """The functions below `node` with too many parameters, and their number."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = child.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len(names) - (method and names[:1] in (["self"], ["cls"]))
            count += (arguments.vararg is not None) + (arguments.kwarg is not None)
            if count > MOST:
                yield child.name, count
        yield from _wide(child, isinstance(child, ast.ClassDef))


def test_no_function_has_more_than_eight_parameters() -> None:
    files = (path for path in LIBRARY.rglob("*.py") if "__pycache__" not in path.parts)
    places = {
        f"{path.relative_to(LIBRARY).as_posix()}:{name}": count
        for path in files
        for name, count in _wide(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {place: count for place, count in places.items() if place not in MIRRORS} == {}, "group them in a dataclass"


def test_all_parameters_are_counted_but_self() -> None:
    text = "class A:\n def m(self, a, /, b, *c, d, e, f, g, h, **i): ...\n def n(self, a, b, c, d, e, f, g, h): ...\n"
    assert dict(_wide(ast.parse(text))) == {"m": 9}
