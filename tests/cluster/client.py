"""Requests to a real API server with plain dictionaries, for tests and drills: any kind, subresource, patch and
watch."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration

from tests.cluster.objects import CLUSTER_SCOPED, Object, StatusError

VERSIONS = {  # the API path of each kind
    **dict.fromkeys(["pods", "nodes", "namespaces", "events", "configmaps", "secrets", "services"], "api/v1"),
    **dict.fromkeys(["serviceaccounts", "resourcequotas", "limitranges", "persistentvolumeclaims"], "api/v1"),
    "leases": "apis/coordination.k8s.io/v1",
    "deployments": "apis/apps/v1",
    "pytorchjobs": "apis/kubeflow.org/v1",
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "jobs": "apis/batch.volcano.sh/v1alpha1",
    "workflows": "apis/argoproj.io/v1alpha1",
    "workflowtemplates": "apis/argoproj.io/v1alpha1",
}
BUSY_SECONDS = 60.0
MERGE = "application/merge-patch+json"


def path_of(plural: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
    """The path of a collection (of all namespaces when none is given), of an object, or of its subresource."""
    place = f"/namespaces/{namespace}" if namespace and plural not in CLUSTER_SCOPED else ""
    return f"/{VERSIONS[plural]}{place}/{plural}" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")


class Client:
    """One user of an API server."""

    def __init__(self, configure: Callable[[], Configuration]) -> None:
        configuration = configure()
        configuration.retries = False
        configuration.connection_pool_maxsize = 32
        self._client = ApiClient(configuration)

    def request(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        """The answer. Raises StatusError, with code 0 when the server does not answer. Waits after "too many
        requests", which a starting server also answers."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return dict(json.loads(self._open(method, path, body, query, 30.0).data))
            except StatusError as error:
                if error.code != 429 or time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def text(self, path: str, **query: str) -> str:
        """An answer that is not JSON, such as a log."""
        return bytes(self._open("GET", path, None, query, 30.0).data).decode(errors="replace")

    def get(self, plural: str, name: str, namespace: str | None = None) -> Object | None:
        """An object, or None."""
        try:
            return self.request("GET", path_of(plural, namespace, name))
        except StatusError as error:
            if error.code == 404:
                return None
            raise

    def list(self, plural: str, namespace: str | None = None, **query: str) -> tuple[list[Object], str]:
        """The objects, and the version from which a watch continues. A kind that the server does not know has no
        objects."""
        try:
            answer = self.request("GET", path_of(plural, namespace), None, **query)
        except StatusError as error:
            if error.code == 404:
                return [], ""
            raise
        return answer["items"], answer["metadata"]["resourceVersion"]

    def patch(self, plural: str, name: str, patch: Object, namespace: str | None = None, sub: str = "") -> Object:
        """Merge a patch into an object."""
        return self.request("PATCH", path_of(plural, namespace, name, sub), patch)

    def delete(self, plural: str, name: str, namespace: str | None = None, **options: Any) -> Object:
        """Delete an object, with DeleteOptions."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        return self.request("DELETE", path_of(plural, namespace, name), body)

    def watch(self, plural: str, version: str) -> Iterator[tuple[str, Object]]:
        """Yields (type, object) for every change after a version, in all namespaces, until the server closes."""
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": "120"}
        response = self._open("GET", path_of(plural), None, query, 150.0)
        rest = b""
        try:
            for chunk in response.stream(65536, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise StatusError(int(event["object"].get("code", 500)), str(event["object"].get("message")))
                    yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError, AttributeError, ValueError) as error:
            raise StatusError(0, str(error)) from error
        finally:
            response.close()

    def _open(
        self, method: str, path: str, body: Object | None, query: dict[str, str], seconds: float
    ) -> urllib3.BaseHTTPResponse:
        kind = MERGE if method == "PATCH" else "application/json"
        try:
            response: urllib3.BaseHTTPResponse = self._client.call_api(
                path, method, query_params=list(query.items()), body=body, auth_settings=["BearerToken"],
                header_params={"Accept": "application/json", "Content-Type": kind},
                _preload_content=False, _return_http_data_only=True, _request_timeout=(10.0, seconds),
            )  # fmt: skip
            return response
        except ApiException as error:
            try:
                message = json.loads(error.body)["message"]
            except (ValueError, TypeError, KeyError):
                message = str(error.reason)
            raise StatusError(int(error.status or 0), message) from None
        except urllib3.exceptions.HTTPError as error:
            raise StatusError(0, str(error)) from error
