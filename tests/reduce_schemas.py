"""Writes the official schemas in `holdfast/launch/kubernetes/schemas`.

`python -m tests.reduce_schemas FOLDER` reads the published CustomResourceDefinitions (*.yaml) and Argo's JSON Schema
(argo-workflows.schema.json). Each definition keeps the version of its generator. Descriptions are omitted, and so are
defaults that are paths: Holdfast emits none of those fields, and a default does not affect the checks. Repeated parts
are YAML aliases.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from holdfast.launch.kubernetes.schemas import FOLDER

WORDS = {"description", "title", "example"}
BY_NAME = {"properties", "definitions", "patternProperties"}  # hold schemas under names that the kind chooses


def without_words(node: Any, *, by_name: bool = False) -> Any:
    """A schema without descriptions for people, and without defaults that are paths."""
    if isinstance(node, dict):
        return {
            key: without_words(value, by_name=key in BY_NAME and not by_name)
            for key, value in node.items()
            if by_name or (key not in WORDS and not _is_default_path(key, value))
        }
    return [without_words(item) for item in node] if isinstance(node, list) else node


def _is_default_path(key: str, value: Any) -> bool:
    return key == "default" and isinstance(value, str) and value.startswith("/")


def with_aliases(schemas: list[Any]) -> list[str]:
    """The schemas of one file, each on one line of YAML. A repeated part is an alias of its first occurrence."""
    counts: dict[str, int] = {}

    def count(node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            counts[text] = counts.get(text, 0) + 1
            if counts[text] == 1:
                for inner in node.values():
                    count(inner)

    anchors: dict[str, str] = {}

    def line(node: Any) -> str:
        if not isinstance(node, dict):
            return json.dumps(node, separators=(",", ":"))
        text = json.dumps(node, sort_keys=True)
        anchor = ""
        if counts[text] > 1 and len(text) > 60:
            if text in anchors:
                return f"*{anchors[text]} "
            anchors[text] = f"a{len(anchors)}"
            anchor = f"&{anchors[text]} "
        return anchor + "{" + ",".join(f"{json.dumps(key)}: {line(inner)}" for key, inner in node.items()) + "}"

    for schema in schemas:
        count(schema)
    return [line(schema) for schema in schemas]


def reduced(definition: dict[str, Any]) -> str:
    """A CustomResourceDefinition as YAML: each schema on one line, the rest in block style."""
    spec = definition["spec"]
    annotations = definition["metadata"].get("annotations", {})
    versions = {
        key: value for key, value in annotations.items() if key.startswith(("controller-gen.", "api-approved."))
    }
    head = {
        "apiVersion": definition["apiVersion"],
        "kind": definition["kind"],
        "metadata": {"name": definition["metadata"]["name"], "annotations": versions},
        "spec": {key: value for key, value in spec.items() if key not in ("versions", "conversion")},
    }
    lines = [yaml.safe_dump(head, sort_keys=False), "  versions:\n"]
    fields = [
        ("-" if number == 0 else " ", key, value)
        for version in spec["versions"]
        if version["served"]
        for number, (key, value) in enumerate(sorted(version.items(), key=lambda item: item[0] != "name"))
    ]
    texts = with_aliases([without_words(value) for _, _, value in fields])
    for (mark, key, value), text in zip(fields, texts, strict=True):
        lines.append(f"  {mark} {key}: {value if key == 'name' else text}\n")
    return "".join(lines)


def main(folder: Path) -> None:
    """Write the schema files of the package."""
    for path in sorted(folder.glob("*.yaml")):
        (definition,) = (document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document)
        (FOLDER / path.name).write_text(reduced(definition), encoding="utf-8")
    argo = "argo-workflows.schema.json"
    document = json.loads((folder / argo).read_text(encoding="utf-8"))
    (FOLDER / argo).write_text(json.dumps(without_words(document), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
