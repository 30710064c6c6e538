"""Connection to a KFP server through KFP's client: credentials, timeouts and retries.

Every request has a timeout. A request that is safe to repeat is retried a few times. A request that creates an object
is repeated only after a check whether the object exists. No token, cookie or header is ever shown. The modules of this
package make the requests.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import kfp
import kfp_server_api
import urllib3
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH
from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

from holdfast.runtime import deadlines
from holdfast.runtime.retry import retried
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import AccessDeniedError, DataError, ExitCode, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json_object

TIMEOUT = (10.0, 60.0)  # seconds to connect, and of silence from the server
ANSWER_SECONDS = 300.0  # for a whole response that is not a stream
TRIES = 5
PAUSE = 0.5  # seconds before the second try; doubles, with jitter...
LONGEST_PAUSE = 8.0  # ...up to here
MAX_SHOWN = 600  # characters of a server message
PAGE = 100
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_REFUSED_BEFORE_ANYTHING = (425, 429)  # refused before any effect, so even a creating request is sent again

T = TypeVar("T")

log = logging.getLogger("holdfast.kubeflow")


class KubeflowUnreachableError(HoldfastError):
    """The KFP server did not respond, including retries."""

    exit_code = ExitCode.STORE_UNREACHABLE


class KubeflowRefusedError(HoldfastError):
    """The KFP server refused a valid request."""


class _UncertainError(Exception):
    """The effect of a request is unknown; `__cause__` has the error."""


@dataclass(frozen=True)
class Access:
    """Address of the KFP server and credentials. Secrets are never part of a command line."""

    endpoint: str = ""  # empty: inside a cluster its own, outside that of the current kubectl context
    namespace: str = ""  # of a user, where Kubeflow has several
    ui: str = ""  # URL of the UI for a browser; empty: the endpoint
    token: str = field(default="", repr=False)
    token_file: str = ""  # read again for every request, because its issuer replaces it
    cookie: str = field(default="", repr=False)
    header: str = field(default="", repr=False)  # "Name: value", as an OIDC proxy or a mesh requires
    ca_file: str = ""

    @classmethod
    def from_environment(cls, endpoint: str = "", namespace: str = "") -> Access:
        """Read KFP_ENDPOINT, KFP_NAMESPACE, KFP_UI, KFP_TOKEN, KFP_TOKEN_FILE, KFP_COOKIE, KFP_HEADER, KFP_CA_FILE.

        Arguments take precedence. In a pod with a projected token for KFP, that token is used.
        """
        projected = os.environ.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH
        return cls(
            endpoint=endpoint or os.environ.get("KFP_ENDPOINT") or os.environ.get("KF_PIPELINES_ENDPOINT", ""),
            namespace=namespace or os.environ.get("KFP_NAMESPACE", ""),
            ui=os.environ.get("KFP_UI", ""),
            token=os.environ.get("KFP_TOKEN", ""),
            token_file=os.environ.get("KFP_TOKEN_FILE") or (projected if Path(projected).is_file() else ""),
            cookie=os.environ.get("KFP_COOKIE", ""),
            header=os.environ.get("KFP_HEADER", ""),
            ca_file=os.environ.get("KFP_CA_FILE", ""),
        )

    @property
    def known(self) -> bool:
        """Whether an endpoint, a cluster or a kubeconfig gives the server's address."""
        kubeconfig = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        files = [Path(file) for file in kubeconfig.split(os.pathsep) if file]
        return bool(self.endpoint or os.environ.get("KUBERNETES_SERVICE_HOST")) or any(f.is_file() for f in files)


@dataclass(frozen=True)
class Request:
    """A request that a dry run did not send."""

    method: str
    path: str
    query: dict[str, Any]
    body: Any


class _Client(kfp.Client):
    """KFP's client without its own retries, sleeps and files."""

    def _load_config(self, *args: Any, **kwargs: Any) -> Any:
        config = super()._load_config(*args, **kwargs)
        # One try here. No redirect is followed: it would lead to a login page, with our credentials.
        config.retries = urllib3.Retry(0, redirect=0, raise_on_redirect=False)
        return config

    def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:  # noqa: ARG002 - KFP's signature
        return self._healthz_api.healthz_service_get_healthz(_request_timeout=TIMEOUT)

    def set_user_namespace(self, namespace: str) -> None:
        """Set it in memory; KFP's own method writes it to a file in the home folder."""
        self._context_setting["namespace"] = namespace


class DryApi(kfp_server_api.ApiClient):
    """The API of a dry run: reads go to the real server, and changes are kept in `requests`.

    Without a real server it acts like an empty one.
    """

    def __init__(self, real: kfp_server_api.ApiClient | None, requests: list[Request]) -> None:
        super().__init__(real.configuration if real else kfp_server_api.Configuration())
        self._real, self._requests = real, requests

    def call_api(self, path: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Like the real method, with the response that the server would give."""
        path_params, query, headers = (*args, None, None, None)[:3]
        imagined = any(str(value).startswith("(") for value in (path_params or {}).values())  # created by this dry run
        if method == "GET" and self._real is not None and not imagined:
            return self._real.call_api(path, method, path_params, query, headers, **kwargs)
        model = getattr(kfp_server_api, str(kwargs.get("response_type")), None)
        if method == "GET":
            assert model is not None
            return model()
        for name, value in (path_params or {}).items():
            path = path.replace("{%s}" % name, str(value))  # noqa: UP031 - a brace in braces
        body = self.sanitize_for_serialization(kwargs.get("body"))
        if files := kwargs.get("files"):
            body = {name: Path(file).name for name, file in files.items()}
        self._requests.append(Request(method, path, dict(query or ()), body))
        if model is None:
            return None
        reply = dict(body or ()) if not files else {}
        reply |= {key: f"({key})" for key in model.attribute_map if key.endswith("_id") and key not in reply}
        return self._ApiClient__deserialize(reply, str(kwargs["response_type"]))


class Server:
    """A KFP server. With `dry`, changing requests are kept in `requests` and not sent."""

    def __init__(self, access: Access, *, dry: bool = False) -> None:
        """Connect. Raises MissingError, AccessDeniedError or KubeflowUnreachableError.

        A dry run with no known server, or with none in the kubeconfig's cluster, continues with an imaginary empty one.
        """
        self.access = access
        self.offline = dry and not access.known
        self.requests: list[Request] = []
        if not access.known and not dry:
            raise MissingError(
                "no Kubeflow Pipelines is known here: give --endpoint or KFP_ENDPOINT, such as http://localhost:8888 "
                "after `kubectl -n kubeflow port-forward svc/ml-pipeline 8888`"
            )
        for name, file in (("KFP_TOKEN_FILE", access.token_file), ("KFP_CA_FILE", access.ca_file)):
            if file and not Path(file).is_file():
                raise MissingError(f"{name}: {file} is no file; name one, or unset the variable")
        client = self._connected(dry)
        self._api: kfp_server_api.ApiClient = client._run_api.api_client
        deadlines.bound(self._api.rest_client.pool_manager)
        self.host = redact(str(self._api.configuration.host).rstrip("/"))  # safe to show, like all URLs in messages
        if access.header:
            name, colon, value = access.header.partition(":")
            if not colon or not value.strip():
                raise AccessDeniedError("KFP_HEADER: is not `Name: value`; write it as one HTTP header")
            self._api.set_default_header(name.strip(), value.strip())
        self.namespace = access.namespace or ("" if self.offline else client.get_user_namespace() or "")
        self.dry = dry
        api = DryApi(None if self.offline else self._api, self.requests) if dry else self._api
        self.pipelines = kfp_server_api.PipelineServiceApi(api)
        self.pipeline_uploads = kfp_server_api.PipelineUploadServiceApi(api)
        self.experiments = kfp_server_api.ExperimentServiceApi(api)
        self.runs = kfp_server_api.RunServiceApi(api)
        self.recurring_runs = kfp_server_api.RecurringRunServiceApi(api)

    def _connected(self, dry: bool) -> _Client:
        """A client. A dry run without a named endpoint continues offline if the kubeconfig's cluster has no server."""
        try:
            return self._tried(self._connect, safe=True)
        except (MissingError, KubeflowUnreachableError) as error:
            if not dry or self.access.endpoint:
                raise
            log.warning("%s: this continues as if there were an empty one", error)
        self.offline = True
        return self._connect()

    def _connect(self) -> _Client:
        access = self.access
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # warnings about servers before version 2
            return _Client(
                host="http://offline" if self.offline else access.endpoint or None,
                namespace=access.namespace or ("offline" if self.offline else "kubeflow"),
                existing_token=access.token or None,
                credentials=ServiceAccountTokenVolumeCredentials(access.token_file) if access.token_file else None,
                cookies=access.cookie or None,
                ssl_ca_cert=access.ca_file or None,
                ui_host=access.ui or None,
            )

    def link(self, kind: str, identity: str) -> str:
        """The UI's URL of an object: `runs`, `recurringrun` or `pipelines`, and its id."""
        return f"{redact(self.access.ui or self.host).rstrip('/')}/#/{kind}/details/{identity}"

    def ask(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call an API method that is safe to repeat: it reads, or it leaves the same state again."""
        return self._tried(lambda: method(*args, _request_timeout=TIMEOUT, **kwargs), safe=True)

    def every(self, method: Callable[..., Any], items: str, **kwargs: Any) -> Iterator[Any]:
        """All items of all pages of an API listing."""
        token = ""
        while True:
            page = self.ask(method, page_token=token, page_size=PAGE, **kwargs)
            yield from getattr(page, items) or ()
            token = page.next_page_token or ""
            if not token:
                return

    def ensure(self, find: Callable[[], T | None], make: Callable[..., T]) -> tuple[T, bool]:
        """The object that `find` finds, otherwise the one that `make` creates, and whether this call created it.

        A lost response and a faster concurrent client are both resolved by another `find`.
        """

        def find_or_make(_: int) -> tuple[T, bool]:
            if (existing := find()) is not None:
                return existing, False
            return self._tried(lambda: make(_request_timeout=TIMEOUT), safe=False), True

        try:
            return retried(
                find_or_make,
                lambda error: isinstance(error, _UncertainError),
                tries=TRIES,
                first=PAUSE,
                longest=LONGEST_PAUSE,
            )
        except _UncertainError as error:
            raise self._translated(error.__cause__) from error

    def stream(self, path: str) -> Iterator[bytes]:
        """Stream the bytes of a plain resource of the server."""
        response = self._tried(
            lambda: self._api.call_api(
                path, "GET", auth_settings=["Bearer"], _preload_content=False, _request_timeout=TIMEOUT
            ),
            safe=True,
        )
        try:
            yield from response.stream(2**16)
        except urllib3.exceptions.HTTPError as error:
            raise self._translated(error) from error
        finally:
            response.release_conn()

    def _tried(self, call: Callable[[], T], *, safe: bool) -> T:
        renewals = iter([bool(self.access.token_file)])

        def answered(_: int) -> T:
            with deadlines.within(ANSWER_SECONDS, urllib3.exceptions.TimeoutError):
                return call()

        def passes(error: BaseException) -> bool:
            if not isinstance(error, kfp_server_api.ApiException):
                return safe and isinstance(error, urllib3.exceptions.HTTPError)
            if error.status == 401 and next(renewals, False):
                return True  # the file is read again: its token may have been replaced
            return error.status in _REFUSED_BEFORE_ANYTHING or (safe and error.status in (*_TRANSIENT, 0))

        try:
            return retried(answered, passes, tries=TRIES, first=PAUSE, longest=LONGEST_PAUSE)
        except kfp_server_api.ApiException as error:
            if not safe and error.status in (*_TRANSIENT, 409, 0):
                raise _UncertainError from error
            raise self._translated(error) from error
        except urllib3.exceptions.HTTPError as error:
            if not safe:
                raise _UncertainError from error
            raise self._translated(error) from error
        except OSError as error:  # the token's file
            raise AccessDeniedError(f"the token for Kubeflow cannot be read: {error.strerror}") from error

    def _translated(self, error: BaseException | None) -> HoldfastError:
        """The error for a person."""
        address = (
            getattr(self, "host", "") or redact(self.access.endpoint) or "the server of the current kubectl context"
        )
        if not isinstance(error, kfp_server_api.ApiException) or not error.status:
            reason = type(error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error).__name__
            return KubeflowUnreachableError(
                f"Kubeflow Pipelines at {address} does not answer ({reason}); is the endpoint right, and a "
                "port-forward still running?"
            )
        message = self._without_secrets(_message_of(error))
        if error.status in (401, 403) or 300 <= error.status < 400:
            return AccessDeniedError(
                f"Kubeflow Pipelines at {address} does not let us in (status {error.status}): {message}\n"
                "    remedy: renew KFP_TOKEN, KFP_TOKEN_FILE, KFP_COOKIE or KFP_HEADER, or ask for access to the "
                "namespace"
            )
        if error.status == 404:
            return MissingError(f"Kubeflow Pipelines at {address} has no such thing: {message}")
        if error.status in _TRANSIENT:
            return KubeflowUnreachableError(
                f"Kubeflow Pipelines at {address} is not well (status {error.status}): {message}"
            )
        return KubeflowRefusedError(f"Kubeflow Pipelines at {address} refuses (status {error.status}): {message}")

    def _without_secrets(self, text: str) -> str:
        access = self.access
        secrets = [access.token, access.cookie, access.header.partition(":")[2].strip()]
        with suppress(OSError):
            secrets.append(Path(access.token_file).read_text(encoding="utf-8").strip() if access.token_file else "")
        for secret in filter(None, secrets):
            text = text.replace(secret, "(hidden)")
        return text


def _message_of(error: kfp_server_api.ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with suppress(DataError):
        reply = parse_json_object(body, "the answer")
        body = str(reply.get("error_message") or reply.get("message") or reply.get("error") or body)
    if "<html" in body[:200].lower():
        body = "a page for browsers, as of a login"
    return (body or str(error.reason or "no reason given"))[:MAX_SHOWN]
