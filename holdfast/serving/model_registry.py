"""A registered version as an entry of a Kubeflow Model Registry: RegisteredModel, ModelVersion, ModelArtifact.

A version has one entry, with concurrent writers and interruptions at any point. Every object is found by its name
first, names are unique on the server, and existing objects are patched. Uses the REST API v1alpha3.
"""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from holdfast.runtime import deadlines
from holdfast.runtime.retry import retried
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import (
    AccessDeniedError,
    ClusterUnreachableError,
    DataError,
    ExitCode,
    HoldfastError,
)
from holdfast.spec.json_parsing import parse_json_object

ROOT = "/api/model_registry/v1alpha3"
TOKEN = "MODEL_REGISTRY_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FOR = "MODEL_REGISTRY_TOKEN_FOR"  # noqa: S105 - the name of a variable
TIMEOUT = urllib3.Timeout(connect=10, read=30)  # seconds
ANSWER_SECONDS = 60.0  # for a whole response
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 6, 0.5, 8.0
LARGEST = 2**20  # bytes of a response
Entry = dict[str, Any]


class RefusedError(HoldfastError):
    """The registry refuses a request: the URL serves another API, or another version of it."""

    exit_code = ExitCode.BAD_SPEC


class _PassingError(Exception):
    """The registry is temporarily unavailable."""


class ModelRegistry:
    """The registry at a URL. A slash at its end is ignored."""

    def __init__(self, url: str, author: str) -> None:
        self._root = url.rstrip("/") + ROOT
        self._author = author
        self._http = urllib3.PoolManager(timeout=TIMEOUT, retries=False)
        deadlines.bound(self._http)

    def enter(self, model: str, version: str, source: str, format_: str, properties: Mapping[str, str | float]) -> str:
        """Create or update the entry of a version whose weights are at `source`. Returns the id of the ModelVersion.

        Raises ClusterUnreachableError while the registry is unavailable, AccessDeniedError, RefusedError.
        """
        parent = self._model(model)
        fields = {"author": self._author, "state": "LIVE", "customProperties": _properties(properties)}
        version_id = self._made(
            "model_version",
            "model_versions",
            {"name": version, "parentResourceId": parent},
            {"name": version, "registeredModelId": parent},
            fields,
        )
        artifact = {"uri": source, "modelFormatName": format_, "modelFormatVersion": "1", "state": "LIVE"}
        self._made(
            "model_artifact",
            "model_artifacts",
            {"name": f"{model}-{version}", "parentResourceId": version_id},
            {"name": f"{model}-{version}"},
            {"artifactType": "model-artifact", **artifact},
            under=f"model_versions/{version_id}/artifacts",
        )
        return version_id

    def point(self, model: str, version: str) -> None:
        """Mark a version as the champion on the RegisteredModel."""
        self._model(model, {"customProperties": _properties({"champion": version})})

    def _model(self, name: str, fields: Entry | None = None) -> str:
        return self._made("registered_model", "registered_models", {"name": name}, {"name": name}, fields)

    def _made(
        self, one: str, all_: str, named: Mapping[str, str], fixed: Entry, fields: Entry | None, under: str = ""
    ) -> str:
        """The id of the object that `named` finds, updated with `fields`; created from `fixed` and `fields` if it
        does not exist.
        """
        obj = self._ask("GET", f"{one}?{urlencode(named)}")
        if obj is None:
            try:
                obj = self._ask("POST", under or all_, {**fixed, **(fields or {})})
            except RefusedError:  # a concurrent writer created it, or the request is invalid
                obj = self._ask("GET", f"{one}?{urlencode(named)}")
                if obj is None:
                    raise
        elif fields is not None:
            if "customProperties" in fields:  # a patch replaces all properties, also foreign ones
                properties = obj.get("customProperties") or {}
                fields = {**fields, "customProperties": {**properties, **fields["customProperties"]}}
            self._ask("PATCH", f"{all_}/{obj['id']}", fields)
        assert obj is not None
        return str(obj["id"])

    def _ask(self, method: str, path: str, body: Entry | None = None) -> Entry | None:
        """The response as an object; None if GET finds nothing."""

        def send(_: int) -> Entry | None:
            with deadlines.within(ANSWER_SECONDS, urllib3.exceptions.TimeoutError):
                return self._once(method, path, body)

        try:
            return retried(
                send,
                lambda error: isinstance(error, _PassingError | urllib3.exceptions.HTTPError),
                tries=TRIES,
                first=FIRST_PAUSE,
                longest=LONGEST_PAUSE,
            )
        except (_PassingError, urllib3.exceptions.HTTPError) as error:
            raise ClusterUnreachableError(
                f"the Model Registry at {redact(self._root)} does not answer ({error}); run the same command again, "
                "what is written already stays"
            ) from None

    def _once(self, method: str, path: str, body: Entry | None) -> Entry | None:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if (token := os.environ.get(TOKEN)) and is_for(self._root):
            headers["Authorization"] = f"Bearer {token}"
        answer = self._http.request(
            method,
            f"{self._root}/{path}",
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            redirect=False,
            preload_content=False,
        )
        try:
            data = answer.read(LARGEST)
        finally:
            answer.release_conn()
        if answer.status == 404 and method == "GET":
            return None
        if answer.status >= 500 or answer.status == 429:
            raise _PassingError(f"status {answer.status}")
        request = f"{method} {redact(self._root)}/{path.partition('?')[0]}: status {answer.status}"
        if answer.status in (401, 403):
            raise AccessDeniedError(f"{request}; {self._remedy()}")
        if not 200 <= answer.status < 300:
            raise RefusedError(f"{request}: {data[:500].decode(errors='replace')}")
        try:
            reply: Entry = parse_json_object(data, request)
        except DataError:
            raise RefusedError(f"{request}, and no JSON: is serving.model_registry.url its REST API?") from None
        return reply

    def _remedy(self) -> str:
        parts = urlsplit(self._root)
        if not os.environ.get(TOKEN):
            return f"{TOKEN} holds the token that it takes, and {TOKEN_FOR} the server that may have it"
        if is_for(self._root):
            return f"renew {TOKEN}"
        if not _is_private(self._root):
            return f"{TOKEN} is not sent over http to another machine; serving.model_registry.url must begin with https"
        return f"{TOKEN} is sent to no server but that of {TOKEN_FOR}; set it to {parts.scheme}://{parts.netloc}"


def is_for(url: str) -> bool:
    """Whether the token may be sent to `url`.

    The spec names the server, and the owner of the token names the server that may receive it. Plain http is allowed
    only to this machine and to a Service of the cluster.
    """
    token_url = os.environ.get(TOKEN_FOR, "")
    return bool(token_url) and _origin(token_url) == _origin(url) and _is_private(url)


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port as the HTTP client that sends the token parses them; empty for an invalid URL."""
    try:
        parts = urllib3.util.parse_url(url)
    except ValueError:
        return "", "", None
    scheme = parts.scheme or ""
    return scheme, (parts.host or "").strip("[]"), parts.port or {"https": 443, "http": 80}.get(scheme)


def _is_private(url: str) -> bool:
    scheme, host, _ = _origin(url)
    is_internal = host in ("localhost", "127.0.0.1", "::1") or host.endswith((".svc", ".svc.cluster.local"))
    return scheme == "https" or (scheme == "http" and is_internal)


def _properties(values: Mapping[str, str | float]) -> Entry:
    """Custom properties in the registry's format, which names the type of each."""
    return {
        name: {"metadataType": "MetadataDoubleValue", "double_value": value}
        if isinstance(value, float)
        else {"metadataType": "MetadataStringValue", "string_value": value}
        for name, value in values.items()
    }
