"""Runs of a small spec on a real Ray, and what became of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.ray.cluster import RayCluster
from tests.whole import small
from tests.whole.submitting import Submitter, until


def environment(home: Path) -> dict[str, str]:
    """What the nodes have, and whoever submits to them."""
    return small.environment(home, HOLDFAST_STORE=(home / "store").as_uri())


class Place(Submitter):
    """A folder with a corpus and a spec. Its home is the one that all nodes see, or another folder of theirs."""

    def __init__(self, ray: RayCluster, folder: Path, home: Path, *overrides: str, **sections: dict[str, Any]) -> None:
        self.ray = ray
        more = [
            f"cluster.volumes=[{{claim: shared, path: {home.parent}}}]",
            # Three sources, so that there is work for three: a unit is of one source.
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
        """The codes that the launches of a run ended with, as far as a launcher saw it."""
        files = sorted((self.home / "store/runs" / run).rglob("*.ending.json"))
        return [int(json.loads(path.read_text())["code"]) for path in files]

    def logs(self, run: str) -> str:
        """What the steps printed, as the driver passes it on, with the driver's own lines."""
        return self.holdfast("logs", run, "--raw")
