"""Clusters for tests: over the API server in this process, and over a real one where its binaries are installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.emulation import Emulation
from tests.cluster.real import cluster_plane
from tests.envtest.control_plane import ControlPlane, needs_assets


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real API server on which the launcher's account has the role of the manifests."""
    with cluster_plane(tmp_path_factory.mktemp("envtest")) as plane:
        assert plane is not None
        yield plane


@pytest.fixture(params=["in this process", pytest.param("real", marks=[needs_assets, pytest.mark.slow])])
def plane(request: pytest.FixtureRequest) -> ControlPlane | None:
    """Which API server: None for the one in this process."""
    return None if request.param == "in this process" else request.getfixturevalue("control_plane")


@pytest.fixture
def cluster(plane: ControlPlane | None, tmp_path: Path) -> Iterator[Emulation]:
    """An empty cluster."""
    with Emulation(tmp_path / "cluster", plane=plane) as emulation:
        yield emulation
