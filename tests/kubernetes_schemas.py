"""The official schemas of what Holdfast emits, as strict as an API server that refuses unknown fields.

They lie in `tests/crds`, without descriptions; HOLDFAST_CRDS names a folder with others, such as those of another
version.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(os.environ.get("HOLDFAST_CRDS") or Path(__file__).parent / "crds")

_LIBYAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"},
        "namespace": {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"},
        "labels": {
            "type": "object",
            "propertyNames": {
                "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
            },
            "additionalProperties": {
                "type": "string",
                "pattern": r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
            },
        },
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["apiVersion", "kind", "name", "uid"],
                "additionalProperties": False,
                "properties": {
                    **{name: {"type": "string", "minLength": 1} for name in ("apiVersion", "kind", "name", "uid")},
                    "controller": {"type": "boolean"},
                    "blockOwnerDeletion": {"type": "boolean"},
                },
            },
        },
    },
}


def validate(thing: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError if a Kubernetes object breaks the schema of its kind, or has unknown fields."""
    _validator(str(thing.get("apiVersion")), str(thing.get("kind"))).validate(thing)


def validate_argo(thing: dict[str, Any]) -> None:
    """The same for an object of Argo Workflows."""
    assert thing["apiVersion"] == "argoproj.io/v1alpha1", thing["apiVersion"]
    _argo(f"io.argoproj.workflow.v1alpha1.{thing['kind']}").validate(thing)


def known_kinds() -> set[tuple[str, str]]:
    """Every (apiVersion, kind) that has a schema in the folder."""
    return set(_files())


@functools.cache
def _files() -> dict[tuple[str, str], Path]:
    """Where each kind is defined. The names of the files say it, so that no large file is read in vain."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        group = _first(text, "\n  group: ")
        kind = _first(text, "\n    kind: ")
        for line in text.splitlines():
            if line.startswith(("    name: ", "  - name: ")) and line.split()[-1].startswith("v"):
                found[(f"{group}/{line.split()[-1]}", kind)] = path
    return found


def _first(text: str, after: str) -> str:
    return text.partition(after)[2].partition("\n")[0].strip()


@functools.cache
def _validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    path = _files().get((api_version, kind))
    if path is None:
        raise jsonschema.ValidationError(f"{api_version} {kind} has no schema in {FOLDER}")
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=_LIBYAML)
    (version,) = [
        version for version in document["spec"]["versions"] if version["name"] == api_version.rpartition("/")[2]
    ]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
    schema["properties"]["metadata"] = _METADATA
    return jsonschema.Draft202012Validator(schema)


def closed(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON Schema in which a field that an API server would prune is an error."""
    schema = {key: value for key, value in node.items() if key in _KEPT}
    if node.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        if pattern := schema.pop("pattern", None):
            schema["anyOf"][1]["pattern"] = pattern
        return schema
    if isinstance(node.get("items"), dict):
        schema["items"] = closed(node["items"])
    if "properties" in node:
        schema["properties"] = {name: closed(inner) for name, inner in node["properties"].items()}
    if node.get("type") == "object" or "properties" in node:
        others = node.get("additionalProperties", node.get("x-kubernetes-preserve-unknown-fields", False))
        schema["additionalProperties"] = closed(others) if isinstance(others, dict) else others
    if node.get("nullable") and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if node.get("x-kubernetes-list-type") == "set":
        schema["uniqueItems"] = True
    return schema


_KEPT = {
    "type", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "required", "multipleOf", "anyOf", "allOf",
    "oneOf", "not",
}  # fmt: skip


@functools.cache
def _argo(definition: str) -> jsonschema.Draft202012Validator:
    document = json.loads((FOLDER / "argo-workflows.schema.json").read_text(encoding="utf-8"))
    for schema in document["definitions"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    definitions = document["definitions"]
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["integer", "string"]}
    assert definition in document["definitions"], definition
    return jsonschema.Draft202012Validator({"definitions": definitions, "$ref": f"#/definitions/{definition}"})
