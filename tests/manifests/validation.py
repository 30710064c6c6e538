"""Reports the problems of an object. Custom resources are checked by their official schemas. Built-in kinds are checked
by the typed models of the Kubernetes client, which know the name and type of every field, and the required fields.
"""

import json
import re
from functools import cache
from typing import Any

import jsonschema
from kubernetes import client

from holdfast.launch.kubernetes.schemas import FOLDER, validate

EVENTS = "github.com.argoproj.argo_events.pkg.apis.events.v1alpha1"
# Missing in the JSON Schemas that the Argo project publishes.
WITHOUT_SCHEMA = {"EventBus"}
_SCALARS: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def is_custom(thing: dict[str, Any]) -> bool:
    """Whether Kubernetes itself does not know the kind of the object."""
    group = thing["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group.endswith(".x-k8s.io")


def problems(thing: dict[str, Any]) -> list[str]:
    """All schema violations of the object."""
    if is_custom(thing):
        return _custom(thing)
    messages: list[str] = []
    kind = thing["kind"]
    group, _, version = thing["apiVersion"].rpartition("/")
    names = [f"{version[0].upper()}{version[1:]}{kind}"] + ([f"Core{version.upper()}{kind}"] if not group else [])
    model = next((name for name in names if hasattr(client, name)), None)
    if model is None:
        return [f"{thing['apiVersion']} {kind}: Kubernetes knows no such kind"]
    _check(thing, model, kind, messages)
    return messages


def _check(value: Any, expected: str, where: str, found: list[str]) -> None:
    """Compare a value with a type in the notation of the client's models."""
    if list_type := re.fullmatch(r"list\[(.+)\]", expected):
        if not isinstance(value, list):
            found.append(f"{where}: {value!r} is not a list")
            return
        for index, item in enumerate(value):
            _check(item, list_type[1], f"{where}[{index}]", found)
    elif dict_type := re.fullmatch(r"dict\(str, (.+)\)", expected):
        if not isinstance(value, dict):
            found.append(f"{where}: {value!r} is not a mapping")
            return
        for key, item in value.items():
            # A quantity is a string or a number. Other texts are strings.
            quantity = where.rsplit(".", 1)[-1] in _QUANTITIES and isinstance(item, int)
            if not quantity:
                _check(item, dict_type[1], f"{where}.{key}", found)
    elif expected in _SCALARS:
        if not isinstance(value, _SCALARS[expected]) or (expected != "bool" and isinstance(value, bool)):
            found.append(f"{where}: {value!r} is not of type {expected}")
    elif hasattr(client, expected):
        _model(value, getattr(client, expected), where, found)


_QUANTITIES = {"requests", "limits", "hard", "default", "defaultRequest", "min", "max", "capacity"}


def _model(value: Any, model: Any, where: str, found: list[str]) -> None:
    if not isinstance(value, dict):
        found.append(f"{where}: {value!r} is not an object")
        return
    by_name = {json_name: own for own, json_name in model.attribute_map.items()}
    for key, item in value.items():
        if key not in by_name:
            found.append(f"{where}: {key} is not a field of {model.__name__}")
        elif item is not None:
            _check(item, model.openapi_types[by_name[key]], f"{where}.{key}", found)
    arguments = {by_name[key]: item for key, item in value.items() if key in by_name}
    try:
        model(**arguments)  # its setters refuse missing required values, and values outside an enumeration
    except ValueError as error:
        found.append(f"{where}: {error}")


def _custom(thing: dict[str, Any]) -> list[str]:
    if thing["kind"] in WITHOUT_SCHEMA:
        return []
    if thing["apiVersion"].startswith("argoproj.io/"):
        errors = _argo_events(thing["kind"]).iter_errors(thing)
        return [f"{thing['kind']}{error.json_path[1:]}: {error.message}" for error in errors]
    try:
        validate(thing)
    except jsonschema.ValidationError as error:
        return [f"{thing['kind']}{error.json_path[1:]}: {error.message}"]
    return []


@cache
def _argo_events(kind: str) -> jsonschema.Draft202012Validator:
    """The schema of a kind of Argo Events. It is published for a gRPC gateway, which spells some types differently from
    the API server. This function corrects them.
    """
    definitions = json.loads((FOLDER / "argo-workflows.schema.json").read_text(encoding="utf-8"))["definitions"]
    for schema in definitions.values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    definitions[f"{EVENTS}.K8SResource"] = {"type": "object"}  # the Sensor may create any resource
    definitions[f"{EVENTS}.Amount"] = {"type": ["number", "string"]}
    definitions[f"{EVENTS}.Int64OrString"] = {"type": ["integer", "string"]}
    definitions[f"{EVENTS}.SQSEventSource"]["properties"]["waitTimeSeconds"] = {"type": "integer"}
    definitions[f"{EVENTS}.{kind}"]["properties"] |= {
        "apiVersion": {"const": "argoproj.io/v1alpha1"},
        "kind": {"const": kind},
    }
    return jsonschema.Draft202012Validator({"$ref": f"#/definitions/{EVENTS}.{kind}", "definitions": definitions})
