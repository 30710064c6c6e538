"""The official schemas of the custom resources that Holdfast emits, as strict as an API server that refuses unknown
fields.

The files of this folder are facts from other projects, all under the Apache License 2.0, reduced to what a check needs
(no descriptions). The projects are Kubeflow's training operator (PyTorchJob) and Trainer, Volcano, Kueue, KServe
(InferenceService, at aaac4e294), KubeRay (RayJob, at feeaf72fa), and Argo Workflows with Events. `python -m
tests.reduce_schemas` writes them.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(__file__).parent
ARGO = "argoproj.io/v1alpha1"

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


def problems(thing: dict[str, Any]) -> list[str] | None:
    """The errors of a Kubernetes object by the schema of its kind, each with the path of the field. None without such a
    schema."""
    validator = _validator_of(thing)
    if validator is None:
        return None
    errors = sorted(validator.iter_errors(thing), key=lambda error: [str(part) for part in error.absolute_path])
    return [f"{'.'.join(map(str, error.absolute_path)) or '(object)'}: {error.message[:500]}" for error in errors]


def validate(thing: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError if a Kubernetes object breaks the schema of its kind, has unknown fields, or is
    of a kind without a schema."""
    validator = _validator_of(thing)
    if validator is None:
        raise jsonschema.ValidationError(f"{thing.get('apiVersion')} {thing.get('kind')} has no schema in {FOLDER}")
    validator.validate(thing)


def known_kinds() -> set[tuple[str, str]]:
    """Every (apiVersion, kind) of a CustomResourceDefinition in the folder. Kinds of Argo have a schema as well."""
    return set(_files())


def _validator_of(thing: dict[str, Any]) -> jsonschema.Draft202012Validator | None:
    api_version, kind = str(thing.get("apiVersion")), str(thing.get("kind"))
    return _argo(kind) if api_version.startswith("argoproj.io/") else _validator(api_version, kind)


@functools.cache
def _files() -> dict[tuple[str, str], Path]:
    """The file that defines each kind. Only the first lines of each version are looked at, not the schemas."""
    files = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        group = _first(text, "\n  group: ")
        kind = _first(text, "\n    kind: ")
        for line in text.splitlines():
            if line.startswith(("    name: ", "  - name: ")) and line.split()[-1].startswith("v"):
                files[(f"{group}/{line.split()[-1]}", kind)] = path
    return files


def _first(text: str, after: str) -> str:
    return text.partition(after)[2].partition("\n")[0].strip()


@functools.cache
def _validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    path = _files().get((api_version, kind))
    if path is None:
        return None
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=_LIBYAML)  # noqa: S506 - a safe loader
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
        extra = node.get("additionalProperties", node.get("x-kubernetes-preserve-unknown-fields", False))
        schema["additionalProperties"] = closed(extra) if isinstance(extra, dict) else extra
    if node.get("nullable") and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if node.get("x-kubernetes-list-type") == "set":
        schema["uniqueItems"] = True
    return schema


_KEPT = frozenset(
    """
    type enum pattern minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength minItems maxItems
    uniqueItems minProperties maxProperties required multipleOf anyOf allOf oneOf not
    """.split()
)


@functools.cache
def _argo(kind: str) -> jsonschema.Draft202012Validator | None:
    document = json.loads((FOLDER / "argo-workflows.schema.json").read_text(encoding="utf-8"))
    definitions = document["definitions"]
    for schema in definitions.values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["integer", "string"]}
    name = f"io.argoproj.workflow.v1alpha1.{kind}"
    if name not in definitions:
        return None
    schema = {
        "definitions": definitions,
        "$ref": f"#/definitions/{name}",
        "properties": {"apiVersion": {"const": ARGO}},
    }
    return jsonschema.Draft202012Validator(schema)
