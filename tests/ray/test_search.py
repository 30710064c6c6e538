"""A search on a real Ray, whose controller is killed between two decisions, equals the search on one machine."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.cluster import RayCluster
from tests.ray.place import Place
from tests.seeds import in_full
from tests.slurm.chain import LIKE_TWO_NODES
from tests.slurm.test_search import SEARCH, records
from tests.whole import small

# The search on the emulated Argo is the shorter drill.
pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800), in_full]


def test_a_search_whose_controller_is_killed_has_the_log_and_the_digests_of_the_local_one(
    ray: RayCluster, home: Path, tmp_path: Path
) -> None:
    place = Place(ray, home.parent / "search", home)
    sources = [override for override in place.overrides if override.startswith("data.sources=")]
    local = small.holdfast(place.folder, "spec.yaml", "--set", *sources, *SEARCH, *LIKE_TWO_NODES, command="sweep")
    assert local.returncode == 0, local.stdout + local.stderr
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "sweep", str(place.spec), *place.sets, *SEARCH]
    controller = subprocess.Popen(command, env=place.environment, cwd=place.folder, stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    assert any("trial 2 to step 5: runs as" in line for line in controller.stdout)
    controller.send_signal(signal.SIGKILL)
    assert controller.wait() == -signal.SIGKILL
    again = subprocess.run(
        command, env=place.environment, cwd=place.folder, capture_output=True, text=True, timeout=1200, check=False
    )
    output = again.stdout
    assert again.returncode == 0, output + again.stderr
    comparison, log = records(home.parent)
    assert (comparison, log) == records(place.folder)  # with the digests of all weights
    assert [(entry["kind"], entry["trial"], entry["until"]) for entry in log[:4]] == [
        ("decision", 1, 5), ("score", 1, 5), ("decision", 2, 5), ("score", 2, 5),
    ]  # fmt: skip
    assert "trial 1 to step 5" not in output
    best = comparison["rows"][0]["run_id"]
    registered = home.glob("store/runs/*/registrations/*.json")
    assert [path.parent.parent.name for path in registered] == [best]
    assert json.loads(place.holdfast("show", best, "--json"))["state"] == "registered"
