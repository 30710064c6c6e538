"""A search on a real Slurm, whose controller is killed between two decisions, equals the search on one machine."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import in_full
from tests.slurm.chain import LIKE_TWO_NODES, Place
from tests.slurm.cluster import SlurmCluster
from tests.whole import small

# The search on the emulated Argo is the shorter drill.
pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200), in_full]

SEARCH = (
    *("--over", "training.optimizer.learning_rate=1e-3..1e-1 log", "--seed", "2"),
    *("--search", "asha", "--trials", "2", "--reduction", "2", "--min-steps", "5"),
)


def records(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The comparison and the log of the only search of a store."""
    (search,) = (folder / "home/store/sweeps").iterdir()
    log = [json.loads(file.read_text()) for file in sorted((search / "log").iterdir())]
    return json.loads((search / "comparison.json").read_text()), log


def test_a_search_whose_controller_is_killed_has_the_log_and_the_digests_of_the_local_one(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    small.write_corpus(local)
    small.write_spec(local)
    result = small.holdfast(local, "spec.yaml", *SEARCH, *LIKE_TWO_NODES, command="sweep")
    assert result.returncode == 0, result.stdout + result.stderr
    place = Place(slurm, tmp_path / "slurm")
    command = ["sweep", str(place.spec), *place.sets, *SEARCH]
    controller = subprocess.Popen(
        [sys.executable, "-m", "holdfast.pipelines.cli", *command],
        env=place.environment,
        cwd=place.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    assert any("trial 2 to step 5: runs as" in line for line in controller.stdout)
    controller.send_signal(signal.SIGKILL)
    assert controller.wait() == -signal.SIGKILL
    output = place.holdfast(*command)
    comparison, log = records(place.folder)
    assert (comparison, log) == records(local), place.logs()  # with the digests of all weights
    assert [(entry["kind"], entry["trial"], entry["until"]) for entry in log[:4]] == [
        ("decision", 1, 5), ("score", 1, 5), ("decision", 2, 5), ("score", 2, 5),
    ]  # fmt: skip
    assert "trial 1 to step 5" not in output
    runs = json.loads(place.holdfast("runs", "--backend", "slurm", "--json"))
    assert len(runs) == 4, "two rungs, the promotion, and the run of the best trial"
    best = comparison["rows"][0]["run_id"]
    registered = place.folder.glob("home/store/runs/*/registrations/*.json")
    assert [path.parent.parent.name for path in registered] == [best]
    assert "exists already" not in output and best in output
    place.holdfast(*command)
    assert len(json.loads(place.holdfast("runs", "--backend", "slurm", "--json"))) == 4
