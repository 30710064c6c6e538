"""Optional packages that a spec needs."""

from __future__ import annotations

from holdfast.spec.errors import require_package
from holdfast.spec.tree import Spec


def require_trackers(spec: Spec) -> None:
    """Raise MissingError if the package of a tracker of `telemetry.trackers` is not installed on this machine."""
    for name in spec.telemetry.trackers:
        require_package(name, f"telemetry.trackers: {name}", f"remove {name} from telemetry.trackers")
