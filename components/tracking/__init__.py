"""MLflow, seen from the outside of training: a mirror of what the store knows, and the registry of models.

Importing this package does not import MLflow; the first call that needs it does.
"""

from holdfast.components.tracking.connection import TrackingUnavailable, connect
from holdfast.components.tracking.registry import (
    Champion,
    champion,
    promote,
    registered,
    registration_key,
    rollback,
    versions,
)
from holdfast.components.tracking.tracker import RunTracker, Status

__all__ = [
    "Champion",
    "RunTracker",
    "Status",
    "TrackingUnavailable",
    "champion",
    "connect",
    "promote",
    "registered",
    "registration_key",
    "rollback",
    "versions",
]
