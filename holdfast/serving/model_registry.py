"""A registered version as an entry of a Kubeflow Model Registry: RegisteredModel, ModelVersion, ModelArtifact.

Promises one entry for a version, whoever writes it at once and wherever it is killed: everything is found by its name
first, names are unique on the server, and what is there is patched. Speaks the REST API v1alpha3.
"""

from __future__ import annotations

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
ANSWER_SECONDS = 60.0  # for all of an answer
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 6, 0.5, 8.0
LARGEST = 2**20  # bytes of an answer
Entry = dict[str, Any]


class RefusedError(HoldfastError):
    """The registry does not take what it is sent: another API is at that URL, or another version of it."""

    exit_code = ExitCode.BAD_SPEC


class _PassingError(Exception):
    """The registry is away."""


class ModelRegistry:
    """The registry at a URL, without a slash at its end."""

    def __init__(self, url: str, author: str) -> None:
        self._root = url.rstrip("/") + ROOT
        self._author = author
        self._http = urllib3.PoolManager(timeout=TIMEOUT, retries=False)
        deadlines.bound(self._http)

    def enter(self, model: str, version: str, source: str, format_: str, properties: Mapping[str, str | float]) -> str:
        """Make or mend the entry of a version whose weights lie at `source`. Returns the id of the ModelVersion.

        Raises ClusterUnreachableError while the registry is away, AccessDeniedError, RefusedError.
        """
        parent = self._model(model)
        said = {"author": self._author, "state": "LIVE", "customProperties": _properties(properties)}
        found = self._made(
            "model_version", "model_versions", {"name": version, "parentResourceId": parent},
            {"name": version, "registeredModelId": parent}, said,
        )  # fmt: skip
        artifact = {"uri": source, "modelFormatName": format_, "modelFormatVersion": "1", "state": "LIVE"}
        self._made(
            "model_artifact", "model_artifacts", {"name": f"{model}-{version}", "parentResourceId": found},
            {"name": f"{model}-{version}"}, {"artifactType": "model-artifact", **artifact},
            under=f"model_versions/{found}/artifacts",
        )  # fmt: skip
        return found

    def point(self, model: str, version: str) -> None:
        """Say on the RegisteredModel which version is the champion."""
        self._model(model, {"customProperties": _properties({"champion": version})})

    def _model(self, name: str, said: Entry | None = None) -> str:
        return self._made("registered_model", "registered_models", {"name": name}, {"name": name}, said)

    def _made(
        self, one: str, all_: str, named: Mapping[str, str], fixed: Entry, said: Entry | None, under: str = ""
    ) -> str:
        """The id of what `named` finds, with `said` written on it; made as `fixed` and `said` where there is none."""
        found = self._ask("GET", f"{one}?{urlencode(named)}")
        if found is None:
            try:
                found = self._ask("POST", under or all_, {**fixed, **(said or {})})
            except RefusedError:  # somebody made it just now, or the request does not fit: then there is none still
                found = self._ask("GET", f"{one}?{urlencode(named)}")
                if found is None:
                    raise
        elif said is not None:
            if "customProperties" in said:  # a patch replaces them all, those of other people as well
                kept = found.get("customProperties") or {}
                said = {**said, "customProperties": {**kept, **said["customProperties"]}}
            self._ask("PATCH", f"{all_}/{found['id']}", said)
        assert found is not None
        return str(found["id"])

    def _ask(self, method: str, path: str, body: Entry | None = None) -> Entry | None:
        """The answer; None for a question about what is not there."""

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
        what = f"{method} {redact(self._root)}/{path.partition('?')[0]}: status {answer.status}"
        if answer.status in (401, 403):
            raise AccessDeniedError(f"{what}; {self._remedy()}")
        if not 200 <= answer.status < 300:
            raise RefusedError(f"{what}: {data[:500].decode(errors='replace')}")
        try:
            found: Entry = parse_json_object(data, what)
        except DataError:
            raise RefusedError(f"{what}, and no JSON: is serving.model_registry.url its REST API?") from None
        return found

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
    """Whether the token may be sent there: a spec names the server, the one who gives the token says which it is for.
    Over plain http it goes to this machine, and to a Service of the cluster, only."""
    named = os.environ.get(TOKEN_FOR, "")
    return bool(named) and _origin(named) == _origin(url) and _is_private(url)


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port as the client reads them that sends the token; empty for what is no URL."""
    try:
        parts = urllib3.util.parse_url(url)
    except ValueError:
        return "", "", None
    scheme = parts.scheme or ""
    return scheme, (parts.host or "").strip("[]"), parts.port or {"https": 443, "http": 80}.get(scheme)


def _is_private(url: str) -> bool:
    scheme, host, _ = _origin(url)
    inside = host in ("localhost", "127.0.0.1", "::1") or host.endswith((".svc", ".svc.cluster.local"))
    return scheme == "https" or (scheme == "http" and inside)


def _properties(values: Mapping[str, str | float]) -> Entry:
    """Custom properties in the registry's words, which name the type of each."""
    return {
        name: {"metadataType": "MetadataDoubleValue", "double_value": value}
        if isinstance(value, float)
        else {"metadataType": "MetadataStringValue", "string_value": value}
        for name, value in values.items()
    }
