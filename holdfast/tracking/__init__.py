"""MLflow, outside of training: a mirror of the data in the store, and the registry of models.

Importing this package does not import MLflow; the first call that needs it does.
"""

from holdfast.tracking.connection import TrackingUnavailable, connect
from holdfast.tracking.preflight import require_usable
from holdfast.tracking.registrations import Registration, registration_key, trusted_stores
from holdfast.tracking.registry import Champion, champion, promote, registered, rollback, versions
from holdfast.tracking.tracker import RunTracker, Status

__all__ = [
    "Champion",
    "Registration",
    "RunTracker",
    "Status",
    "TrackingUnavailable",
    "champion",
    "connect",
    "promote",
    "registered",
    "registration_key",
    "require_usable",
    "rollback",
    "trusted_stores",
    "versions",
]
