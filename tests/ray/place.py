"""Runs of a small spec on a real Ray, and the state of their jobs."""

import json
from pathlib import Path
from typing import Any

from tests.ray.cluster import RayCluster
from tests.whole import small
from tests.whole.submitting import Submitter, until


def environment(home: Path) -> dict[str, str]:
    """The environment of the nodes and of their clients."""
    return small.environment(home, HOLDFAST_STORE=(home / "store").as_uri())


class Place(Submitter):
    """A folder with a corpus and a spec. Its home is that of all nodes, or another shared folder."""

    def __init__(self, ray: RayCluster, folder: Path, home: Path, *overrides: str, **sections: dict[str, Any]) -> None:
        self.ray = ray
        more = [
            f"cluster.volumes=[{{claim: shared, path: {home.parent}}}]",
            # Three sources give work to three tasks: a unit has one source.
            "data.sources=["
            + ", ".join(f"{{uri: '{folder}/corpus/{part}*.txt'}}" for part in ("00", "01", "0[23]"))
            + "]",
        ]
        variables = {**environment(home), **ray.client}
        super().__init__(folder, home, variables, [*more, *overrides], **sections)

    def submit(self, *arguments: str) -> dict[str, Any]:
        """See Submitter. The home of the nodes may be another one."""
        return super().submit("--store", self.environment["HOLDFAST_STORE"], *arguments)

    def wait(self, run: str, seconds: float = 600) -> dict[str, Any]:
        """The status of a run once it has ended."""
        until(lambda: self.status(run)["state"] not in ("PENDING", "RUNNING"), seconds)
        return self.status(run)

    def endings(self, run: str) -> list[int]:
        """The exit codes of a run's launches, as far as a launcher recorded them."""
        files = sorted((self.home / "store/runs" / run).rglob("*.ending.json"))
        return [int(json.loads(path.read_text())["code"]) for path in files]

    def logs(self, run: str) -> str:
        """The output of the steps, as the driver forwards it, with the driver's lines."""
        return self.holdfast("logs", run, "--raw")
