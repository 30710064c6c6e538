"""What a gang on two nodes of a real Slurm listens to: the addresses of the job, and nothing that is open to others.

Slurm's own programs are left out: srun listens on all interfaces for its nodes, which Slurm authenticates.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.slurm.chain import Place
from tests.slurm.cluster import NODES, SlurmCluster
from tests.whole.listeners import listening, open_to_others, unix_listeners

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


def of_jobs(slurm: SlurmCluster, home: Path) -> list[psutil.Process]:
    """The processes that jobs have started for a home, without Slurm's own."""
    found = []
    for pid in {pid for node in NODES for pid in slurm.tasks_of(node)}:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("HOLDFAST_HOME") == str(home) and process.name() != "srun":
                found.append(process)
    return found


def test_a_gang_of_two_nodes_listens_on_the_addresses_of_its_job_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path, held=3, checkpoint={"every_steps": 2})
    run = str(place.submit()["run_id"])
    place.wait_for_step(run, 2)
    members = of_jobs(slurm, place.home)
    addresses, sockets = listening(members), unix_listeners(members)
    place.go_on()
    assert place.wait(run)["state"] == "SUCCEEDED", place.logs()
    assert addresses, "ranks of two nodes listen somewhere"
    assert {address for address, _ in addresses if not ipaddress.ip_address(address).is_loopback} == set()
    assert {name for name in sockets if not name.startswith("/") or open_to_others(Path(name))} == set()
