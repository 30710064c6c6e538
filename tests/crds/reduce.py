"""The official schemas of the kinds that Holdfast emits, without descriptions: what tests check against.

`python -m tests.crds.reduce FOLDER` writes the files of this folder from the CustomResourceDefinitions (*.yaml) and
Argo's JSON Schema (argo-workflows.schema.json) that their projects publish: Kubeflow's training operator (PyTorchJob)
and trainer, Volcano, Kueue, and Argo Workflows with Events. Each definition has the version of its generator. Defaults
that are paths are left out: Holdfast emits none of those fields, and a default decides nothing that is checked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

WORDS = {"description", "title", "example"}
BY_NAME = {"properties", "definitions", "patternProperties"}  # hold schemas under names of the kind's own


def without_words(node: Any, *, by_name: bool = False) -> Any:
    """A schema without what only people read, and without defaults that are paths."""
    if isinstance(node, dict):
        return {
            key: without_words(value, by_name=key in BY_NAME and not by_name)
            for key, value in node.items()
            if by_name or (key not in WORDS and not _is_default_path(key, value))
        }
    return [without_words(one) for one in node] if isinstance(node, list) else node


def _is_default_path(key: str, value: Any) -> bool:
    return key == "default" and isinstance(value, str) and value.startswith("/")


def reduced(definition: dict[str, Any]) -> str:
    """A CustomResourceDefinition as YAML: each schema is one line, the rest is as people write it."""
    spec = definition["spec"]
    annotations = definition["metadata"].get("annotations", {})
    kept = {key: value for key, value in annotations.items() if key.startswith(("controller-gen.", "api-approved."))}
    head = {
        "apiVersion": definition["apiVersion"],
        "kind": definition["kind"],
        "metadata": {"name": definition["metadata"]["name"], "annotations": kept},
        "spec": {key: value for key, value in spec.items() if key not in ("versions", "conversion")},
    }
    lines = [yaml.safe_dump(head, sort_keys=False), "  versions:\n"]
    for version in spec["versions"]:
        for number, (key, value) in enumerate(sorted(version.items(), key=lambda item: item[0] != "name")):
            text = value if key == "name" else json.dumps(without_words(value), separators=(",", ":"))
            lines.append(f"  {'-' if number == 0 else ' '} {key}: {text}\n")
    return "".join(lines)


def main(folder: Path) -> None:
    """Write the files of this folder."""
    here = Path(__file__).parent
    for path in sorted(folder.glob("*.yaml")):
        (definition,) = (one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one)
        (here / path.name).write_text(reduced(definition), encoding="utf-8")
    argo = "argo-workflows.schema.json"
    document = json.loads((folder / argo).read_text(encoding="utf-8"))
    (here / argo).write_text(json.dumps(without_words(document), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
