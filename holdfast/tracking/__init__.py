"""Trackers, outside of training: copies of the metrics in the store. And MLflow's registry of models.

Importing this package does not import a tracker's package; the first call that needs one does.
"""

from holdfast.tracking.connection import TrackingUnavailable, connect
from holdfast.tracking.interface import Status, Tracker, open_all
from holdfast.tracking.preflight import require_usable
from holdfast.tracking.registrations import Registration, registration_key, trusted_stores
from holdfast.tracking.registry import Champion, champion, promote, registered, rollback, versions
from holdfast.tracking.tracker import RunTracker

__all__ = [
    "Champion",
    "Registration",
    "RunTracker",
    "Status",
    "Tracker",
    "TrackingUnavailable",
    "champion",
    "connect",
    "open_all",
    "promote",
    "registered",
    "registration_key",
    "require_usable",
    "rollback",
    "trusted_stores",
    "versions",
]
