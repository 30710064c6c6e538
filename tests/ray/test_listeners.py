"""What the ranks of a gang on a real Ray listen to. Ray's own processes are left out: who reaches those may run code,
as Ray says itself (docs/security.md)."""

from __future__ import annotations

import ipaddress

import pytest

from tests.ray.cluster import RayCluster
from tests.ray.conftest import Calm
from tests.ray.test_training import Disturbed
from tests.whole.listeners import listening, unix_listeners

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


def test_the_ranks_of_a_gang_listen_on_the_addresses_of_their_nodes_alone(ray: RayCluster, calm: Calm) -> None:
    run = Disturbed(ray, calm, "listeners")
    run.goes_on()
    addresses, sockets = listening(run.ranks), unix_listeners(run.ranks)
    run.ends_as_the_calm_one()
    assert addresses, "ranks of two nodes listen somewhere"
    assert {address for address, _ in addresses if not ipaddress.ip_address(address).is_loopback} == set()
    assert {name for name in sockets if not name.startswith("/")} == set()
