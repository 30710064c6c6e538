"""The examples of the pages: the spec accepts each YAML block that a reader may copy."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.spec import Problem, Spec, parse_spec

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REST = {"name": "a", "data": {"sources": [{"uri": "x"}]}, "store": "s3://bucket/prefix"}


def pieces() -> list[object]:
    """The YAML blocks of all pages that are (sections of) a spec."""
    parameters: list[object] = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            read = yaml.safe_load(block)
            if set(read) <= set(Spec.model_fields):
                parameters.append(pytest.param(read, id=f"{page.name} {' '.join(read)}"))
    assert len(parameters) >= 5
    return parameters


@pytest.mark.parametrize("piece", pieces())
def test_spec_fragments_in_pages_are_valid(piece: dict[str, object]) -> None:
    tree = REST | piece
    if "train" in piece:  # a script reads its own data
        del tree["data"]
    parse_spec(yaml.safe_dump(tree), fill=_as_if_read)


def _as_if_read(tree: dict[str, Any]) -> list[Problem]:
    """The fields that follow from the place of a model, without reading it."""
    place = tree["model"].pop("from")
    tree["model"]["init_from"] = place
    tree["data"].setdefault("tokenizer", {"kind": "file", "path": f"{place}/tokenizer.json"})
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_the_code_of_a_page_imports_exist(page: Path) -> None:
    for block in CODE.findall(page.read_text(encoding="utf-8")):
        for imported in (node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)):
            folder = ROOT / str(imported.module).replace(".", "/")
            if imported.module is None or not imported.module.startswith("holdfast"):
                continue
            module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            tokens = set(re.findall(r"\w+", module.read_text(encoding="utf-8")))
            missing = {name.name for name in imported.names if not (folder / f"{name.name}.py").exists()} - tokens
            assert not missing, f"{imported.module} has none of these"
