"""Rules of `telemetry`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec


def check_collector_address(spec: Spec) -> Iterator[Problem]:
    """In a pod, figures that are served are served at an address that somebody outside reaches. Asked of specs that run
    in pods, which a spec does not say of itself."""
    telemetry = spec.telemetry
    if telemetry.metrics_port is not None and _is_loopback(telemetry.metrics_host):
        yield Problem(
            "telemetry.metrics_host", telemetry.metrics_host, "is inside of the pod, where no Prometheus is "
            f"(telemetry.metrics_port: {telemetry.metrics_port})", "use 0.0.0.0, or remove telemetry.metrics_port",
        )  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
