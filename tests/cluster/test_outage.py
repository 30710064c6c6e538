"""An API server that was away: its first answers differ from those after it has read its roles."""

import threading
from pathlib import Path

import pytest

from holdfast.launch.kubernetes.client import LEASES
from holdfast.spec.errors import AccessDeniedError
from tests.cluster.emulation import Emulation
from tests.cluster.objects import StatusError


def test_a_request_denied_by_a_starting_server_is_retried(tmp_path: Path) -> None:
    with Emulation(tmp_path / "cluster") as cluster:
        api = cluster.api()
        faults = [StatusError(403, "cannot get leases") for _ in range(3)]
        cluster.server.faults.append(lambda verb, plural: faults.pop() if faults else None)
        with pytest.raises(AccessDeniedError, match="cannot get leases"):
            api.get(LEASES, "x")  # nothing was lost: the error is real
        with cluster.server.outage():
            back = threading.Timer(1.0, lambda: setattr(cluster.server, "away", False))
            back.start()
            assert api.get(LEASES, "x") is None
        assert faults == []
