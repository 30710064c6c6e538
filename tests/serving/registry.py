"""A Model Registry over real HTTP: its paths, status codes, uniqueness and strictness follow kubeflow/model-registry's
OpenAPI (api/openapi/model-registry.yaml) and handlers (internal/server/openapi, internal/core).
"""

import json
import re
import threading
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.http_server import QuietHandler, running

ROOT = "/api/model_registry/v1alpha3/"
Entry = dict[str, Any]
_BASE: dict[str, type] = {"customProperties": dict, "description": str, "externalId": str}
_MODEL = _BASE | {"owner": str, "state": str, "readme": str, "maturity": str, "language": list, "tasks": list,
                  "provider": str, "logo": str, "license": str, "licenseLink": str, "libraryName": str}  # fmt: skip
_VERSION = _BASE | {"state": str, "author": str}
_ARTIFACT = _BASE | {"artifactType": str, "modelFormatName": str, "modelFormatVersion": str, "storageKey": str,
                     "storagePath": str, "serviceAccountName": str, "uri": str, "state": str}  # fmt: skip
# collection -> fields of an update, fields of a creation only, and required fields
KINDS: dict[str, tuple[dict[str, type], dict[str, type], set[str]]] = {
    "registered_models": (_MODEL, {"name": str}, {"name"}),
    "model_versions": (_VERSION, {"name": str, "registeredModelId": str}, {"name", "registeredModelId"}),
    "model_artifacts": (_ARTIFACT, {"name": str, "id": str}, {"artifactType"}),
}
_STATES = {"registered_models": {"LIVE", "ARCHIVED"}, "model_versions": {"LIVE", "ARCHIVED"},
           "model_artifacts": {"UNKNOWN", "PENDING", "LIVE", "MARKED_FOR_DELETION", "DELETED", "ABANDONED",
                               "REFERENCE"}}  # fmt: skip
_VALUES = {"MetadataStringValue": ("string_value", str), "MetadataDoubleValue": ("double_value", float)}
_ID = re.compile(r"[1-9][0-9]{0,8}")


def refusal(kind: str, body: Entry, creating: bool) -> str:
    """The server's error for a body, or an empty string."""
    update, more, required = KINDS[kind]
    fields = {**update, **(more if creating else {})}
    for name, value in body.items():
        if name not in fields:
            return f"json: unknown field {name!r}"
        if not isinstance(value, fields[name]):
            return f"{name}: {value!r} is no {fields[name].__name__}"
    if creating and required - set(body):
        return f"required field {sorted(required - set(body))} is zero value"
    if body.get("state", "LIVE") not in _STATES[kind]:
        return f"{body['state']} is no state"
    if not _ID.fullmatch(body.get("registeredModelId", "1")):
        return f"{body['registeredModelId']} is no id"
    for name, value in body.get("customProperties", {}).items():
        if value.get("metadataType") not in _VALUES:
            return f"customProperties.{name}: no metadataType"
        key, type_ = _VALUES[value["metadataType"]]
        if set(value) != {"metadataType", key} or not isinstance(value[key], type_):
            return f"customProperties.{name}: {value!r}"
    return ""


class Registry:
    """`with Registry() as registry` serves on 127.0.0.1. Its content is in `entries`, its requests in `requests`."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
        self.requests: list[tuple[str, str]] = []
        self.failing: list[int] = []  # statuses of the next requests, instead of replies
        self.lost: list[str] = []  # methods whose next request is applied without a reply
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        registry = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self) -> None:
                body = json.loads(self.body() or b"null")
                status, answer = registry.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
                if self.command in registry.lost:
                    registry.lost.remove(self.command)
                    self.close_connection = True
                    return
                self.answer(status, answer, Content_Type="application/json")

            do_GET = do_POST = do_PATCH = do_any  # noqa: N815 - the names that http.server looks for

        self._running = running(Handler)
        self.url = self._running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__(None, None, None)

    def answer(self, method: str, path: str, body: Entry | None, authorization: str) -> tuple[int, Entry]:
        """The status and the body."""
        split = urlsplit(path)
        with self._lock:
            self.requests.append((method, split.path.removeprefix(ROOT)))
            if self.failing:
                return self.failing.pop(0), {"code": "", "message": "not now"}
            if self.token and authorization != f"Bearer {self.token}":
                return 401, {"code": "", "message": "no token"}
            parts = split.path.removeprefix(ROOT).split("/")
            if method == "GET":
                return self._find(parts[0] + "s", {name: values[0] for name, values in parse_qs(split.query).items()})
            assert body is not None
            if method == "PATCH":
                return self._patch(parts[0], parts[1], body)
            if len(parts) == 3:  # model_versions/ID/artifacts
                return self._make("model_artifacts", body, parts[1])
            return self._make(parts[0], body, body.get("registeredModelId", ""))

    def _find(self, kind: str, named: dict[str, str]) -> tuple[int, Entry]:
        for entry in self.entries[kind].values():
            if entry["name"] == named["name"] and entry["_parent"] == named.get("parentResourceId", ""):
                return 200, _shown(entry)
        return 404, {"code": "", "message": "not found"}

    def _make(self, kind: str, body: Entry, parent: str) -> tuple[int, Entry]:
        if problem := refusal(kind, body, creating=True):
            return 400, {"code": "", "message": problem}
        above = {"model_versions": "registered_models", "model_artifacts": "model_versions"}.get(kind)
        if above and parent not in self.entries[above]:
            return 404, {"code": "", "message": f"no {above} {parent}"}
        if any((other["name"], other["_parent"]) == (body["name"], parent) for other in self.entries[kind].values()):
            return 409, {"code": "", "message": "already exists"}
        entry = {**body, "id": str(sum(map(len, self.entries.values())) + 1), "_parent": parent}
        self.entries[kind][entry["id"]] = entry
        return 201, _shown(entry)

    def _patch(self, kind: str, id_: str, body: Entry) -> tuple[int, Entry]:
        if id_ not in self.entries[kind]:
            return 404, {"code": "", "message": "not found"}
        if problem := refusal(kind, body, creating=False):
            return 400, {"code": "", "message": problem}
        self.entries[kind][id_].update(body)
        return 200, _shown(self.entries[kind][id_])


def _shown(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name != "_parent"}
