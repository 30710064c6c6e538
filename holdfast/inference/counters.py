"""Counters of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Counters:
    """What the server has answered since it started."""

    def __init__(self, running: Callable[[], int], queued: Callable[[], int]) -> None:
        """`running` and `queued` count the answers that are generated, and those that wait."""
        self._registry = CollectorRegistry()
        self.requests = self._counter("holdfast_requests", "Accepted requests.")
        self.refused = self._counter("holdfast_requests_refused", "Requests refused because the queue was full.")
        self.tokens = self._counter("holdfast_generated_tokens", "Tokens of answers.")
        for name, text, count in (
            ("holdfast_answers_running", "Answers that are being generated.", running),
            ("holdfast_answers_waiting", "Answers that wait for a row of the batch.", queued),
        ):
            Gauge(name, text, registry=self._registry).set_function(count)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def text(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self._registry)
