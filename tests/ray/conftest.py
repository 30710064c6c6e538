"""One real Ray for all tests; they skip, with the reason, where it is not installed."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import RayCluster, missing
from tests.ray.place import Place, environment

STEPS = 400
LONG: dict[str, dict[str, Any]] = {
    "training": {"steps": STEPS, "log_every": 50}, "checkpoint": {"every_steps": 20, "keep_last": 100},
}  # fmt: skip


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all nodes see."""
    return tmp_path_factory.mktemp("shared") / "home"


@pytest.fixture(scope="session")
def ray(home: Path) -> Iterator[RayCluster]:
    """A head and two nodes. Nothing of them is left afterwards."""
    if why := missing():
        pytest.skip(f"no Ray: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,  # its path is part of socket names: it must be short
        RayCluster(Path(folder), environment(home)) as cluster,
    ):
        yield cluster


@dataclass(frozen=True)
class Calm:
    """The undisturbed run."""

    place: Place
    made: dict[str, Any]  # output of `submit`
    again: dict[str, Any]  # and of the second one, during the run
    status: dict[str, Any]  # at its end

    def digest(self, step: int) -> str:
        """The digest of its state at a step."""
        return self.place.digest(self.made["run_id"], step)


@pytest.fixture(scope="session")
def calm(ray: RayCluster, home: Path) -> Calm:
    """An undisturbed run on both nodes, to its end."""
    place = Place(ray, home.parent / "training", home, **LONG)
    first, second = place.submit(), place.submit()
    status = place.wait(first["run_id"])
    assert status["state"] == "SUCCEEDED", place.logs(first["run_id"])
    return Calm(place, first, second, status)
