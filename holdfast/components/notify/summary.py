"""Summary of a run, as text for a person and as JSON for a program.

A summary is always made: without a run, without a store, or with an unreadable spec. It never fails the DAG. Unknown
facts are left out and listed. The steps measure the numbers.
"""

import html
import json
import logging
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar, get_args
from urllib.error import HTTPError

from holdfast.components.notify.ending import Headline, PipelineExit, exit_status_of, headline_of
from holdfast.runtime import deadlines
from holdfast.runtime.environment import log_dir, store_url
from holdfast.runtime.exits import code_in
from holdfast.runtime.retry import retried
from holdfast.runtime.secrets import redact, redact_record
from holdfast.scoring import newest_record
from holdfast.spec import HoldfastError, Spec, parse_spec
from holdfast.spec.errors import DataError, ExitCode, MissingError
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_json_object
from holdfast.telemetry import emit, read_events, recording
from holdfast.telemetry.events import Event, Progress, RunEnded, StragglerDetected, TimeSpent
from holdfast.telemetry.serving import show_traces

# JSON post to a webhook, such as Slack's. It is bounded in time and never fatal.
#
# It makes at most three tries of a few seconds each. The URL is a secret, and no part of it is logged or raised.

TRIES = 3
TIMEOUT = 5.0  # seconds without a response from the server
TOTAL = 10.0  # maximum seconds of a try
PAUSE = 0.5  # seconds before the second try; doubles

log = logging.getLogger("holdfast.notify")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirect: a redirected POST becomes a GET, which sends more than intended."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(deadlines.bound_class(HTTPConnection), request)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(deadlines.bound_class(HTTPSConnection), request)  # type: ignore[arg-type]


def post(url: str, message: Mapping[str, Any]) -> bool:
    """Post `message` as JSON. Returns whether the server accepted it. Failures are logged."""
    if not url.startswith(("http://", "https://")):
        log.warning("HOLDFAST_WEBHOOK is neither http:// nor https://; nothing was posted")
        return False
    body = json.dumps(redact_record(message), ensure_ascii=False).encode()

    def send(_: int) -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
        opener = urllib.request.build_opener(_NoRedirect, _Http, _Https)
        with deadlines.within(TOTAL), opener.open(request, timeout=TIMEOUT):
            return

    try:
        retried(send, _passes, tries=TRIES, first=PAUSE, longest=PAUSE * 2)
    except (OSError, HTTPException, ValueError) as error:  # their texts may hold the URL
        reason = f"status {error.code}" if isinstance(error, HTTPError) else type(error).__name__
        log.warning(
            "the webhook in HOLDFAST_WEBHOOK did not take the summary (%s); it is in the log and the store", reason
        )
        return False
    return True


def _passes(error: BaseException) -> bool:
    if isinstance(error, HTTPError):
        return error.code >= 500 or error.code == 429
    return isinstance(error, OSError | HTTPException | ValueError)


WEBHOOK = "HOLDFAST_WEBHOOK"
MAX_REASON = 2000  # characters
MAX_NEWS = 10  # lines; `holdfast show` has all

# The next action for failures that no retry fixes.
_REMEDIES: dict[int, str] = {
    ExitCode.UNEXPECTED: "this is a bug: report it with the log",
    ExitCode.USAGE: "correct the command line, then run it",
    ExitCode.CHAMPION_CHANGED: "run the same command again: the model is compared with the new champion",
    ExitCode.UNSCORABLE_CHAMPION: "restore the champion's model or promote another version, then run it again",
    ExitCode.FOREIGN_VERSION: "promote a version of this store (`holdfast models list`), then run it again",
    ExitCode.BAD_SPEC: "correct the spec as the reason says, then run it",
    ExitCode.BAD_DATA: "correct the data or its part of the spec, then run it again",
    ExitCode.DIVERGED: (
        "lower training.optimizer.learning_rate or raise training.schedule.warmup_steps: that is another run"
    ),
    ExitCode.NO_CHECKPOINT_VERIFIES: "restore the checkpoints from a copy of the store, or train anew (--fresh)",
    ExitCode.FENCED: "",  # a newer attempt owns this run: nothing to do
    ExitCode.NOT_FOUND: "put what is missing in its place, or name another one in the spec, then run it again",
    ExitCode.ACCESS_DENIED: "give the credentials or the right that the reason names, then run it again",
    ExitCode.OUT_OF_MEMORY: "continue with the plan that the reason names, or give the ranks more memory",
    ExitCode.USER_CODE: "correct your function as the reason says, then run it again",
    ExitCode.PLAN_CHANGED: "go back to the former plan, or run it with --replan to continue with the new one",
}
_MARKDOWN = re.compile(r"([\\`*{}\[\]#|!~])")
_EDGE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # an underscore at the edge of a word can be markup

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """Summary of a run. Empty fields are unknown."""

    status: str  # succeeded, failed or cancelled
    headline: Headline = "succeeded"  # the outcome that a person reads first
    name: str = ""
    run_id: str = ""  # or the sweep's
    kind: str = "run"  # or sweep
    failed_step: str = ""
    reason: str = ""
    loss: float | None = None  # of the last training step, in the unit of the objective or script
    step: int | None = None  # last step that training reached
    happened: list[str] = field(default_factory=list)  # restarts, failed saves, warnings
    verdict: str = ""  # blessed or not_blessed
    reasons: list[str] = field(default_factory=list)  # of the verdict
    metrics: dict[str, float] = field(default_factory=dict)
    registered: str = ""  # models:/name/version
    alias: str = ""
    report: str = ""  # URL of the HTML report in the store
    log: str = ""  # location of the log
    store: str = ""
    next_command: str = ""
    unknown: list[str] = field(default_factory=list)  # what could not be determined, and why
    exit_code: int | None = None  # of the exit code table: 0, or that of the failed step
    ended: float = 0.0  # unix seconds: time of this summary

    @property
    def text(self) -> str:
        """The summary as plain lines."""
        return "\n".join(self._lines(str)) + "\n"

    @property
    def markdown(self) -> str:
        """The summary as Markdown. Text from other sources (reasons, messages) is escaped."""
        return "\n".join(self._lines(_escaped)) + "\n"

    def _lines(self, shown: Callable[[str], str]) -> Iterator[str]:
        subject = " ".join(part for part in (self.name, f"({self.kind} {self.run_id})" if self.run_id else "") if part)
        registered = f" as {self.registered}" if self.headline == "registered" and self.registered else ""
        yield f"**{shown(subject) or 'The pipeline'}: {self.headline}{registered}**"
        yield ""
        if self.reason:
            yield f"- reason: {shown(self.reason)}"
        if self.failed_step:
            yield f"- {'step' if self.status == 'cancelled' else 'failed step'}: {shown(self.failed_step)}"
        if self.step is not None and self.loss is not None:
            yield f"- trained: {self.step} steps, last loss {self.loss:.4f}"
        for text in self.happened:
            yield f"- happened: {shown(text)}"
        for name, value in self.metrics.items():
            yield f"- {shown(name)}: {value:.6g}"
        if self.verdict:
            yield f"- verdict: {self.verdict.replace('_', ' ')}" + shown(_because(self.reasons))
        if self.registered:
            yield f"- registered: {self.registered}" + (f" as {self.alias}" if self.alias else "")
        for label, place in (("report", self.report), ("log", self.log), ("next", self.next_command)):
            if place:
                yield f"- {label}: `{place}`"
        for unknown in self.unknown:
            yield f"- note: {shown(unknown)}"


def run(
    end: PipelineExit, spec: str = "", store: str = "", run_id: str = "", *, overrides: Iterable[str] = ()
) -> Summary:
    """Summarize a DAG that ended, log the summary, record it with the run and post it to HOLDFAST_WEBHOOK.

    - `spec`: the spec's text, which may be refused.
    - `store`: the root of the store (default: the spec's).

    Raises no expected error.
    """
    unknown, message = list(end.unknown), end.message
    ended = exit_status_of(end.status)
    code = code_of_end(ended, code_in(message) if end.exit_code is None else end.exit_code)
    checked, refused = checked_spec(spec, overrides)
    if refused and ended == "failed" and not message.strip():  # no step could read the spec, so no step could report it
        message, code = refused, int(ExitCode.BAD_SPEC)
    elif refused and refused not in message:
        unknown.append(refused)
    opened = attempt(lambda: open_store(store or store_url(checked)), unknown)
    files = (
        attempt(lambda: found_of(opened, run_id, checked, unknown), unknown) if opened is not None and run_id else None
    )
    result, verdict, registration = files or ({}, {}, {})
    events = attempt(lambda: read_events(opened, run_id, kinds=_SUMMARIZED), unknown) if opened and run_id else None
    reached = next((event for event in reversed(events or ()) if isinstance(event, Progress)), None)
    news = [*_news(events or ()), *end.done]
    language_model = {} if checked and checked.train.script else registration
    summary = Summary(
        status=ended,
        headline=headline_of(ended, end.outcomes, verdict=verdict.get("word", ""), registered=bool(registration)),
        name=checked.name if checked else "",
        run_id=run_id,
        failed_step=end.failed_step,
        reason=redact(message.strip())[:MAX_REASON],
        loss=result.get("loss", reached and reached.loss),
        step=result.get("step", reached and reached.step),
        happened=news if len(news) <= MAX_NEWS else [f"{len(news) - MAX_NEWS} things more, before", *news[-MAX_NEWS:]],
        verdict=verdict.get("word", ""),
        reasons=[str(reason) for reason in verdict.get("reasons") or []],
        metrics={key: value for key, value in (verdict.get("metrics") or {}).items() if isinstance(value, int | float)},
        registered=f"models:/{registration['model']}/{registration['version']}" if registration else "",
        alias=registration.get("alias", ""),
        report=f"{opened.url}/{layout.verdict(run_id, verdict['key'], 'html')}" if opened and verdict else "",
        log=end.log_place or _local_log(run_id),
        store=opened.url if opened else "",
        next_command=next_command(ended, language_model, code, known=bool(message.strip())),
        unknown=unknown,
        exit_code=code,
        ended=time.time(),
    )
    if opened is not None and run_id:
        with recording(opened, run_id, "notify"):
            emit(RunEnded(status=ended, reason=summary.reason))
        attempt(lambda: _trace(opened, run_id), [])
    tell(summary, opened, layout.run(run_id, "summary.json") if run_id else "")
    return summary


def nothing_to_do(spec: str, overrides: Iterable[str], reason: str) -> Summary:
    """Summarize a scheduled execution with nothing due, and log that. It belongs to no run."""
    checked, _ = checked_spec(spec, overrides)
    summary = Summary(
        status="succeeded",
        headline="nothing to do",
        name=checked.name if checked else "",
        reason=redact(reason)[:MAX_REASON],
        exit_code=int(ExitCode.OK),
        ended=time.time(),
    )
    tell(summary, None, "")
    return summary


def checked_spec(spec: str, overrides: Iterable[str]) -> tuple[Spec | None, str]:
    """The spec, or the reason why it is refused."""
    try:
        return (parse_spec(spec, tuple(overrides)) if spec else None), ""
    except (HoldfastError, ValueError) as error:
        log.warning("summary: %s", redact(str(error)))
        return None, redact(str(error))[:MAX_REASON]


def _trace(store: Store, run_id: str) -> None:
    """Send the span of the whole run, if traces are enabled."""
    if (traces := show_traces(run_id)) is not None:
        events = read_events(store, run_id)
        traces.remember(event for event in events if not isinstance(event, RunEnded))
        for ended in [event for event in events if isinstance(event, RunEnded)][-1:]:
            traces.take(ended)
        traces.close()


def _news(events: Sequence[Event]) -> list[str]:
    """The interruptions of the run, one line each. Slow ranks share one line, at the last detection."""
    slow = [event for event in events if isinstance(event, StragglerDetected)]
    lines = []
    for event in events:
        if isinstance(event, StragglerDetected):
            if event is slow[-1]:
                before = f" (slow ranks were named {len(slow)} times; this is the last)" if len(slow) > 1 else ""
                lines.append(event.text + before)
        elif event.is_news:
            lines.append(event.text)
    return lines


_SUMMARIZED = tuple(kind for kind in get_args(Event) if kind is not TimeSpent)  # a summary does not report seconds


def tell(summary: Summary, store: Store | None, key: str) -> None:
    """Log a summary, record it under `key` if given with a store, and post it to HOLDFAST_WEBHOOK. An execution that
    a person ended, or that had nothing to do, is not posted (docs/decisions/030)."""
    log.info("%s", summary.text.rstrip())
    record = redact_record({"text": summary.text, **asdict(summary)})
    if store is not None and key:
        body = json.dumps(record, indent=1, ensure_ascii=False).encode()
        attempt(lambda: store.put(key, body), [])
    if (url := os.environ.get(WEBHOOK)) and summary.headline not in ("cancelled", "nothing to do"):
        post(url, record)


def found_of(
    store: Store, run_id: str, spec: Spec | None, unknown: list[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The result, the newest verdict and the newest registration of the run, each empty if missing. With a known
    spec, the verdict must be under its evaluation settings. The registration must be one of its model, and requires
    a blessed verdict. Unreadable objects are listed in `unknown`."""
    result = next((value for _, value in _records(store, layout.result(run_id), unknown)), {})
    verdicts = _records(store, layout.run(run_id, "evaluations/"), unknown)
    if spec is not None:
        settings = spec.evaluation.model_dump(mode="json")
        verdicts = [(key, value) for key, value in verdicts if value.get("settings") == settings]
    verdict = newest_record(verdicts)[1]
    if spec is not None and verdict.get("word") != "blessed":
        return result, verdict, {}
    registrations = _records(store, layout.registrations(run_id), unknown)
    if spec is not None:
        registrations = [(key, value) for key, value in registrations if value.get("model") == spec.registered_model]
    registration = newest_record(registrations)[1]
    return result, verdict, registration


def next_command(status: str, registration: dict[str, Any], exit_code: int | None, *, known: bool = True) -> str:
    """The next action for a person, or an empty string. `registration` is that of a language model, or empty. `known`
    is true if the reason of a failure is known."""
    if status == "succeeded":
        model = f"{registration['model']}@{registration['alias']}" if registration else ""
        return f'holdfast models generate {model} "Once upon a time"' if model else ""
    if exit_code in _REMEDIES:
        return _REMEDIES[exit_code]
    if exit_code is not None and 0 < exit_code < 128 and exit_code != ExitCode.CANCELLED:
        return "correct what the reason says first"
    repeat = "run the same command again: it continues where this one stopped"
    if exit_code is not None or status == "cancelled":
        return repeat
    return f"correct what the {'reason' if known else 'log'} says, then {repeat}"


def code_of_end(status: str, failed: int | None) -> int | None:
    """The exit code of a DAG that ended with `status`. `failed` is the code of the failed step, if known."""
    return int(ExitCode.OK) if status == "succeeded" else failed or None


def _records(store: Store, prefix: str, unknown: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """The JSON objects under `prefix` with their keys. Unreadable objects are skipped and listed in `unknown`."""
    found = []
    for info in store.list(prefix):
        if info.key.endswith(".json"):
            try:
                found.append((info.key, read_json_object(store, info.key)))
            except (DataError, MissingError) as error:
                unknown.append(redact(str(error))[:MAX_REASON])
                log.warning("summary: %s", redact(str(error)))
    return found


def _local_log(run_id: str) -> str:
    logs = log_dir(run_id).glob("*.log") if run_id else ()
    return str(max(logs, key=lambda path: path.stat().st_mtime, default=""))


def attempt(find: Callable[[], T], unknown: list[str]) -> T | None:
    """The result of `find`. If it fails, None, with a line in `unknown` and in the log."""
    try:
        return find()
    except (HoldfastError, OSError, ValueError) as error:
        unknown.append(redact(str(error))[:MAX_REASON])
        log.warning("summary: %s", redact(str(error)))
        return None


def _escaped(text: str) -> str:
    """`text` as Markdown that shows it: no markup, no HTML, one line for each of its lines."""
    lines = [_MARKDOWN.sub(r"\\\1", html.escape(line.strip(), quote=False)) for line in text.splitlines()]
    lines = [_EDGE.sub("&#95;", line) for line in lines]
    return "  \n  ".join(re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", line) for line in lines if line)


def _because(reasons: list[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""
