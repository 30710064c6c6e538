"""Rules of `telemetry`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec


def check_collector_address(spec: Spec) -> Iterator[Problem]:
    """In a pod, metrics are served at an address that can be reached from outside. This rule is only for specs that run
    in pods, which the spec itself does not state."""
    telemetry = spec.telemetry
    if telemetry.metrics_port is not None and _is_loopback(telemetry.metrics_host):
        yield Problem(
            "telemetry.metrics_host", telemetry.metrics_host, "is inside the pod, where Prometheus cannot reach it "
            f"(telemetry.metrics_port: {telemetry.metrics_port})", "use 0.0.0.0, or remove telemetry.metrics_port",
        )  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
