"""A KFP API server (v2beta1) for tests: real HTTP on a free port of 127.0.0.1, with its state in memory.

It accepts what KFP's own models allow. It refuses a body with an unknown field, a pipeline that is no PipelineSpec, and
a parameter that the pipeline does not have. It copies the difficult behavior of the real server: names of runs and
schedules are not unique, creation times have whole seconds, and deleting a schedule kills its runs. A cancelled run
ends FAILED, rows of finished steps stay, and a missing log is an answer with status 200. `tests/recordings/kfp` has the
replies of a real server.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import kfp_server_api
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.http_server import QuietHandler
from tests.kubeflow_workflow import ENDED, Node, Workflow, nodes_of
from tests.recordings import missing_log, recorded_run

FINISHED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
BROWSER_PAGE = b"<html><body>Sign in</body></html>"

# The fault of a request: a status; "drop" closes before the work, "lose" after it; None is no fault.
Fault = int | str | None


class RefusedError(Exception):
    """An error reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubeflowServer:
    """`with KubeflowServer() as server`: `server.endpoint`, its state, and `server.fault` to inject faults."""

    def __init__(self, *, multi_user: bool = False) -> None:
        self.multi_user = multi_user
        self.required: dict[str, str] = {}  # headers that every request but healthz needs
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.logs: dict[tuple[str, str], bytes] = {}  # per step of each run: the output of its newest pod
        self.workflows: dict[str, Workflow] = {}  # per started run
        self.killed: list[str] = []  # runs that ended because their schedule was deleted
        self.terminated: list[str] = []
        self.requests: list[tuple[str, str]] = []  # (method, path) of every request
        self.headers: list[dict[str, str]] = []
        self.fault: Callable[[int, str, str], Fault] = lambda index, method, path: None
        self.most_enabled = 0  # the highest number of enabled schedules so far
        self.page_size = 100
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True, name="kubeflow")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> KubeflowServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def changes(self) -> list[tuple[str, str]]:
        """The requests that change state."""
        return [request for request in self.requests if request[0] != "GET"]

    def enabled(self) -> list[dict[str, Any]]:
        return [run for run in self.recurring.values() if run["status"] == "ENABLED"]

    def fire(self, recurring_run_id: str, at: float = 0.0) -> str:
        """Act as the scheduler at a due time: start a run `at` Unix seconds. Returns its id, or an empty string if the
        maximum number is running. Parameter texts may contain that time.
        """
        recurring = self.recurring[recurring_run_id]
        assert recurring["status"] == "ENABLED"
        runs = [run for run in self.runs.values() if run.get("recurring_run_id") == recurring_run_id]
        if sum(run["state"] not in FINISHED for run in runs) >= int(recurring["max_concurrency"]):
            return ""
        copied_keys = ("experiment_id", "pipeline_version_reference", "display_name", "service_account")
        parameters = {name: _with_time(value, at) for name, value in recurring["runtime_config"]["parameters"].items()}
        run = self._run(
            {key: recurring[key] for key in copied_keys if key in recurring}
            | {"runtime_config": {"parameters": parameters}}
        )
        plain = re.sub("[^a-z0-9]", "", recurring["display_name"].lower())[:25]
        run["display_name"] = f"{plain}-{len(runs) + 1}-{zlib.crc32(run['run_id'].encode())}"
        run["recurring_run_id"] = recurring_run_id
        return str(run["run_id"])

    def progress(self, run_id: str, state: str, steps: Mapping[str, str | Node]) -> None:
        """Set the state of a run and of each started step."""
        run = self.runs[run_id]
        workflow = self.workflow(run_id)
        self._enter(run, state)
        run["run_details"] = {"task_details": workflow.rows(state, nodes_of(steps))}

    def workflow(self, run_id: str) -> Workflow:
        """The Workflow of a run: its node ids and the names of its pods."""
        if run_id not in self.workflows:
            run = self.runs[run_id]
            name = f"{run['display_name'].split()[0]}-{run_id[:5]}"
            version = self._version(run["pipeline_version_reference"])
            self.workflows[run_id] = Workflow(run_id, name, version["pipeline_spec"]["pipeline_spec"])
        return self.workflows[run_id]

    def recorded(self, name: str) -> str:
        """Add the run that a real server returned, from `tests/recordings/kfp/<name>.json`. Returns KFP's id of it."""
        run = recorded_run(name)
        self.runs[run["run_id"]] = run
        return str(run["run_id"])

    def _enter(self, run: dict[str, Any], state: str) -> None:
        history = run.setdefault("state_history", [])
        if not history or history[-1]["state"] != state:
            history.append({"update_time": _now(), "state": state})
        run["state"] = state
        run["finished_at"] = _now() if state in FINISHED else "1970-01-01T00:00:00Z"

    # ------------------------------------------------------------------ the endpoints

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes, content_type: str) -> Any:
        for expected, pattern, serve in self._routes():
            if method == expected and (match := re.fullmatch(pattern, path)):
                with self._lock:
                    result = serve(*map(unquote, match.groups()), query=query, body=body, content_type=content_type)
                    self.most_enabled = max(self.most_enabled, len(self.enabled()))
                    return result
        raise RefusedError(404, f"{method} {path} is not part of the API")

    def _routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        base, some = "/apis/v2beta1", "([^/:]+)"
        return [
            ("GET", f"{base}/healthz", lambda **_: {"multi_user": self.multi_user}),
            ("GET", f"{base}/pipelines", lambda query, **_: self._page("pipelines", self.pipelines, query)),
            ("POST", f"{base}/pipelines", self._create_pipeline),
            ("POST", f"{base}/pipelines/upload_version", self._upload_version),
            ("GET", f"{base}/pipelines/{some}/versions", self._list_versions),
            ("GET", f"{base}/pipelines/{some}/versions/{some}", lambda _, key, **__: _get(self.versions, key)),
            ("GET", f"{base}/experiments", lambda query, **_: self._page("experiments", self.experiments, query)),
            ("POST", f"{base}/experiments", self._create_experiment),
            ("GET", f"{base}/runs", self._list_runs),
            ("POST", f"{base}/runs", self._create_run),
            ("GET", f"{base}/runs/{some}", lambda key, **_: _get(self.runs, key)),
            ("POST", f"{base}/runs/{some}:terminate", self._terminate),
            ("GET", f"{base}/recurringruns", lambda query, **_: self._page("recurringRuns", self.recurring, query)),
            ("POST", f"{base}/recurringruns", self._create_recurring),
            ("POST", f"{base}/recurringruns/{some}:(enable|disable)", self._switch),
            ("DELETE", f"{base}/recurringruns/{some}", self._delete_recurring),
            ("GET", f"/apis/v1alpha1/runs/{some}/nodes/{some}/log", self._log),
        ]

    def _page(self, name: str, table: dict[str, dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
        self._check_namespace(query.get("namespace", ""), listing=True)
        rows = [row for row in table.values() if _matches(row, json.loads(query.get("filter") or "{}"))]
        if self.multi_user and "namespace" in query:
            rows = [row for row in rows if row.get("namespace", query["namespace"]) == query["namespace"]]
        begin = int(query.get("page_token") or 0)
        end = begin + min(int(query.get("page_size") or 20), self.page_size)
        return {name: rows[begin:end], "total_size": len(rows)} | (
            {"next_page_token": str(end)} if end < len(rows) else {}
        )

    def _check_namespace(self, namespace: str, *, listing: bool = False) -> None:
        if namespace and not self.multi_user:
            raise RefusedError(400, "In single-user mode, a namespace cannot be given")
        if self.multi_user and not namespace and not listing:
            raise RefusedError(400, "In multi-user mode, a namespace is required")

    def _create_pipeline(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        pipeline = checked(body, "V2beta1Pipeline")
        self._check_namespace(pipeline.get("namespace", ""))
        if any(
            (other["display_name"], other.get("namespace")) == (pipeline["display_name"], pipeline.get("namespace"))
            for other in self.pipelines.values()
        ):
            raise RefusedError(409, "Failed to create a pipeline: already exists")
        return _add(self.pipelines, "pipeline_id", pipeline)

    def _upload_version(self, *, query: dict[str, str], body: bytes, content_type: str, **_: Any) -> dict[str, Any]:
        _get(self.pipelines, query["pipelineid"])
        message = BytesParser().parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
        parts: Any = message.get_payload()
        (part,) = parts
        assert part.get_param("name", header="content-disposition") == "uploadfile"
        try:
            pipeline, platform = yaml.load_all(part.get_payload(decode=True), yaml.CSafeLoader)
            json_format.ParseDict(pipeline, pipeline_spec_pb2.PipelineSpec())
            json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
        except (json_format.ParseError, yaml.YAMLError, ValueError) as error:
            raise RefusedError(400, f"Failed to create a pipeline version: {error}") from error
        if any(
            (other["pipeline_id"], other["display_name"]) == (query["pipelineid"], query["name"])
            for other in self.versions.values()
        ):
            raise RefusedError(409, "Failed to create a pipeline version")
        spec = {"pipeline_spec": pipeline, "platform_spec": platform}
        version = {"pipeline_id": query["pipelineid"], "display_name": query["name"], "pipeline_spec": spec}
        return _add(self.versions, "pipeline_version_id", version)

    def _list_versions(self, key: str, *, query: dict[str, str], **_: Any) -> dict[str, Any]:
        _get(self.pipelines, key)
        versions = {name: version for name, version in self.versions.items() if version["pipeline_id"] == key}
        return self._page("pipeline_versions", versions, query)

    def _create_experiment(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        experiment = checked(body, "V2beta1Experiment")
        self._check_namespace(experiment.get("namespace", ""))
        if any(other["display_name"] == experiment["display_name"] for other in self.experiments.values()):
            raise RefusedError(409, "Failed to create an experiment: already exists")
        return _add(self.experiments, "experiment_id", experiment)

    def _create_run(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        return self._run(checked(body, "V2beta1Run"))

    def _run(self, made: dict[str, Any]) -> dict[str, Any]:
        self._check_what_is_run(made)
        namespace = self.experiments[made["experiment_id"]].get("namespace")
        more = {"storage_state": "AVAILABLE"} | ({"namespace": namespace} if namespace else {})
        run = _add(self.runs, "run_id", made | more)
        self._enter(run, "PENDING")
        return run

    def _check_what_is_run(self, made: dict[str, Any]) -> None:
        _get(self.experiments, made["experiment_id"])
        version = self._version(made["pipeline_version_reference"])
        definitions = version["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
        parameters = made["runtime_config"]["parameters"]
        if unknown := set(parameters) - set(definitions):
            raise RefusedError(400, f"unknown parameters: {sorted(unknown)}")
        for name, value in parameters.items():
            expected = definitions[name]["parameterType"]
            if expected not in _KINDS[type(value)]:
                raise RefusedError(400, f"input parameter {name} requires type {expected}")

    def _version(self, reference: dict[str, str]) -> dict[str, Any]:
        versions = [version for version in self.versions.values() if version["pipeline_id"] == reference["pipeline_id"]]
        newest = str(versions[-1]["pipeline_version_id"]) if versions else ""  # if none is given
        return _get(self.versions, reference.get("pipeline_version_id") or newest)

    def _list_runs(self, *, query: dict[str, str], **_: Any) -> dict[str, Any]:
        experiment_id = query.get("experiment_id")
        table = {key: {**run} for key, run in self.runs.items() if experiment_id in (None, run["experiment_id"])}
        for run in table.values():
            run.pop("run_details", None)  # as the real server does
        return self._page("runs", table, query)

    def _terminate(self, key: str, **_: Any) -> dict[str, Any]:
        run = _get(self.runs, key)
        if run["state"] in FINISHED:
            raise RefusedError(400, f"Failed to terminate run {key}: it has finished")
        self._enter(run, "CANCELING")  # until its exit handler has ended; then it is FAILED
        self.terminated.append(key)
        return {}

    def _create_recurring(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        recurring = checked(body, "V2beta1RecurringRun")
        self._check_what_is_run(recurring)
        trigger = recurring["trigger"]
        if len(trigger) != 1:
            raise RefusedError(400, "exactly one trigger is needed")
        if "cron_schedule" in trigger and len(trigger["cron_schedule"]["cron"].split()) != 6:
            raise RefusedError(400, "the cron expression must have 6 fields")
        if not 1 <= int(recurring["max_concurrency"]) <= 10:
            raise RefusedError(400, "max_concurrency must be in 1..10")
        namespace = self.experiments[recurring["experiment_id"]].get("namespace")
        more = {"namespace": namespace} if namespace else {}
        return _add(
            self.recurring, "recurring_run_id", recurring | more | {"status": f"{recurring.get('mode', 'ENABLE')}D"}
        )

    def _switch(self, key: str, how: str, **_: Any) -> dict[str, Any]:
        recurring = _get(self.recurring, key)
        recurring["mode"], recurring["status"] = how.upper(), f"{how.upper()}D"
        return {}

    def _delete_recurring(self, key: str, **_: Any) -> dict[str, Any]:
        _get(self.recurring, key)
        del self.recurring[key]
        for run in self.runs.values():
            if run.get("recurring_run_id") == key and run["state"] not in FINISHED:
                self._enter(run, "FAILED")
                self.killed.append(run["run_id"])
        return {}

    def _log(self, key: str, node: str, **_: Any) -> bytes:
        """The log of a node of a run: an archived log by its node id. If Kubeflow is multi-user, also the log of a live
        pod by its name. A missing log is an answer with status 200.
        """
        _get(self.runs, key)
        workflow = self.workflow(key)
        for step, node_state in workflow.steps.items():
            newest = node_state.tries - 1
            over = node_state.state in ENDED
            expected = workflow.executor(step, newest) if over else workflow.pod(step, newest)
            if node == expected and (over or self.multi_user) and (key, step) in self.logs:
                return self.logs[key, step]
        return json.dumps(missing_log()).encode()


def checked(body: bytes, model: str) -> dict[str, Any]:
    """The JSON of `body` if it is exactly a `model`. Raises RefusedError."""
    value = json.loads(body)
    _check(value, model, model)
    return dict(value)


def _check(value: Any, kind: str, where: str) -> None:
    if nested := re.fullmatch(r"list\[(.+)\]", kind):
        for item in value:
            _check(item, nested[1], where)
        return
    model = getattr(kfp_server_api, kind, None)
    if model is None or not model.openapi_types:
        return
    types = {model.attribute_map[name]: field_kind for name, field_kind in model.openapi_types.items()}
    for key, item in value.items():
        if key not in types:
            raise RefusedError(400, f'unknown field "{key}" in {where}')
        _check(item, types[key], f"{where}.{key}")


# The parameter types that accept a JSON value, as in backend/src/apiserver/template/v2_template.go.
_KINDS: dict[type, tuple[str, ...]] = {
    str: ("STRING",), bool: ("BOOLEAN",), int: ("NUMBER_INTEGER", "NUMBER_DOUBLE"),
    float: ("NUMBER_INTEGER", "NUMBER_DOUBLE"), list: ("LIST",), dict: ("STRUCT",), type(None): (),
}  # fmt: skip


def _with_time(value: Any, at: float) -> Any:
    """A text with expanded macros: the subset of backend/src/common/util/parameter_formatter.go that is used here."""
    if not isinstance(value, str):
        return value
    moment = datetime.fromtimestamp(at, UTC)
    value = value.replace("[[ScheduledTime]]", moment.strftime("%Y%m%d%H%M%S"))
    placeholder = re.compile(r"\{\{\$\.scheduledTime\.strftime\('(.*?)'\)\}\}")
    return placeholder.sub(lambda match: moment.strftime(match[1]), value)


def _matches(thing: dict[str, Any], wanted: dict[str, Any]) -> bool:
    for predicate in wanted.get("predicates", []):
        assert predicate["key"] == "display_name"
        value = thing["display_name"]
        exact = predicate["operation"] == "EQUALS"
        if predicate["stringValue"] != value if exact else predicate["stringValue"] not in value:
            return False
    return True


def _add(table: dict[str, dict[str, Any]], key: str, made: dict[str, Any]) -> dict[str, Any]:
    identity = str(uuid.uuid4())
    table[identity] = {**made, key: identity, "created_at": _now()}
    return table[identity]


def _now() -> str:
    return datetime.fromtimestamp(int(time.time()), UTC).isoformat().replace("+00:00", "Z")


def _get(table: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    if key not in table:
        raise RefusedError(404, f"{key} not found")
    return table[key]


def _handler_of(server: KubeflowServer) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet, because two would wait for each other

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            body = self.body()
            server.requests.append((self.command, parts.path))
            server.headers.append(dict(self.headers))
            fault = server.fault(len(server.requests) - 1, self.command, parts.path)
            if fault == "drop":
                self.close_connection = True
                return
            status, answer = 200, b""
            try:
                if isinstance(fault, int):
                    raise RefusedError(fault, f"broken on purpose, as {self.headers.get('Authorization')} requested")
                if not parts.path.endswith("/healthz") and any(
                    self.headers.get(name) != value for name, value in server.required.items()
                ):
                    raise RefusedError(401, f"unauthenticated: {self.headers.get('Authorization')}")
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                result = server.answer(self.command, parts.path, query, body, self.headers.get("Content-Type", ""))
                answer = result if isinstance(result, bytes) else json.dumps(result).encode()
            except RefusedError as error:
                status, answer = error.status, json.dumps({"code": error.status, "message": str(error)}).encode()
            if fault == "lose":
                self.close_connection = True
                return
            if status == 302:
                self.answer(status, BROWSER_PAGE, Content_Type="text/html", Location="/login")
            else:
                self.answer(status, answer, Content_Type="application/json")

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - as the base class calls them

    return Handler
