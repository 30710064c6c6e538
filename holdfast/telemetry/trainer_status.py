"""Progress of a training in the status of its TrainJob, where the Kubeflow Trainer offers that.

The Trainer (2.2 and later, feature gate TrainJobStatus) sets three variables in the pods of a TrainJob: the URL of its
status server, its certificate authority, and a token that is renewed. Rank 0 posts the newest progress there, at most
every 5 seconds, from a separate thread. A server that does not answer never delays the training.
"""

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.runtime import deadlines
from holdfast.telemetry.channel import add_listener
from holdfast.telemetry.events import Event, Progress

URL, CA, TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
PAUSE_SECONDS = 5.0  # between two posts, the limit that the Trainer recommends
POST_SECONDS = 5.0  # for a whole request
FAREWELL_SECONDS = 6.0  # for the last one
LONGEST_VALUE = 64  # characters of a metric's value
METRICS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")

log = logging.getLogger("holdfast.trainer_status")


@contextmanager
def reporting_trainer_status(pause: float = PAUSE_SECONDS) -> Iterator[None]:
    """Report the progress events of rank 0 to the TrainJob of this pod. Does nothing on other ranks, and where the
    variables of the Trainer are not set. Never raises because of the server."""
    if os.environ.get("RANK", "0") != "0" or not all(os.environ.get(name) for name in (URL, CA, TOKEN)):
        yield
        return
    reporter = _Reporter(pause)
    forget = add_listener(reporter.take)
    thread = threading.Thread(target=reporter.run, name="trainer-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        forget()
        reporter.finish()
        thread.join(FAREWELL_SECONDS)


def status_of(progress: Progress) -> dict[str, Any]:
    """The body of a request for a progress event."""
    values = {name: getattr(progress, name) for name in METRICS}
    metrics = [{"name": "step", "value": str(progress.step)}]
    metrics += [
        {"name": name, "value": f"{value:.6g}"[:LONGEST_VALUE]}
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]
    status = {
        "progressPercentage": max(0, min(100, 100 * progress.step // max(1, progress.steps))),
        "estimatedRemainingSeconds": max(0, min(2**31 - 1, int(progress.seconds_left))),
        "metrics": metrics,
        "lastUpdatedTime": datetime.fromtimestamp(progress.time, UTC).isoformat(),
    }
    return {"trainerStatus": status}


class _Reporter:
    """Posts the newest progress from a thread."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._newest: Progress | None = None
        self._changed, self._ended = threading.Event(), threading.Event()
        self._failed = False  # whether the last post failed: a failure is logged once

    def take(self, event: Event, _line: bytes) -> None:
        """Remember a progress event. Does not wait."""
        if isinstance(event, Progress):
            self._newest = event
            self._changed.set()

    def finish(self) -> None:
        """Post what is not posted yet, and end."""
        self._ended.set()
        self._changed.set()

    def run(self) -> None:
        """Post until the end."""
        while not self._ended.is_set():
            self._changed.wait()
            self._changed.clear()
            progress, self._newest = self._newest, None
            if progress is not None:
                self._post(status_of(progress))
            self._ended.wait(self._pause)
        if self._newest is not None:
            self._post(status_of(self._newest))

    def _post(self, body: Mapping[str, Any]) -> None:
        import urllib3

        try:
            token = Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip()  # it is renewed: read it each time
            with (
                urllib3.PoolManager(ca_certs=os.environ[CA], retries=False, timeout=POST_SECONDS) as http,
                deadlines.within(POST_SECONDS, TimeoutError),
            ):
                deadlines.bound(http)
                answer = http.request(
                    "POST",
                    os.environ[URL],
                    body=json.dumps(body).encode(),
                    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                    redirect=False,
                )
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.data[:300].decode(errors='replace')}")
        except Exception as error:  # noqa: BLE001 - a mirror must not end the training
            if not self._failed:
                log.warning("the status of the TrainJob does not follow for now: %s: %s", type(error).__name__, error)
            self._failed = True
        else:
            if self._failed:
                log.info("the status of the TrainJob follows again")
            self._failed = False
