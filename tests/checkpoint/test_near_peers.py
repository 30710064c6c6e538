"""Copies on another node: two nodes, each with a memory of its own, of which one is lost; and who may talk to one."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.checkpoint import Attempt, Checkpointer, Retention, claim_attempt
from holdfast.components.checkpoint.near import tier
from holdfast.components.checkpoint.near.nearby import Nearby
from holdfast.components.checkpoint.near.peers import Endpoint, Neighbour, Remote, Server
from holdfast.components.checkpoint.near.tier import Tier
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import MissingError, StoreUnreachableError
from holdfast.components.store import layout, open_store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import DESCRIBE, RUN, blank, same, shards, state

NODES = 2


def _gang(rank: int, size: int, url: str, folder: Path, peers: int, number: int, near: list[int], root: int) -> Any:
    """Be one rank, on a node of its own: where it begins, whether the state is that of this step; then keep the steps
    `near` on the nodes, and `root` in the store."""
    os.environ[tier.VARIABLE] = str(folder / f"node-{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with process_group(folder / f"meeting-{number}", rank, size):
        gang, store = Gang(), open_store(url)
        attempt = gang.from_rank_0(lambda: claim_attempt(store, RUN), Attempt)
        nearby = Nearby(store, attempt, gang, {"memory": 1}, peers=peers)
        saver = Checkpointer(store, attempt, Retention(9), describe=DESCRIBE, near=nearby, gang=gang)
        boxes = blank(shards(state(0), rank, size))
        start = saver.restore(boxes, lambda _: None)
        whole = start > 0 and same(boxes, shards(state(start), rank, size))
        gang.barrier()
        for step in [*near, *([root] if root else [])]:
            saver.save(step, shards(state(step), rank, size), {"optimizer.step": step}, committed=step == root)
            saver.wait()
        gang.barrier()
        saver.close()
        return start, whole


def begin(url: str, folder: Path, number: int, peers: int = 1, near: tuple[int, ...] = (), root: int = 0) -> list[Any]:
    """Run a gang of two nodes; what each rank says."""
    return in_ranks(NODES, _gang, url, folder, peers, number, list(near), root)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_node_had_in_memory_is_had_from_its_neighbour_when_the_node_is_lost(lost: int, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begin(url, tmp_path, 1, root=1)
    assert begin(url, tmp_path, 2, near=(2, 3, 4)) == [(1, True)] * NODES
    shutil.rmtree(tmp_path / f"node-{lost}")
    assert begin(url, tmp_path, 3) == [(4, True)] * NODES


def test_without_a_copy_on_another_node_the_checkpoint_is_loaded_and_so_it_is_when_both_are_lost(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path / 'store'}"
    begin(url, tmp_path, 1, root=1)
    begin(url, tmp_path, 2, peers=0, near=(2, 3))
    shutil.rmtree(tmp_path / "node-1")
    assert begin(url, tmp_path, 3, near=(2, 3)) == [(1, True)] * NODES
    for number in range(NODES):
        shutil.rmtree(tmp_path / f"node-{number}")
    assert begin(url, tmp_path, 4) == [(1, True)] * NODES


def test_ranks_that_have_changed_their_nodes_fetch_what_they_need(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begin(url, tmp_path, 1, peers=0, near=(1, 2))
    (tmp_path / "node-0").rename(tmp_path / "other")
    (tmp_path / "node-1").rename(tmp_path / "node-0")
    (tmp_path / "other").rename(tmp_path / "node-1")
    assert begin(url, tmp_path, 2, peers=0) == [(2, True)] * NODES


def test_a_copy_that_is_damaged_on_its_own_node_is_read_from_the_other(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begin(url, tmp_path, 1, near=(1, 2))
    for pack in tmp_path.glob("node-0/*/w00000/runs/run/packs/000001-000000002-*"):
        data = bytearray(pack.read_bytes())
        data[0] ^= 1
        pack.write_bytes(data)
    assert begin(url, tmp_path, 2) == [(2, True)] * NODES


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A node that serves a tier: where, and the tier."""
    place = Tier(name="memory", folder=str(tier.make_folder(tmp_path, "run-life")), every=1)
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], token="right")
    server = Server(listener, endpoint.token, RUN, [place])
    yield endpoint, place
    server.close()
    listener.close()


def test_who_has_not_the_token_gets_and_puts_nothing(served: tuple[Endpoint, Tier]) -> None:
    endpoint, place = served
    key = layout.pack(RUN, f"000001-000000001-{'0' * 32}")
    place.store(3).put(key, b"secret")
    assert Remote(endpoint, "memory", 3).get(key) == b"secret"
    stranger = Remote(endpoint.model_copy(update={"token": "wrong"}), "memory", 3)
    for act in (lambda: stranger.get(key), lambda: stranger.put(key, b"mine")):
        with pytest.raises(StoreUnreachableError):
            act()
    assert place.store(3).get(key) == b"secret"


@pytest.mark.parametrize("key", ["runs/other/packs/0.pack", "runs/run/packs/../../../x", "runs/run/checkpoints/x.json"])
def test_nothing_but_the_objects_of_near_steps_is_served(key: str, served: tuple[Endpoint, Tier]) -> None:
    endpoint, place = served
    with pytest.raises(StoreUnreachableError):
        Remote(endpoint, "memory", 0).put(key, b"x")
    assert place.writers() == []
    with pytest.raises(MissingError):
        Remote(endpoint, "memory", 0).get(layout.pack(RUN, f"000001-000000001-{'0' * 32}"))
    with pytest.raises(MissingError):
        Remote(endpoint, "disk", 0).get(layout.pack(RUN, f"000001-000000001-{'0' * 32}"))


def test_a_neighbour_that_is_away_costs_one_warning_and_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    place = Tier(name="memory", folder=str(tmp_path), every=1)
    neighbour = Neighbour(Endpoint(host="127.0.0.1", port=port, token="x"), place, RUN, 0)
    place.store(0).put(f"{layout.indexes(RUN, 1, 1)}00000.idx", b"")
    for _ in range(3):
        neighbour.send((1, 1))
    assert caplog.text.count("is on this node alone") == 1
