"""Copies on a peer node: two nodes with separate memory, of which one is lost, and the authentication of peers."""

import hmac
import json
import os
import random
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import Attempt, Checkpointer, Retention, claim_attempt
from holdfast.checkpoint.local_tiers import channel, peers, tier
from holdfast.checkpoint.local_tiers.channel import Channel
from holdfast.checkpoint.local_tiers.peers import Endpoint, Neighbour, Remote, Server, _Answer
from holdfast.checkpoint.local_tiers.tier import Tier
from holdfast.checkpoint.local_tiers.tier_set import TierSet
from holdfast.collectives import Gang
from holdfast.spec.errors import HoldfastError, MissingError, StoreUnreachableError
from holdfast.store import layout, open_store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import DESCRIBE, RUN, blank, same, shards, state

NODES = 2
KEY = layout.pack(RUN, f"000001-000000001-{'0' * 32}")


def _gang(rank: int, size: int, url: str, folder: Path, peers: int, number: int, near: list[int], root: int) -> Any:
    """Run one rank on a separate node. Reports the start step and whether the state matches it. Then keep the steps
    `near` on the nodes and save `root` to the store.
    """
    os.environ[tier.VARIABLE] = str(folder / f"node-{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with process_group(folder / f"meeting-{number}", rank, size):
        gang, store = Gang(), open_store(url)
        attempt = gang.from_rank_0(lambda: claim_attempt(store, RUN), Attempt)
        nearby = TierSet(store, attempt, gang, {"memory": 1}, peers=peers)
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
    """Run a gang of two nodes. Returns the report of each rank."""
    return in_ranks(NODES, _gang, url, folder, peers, number, list(near), root)


def test_the_memory_copy_of_a_lost_node_is_loaded_from_its_neighbour(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begin(url, tmp_path, 1, root=1)
    assert begin(url, tmp_path, 2, near=(2, 3, 4)) == [(1, True)] * NODES
    shutil.rmtree(tmp_path / "node-0")  # with rank 0
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
    """A node that serves a tier: its endpoint and the tier."""
    place = Tier(name="memory", folder=str(tier.make_folder(tmp_path, "run-life")), every=1)
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], token="right")
    server = Server(listener, endpoint.token, RUN, [place])
    yield endpoint, place
    server.close()
    listener.close()


def test_a_client_without_the_token_cannot_get_or_put(served: tuple[Endpoint, Tier]) -> None:
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


def test_an_unreachable_neighbour_gives_one_warning_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = Tier(name="memory", folder=str(tmp_path), every=1)
    neighbour = Neighbour(Endpoint(host="127.0.0.1", port=port, token="x"), place, RUN, 0)
    place.store(0).put(f"{layout.indexes(RUN, 1, 1)}00000.idx", b"")
    for _ in range(3):
        neighbour.send((1, 1))
    assert caplog.text.count("is on this node alone") == 1


def opened(endpoint: Endpoint) -> tuple[socket.socket, bytes]:
    """A connection of an unknown client, and the listener's challenge."""
    end = socket.create_connection((endpoint.host, endpoint.port), timeout=20)
    return end, end.recv(32, socket.MSG_WAITALL)


def test_slow_clients_without_the_token_do_not_block_authenticated_ones(
    served: tuple[Endpoint, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _ = served
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 600.0)  # no connection ends because it is slow
    strangers = [opened(endpoint)[0] for _ in range(2 * peers.UNPROVEN)]
    for end in strangers[-peers.UNPROVEN_EACH :]:
        end.send(b"\0")
    Remote(endpoint, "memory", 3).put(KEY, b"copy")
    assert Remote(endpoint, "memory", 3).get(KEY) == b"copy"
    assert sum(_is_open(end) for end in strangers) <= peers.UNPROVEN_EACH
    for end in strangers:
        end.close()


def _is_open(end: socket.socket) -> bool:
    end.settimeout(0.01)
    try:
        return end.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_a_handshake_ends_after_its_seconds_however_its_bytes_drip(
    served: tuple[Endpoint, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    end, _ = opened(served[0])
    for _ in range(64):  # one byte per 50 ms: each is in time
        time.sleep(0.05)
        try:
            end.send(b"\0")
        except OSError:
            break
    else:
        raise AssertionError("64 bytes dripped in")
    assert not _is_open(end)


@pytest.mark.parametrize("at", [0, 63])
def test_a_client_with_a_wrong_proof_is_disconnected(at: int, served: tuple[Endpoint, Tier]) -> None:
    endpoint, _ = served
    end, theirs = opened(endpoint)
    ours = bytes(32)
    answer = bytearray(ours + hmac.digest(endpoint.token.encode(), b"asks" + theirs + ours, "sha256"))
    answer[at] ^= 1
    end.sendall(answer)
    assert end.recv(1) == b""
    end.close()


def test_a_listener_without_the_token_receives_no_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def pretend() -> None:
            end, _ = listener.accept()
            with end:
                end.sendall(bytes(32))
                end.recv(64, socket.MSG_WAITALL)
                end.sendall(bytes(32))
                received.append(end.recv(1000))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StoreUnreachableError, match="does not know the token"):
            Remote(Endpoint(host="127.0.0.1", port=listener.getsockname()[1], token="right"), "memory", 0).get(KEY)
        thread.join(20)
        assert received == [b""]


class Middle:
    """A proxy between two nodes that forwards their messages and flips one bit of one side's data."""

    def __init__(self, endpoint: Endpoint, side: str, at: int) -> None:
        self._target, self._side, self._at = endpoint, side, at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = endpoint.model_copy(update={"port": self._listener.getsockname()[1]})
        self._threads = [threading.Thread(target=self._carry)]
        self._threads[0].start()

    def _carry(self) -> None:
        client, _ = self._listener.accept()
        upstream = socket.create_connection((self._target.host, self._target.port))
        ways = [(client, upstream, self._side == "asks"), (upstream, client, self._side == "answers")]
        threads = [threading.Thread(target=self._hand_on, args=way) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        upstream.close()

    def _hand_on(self, source: socket.socket, target: socket.socket, change: bool) -> None:
        passed_bytes = 0
        with suppress(OSError):
            while data := bytearray(source.recv(4096)):
                if change and passed_bytes <= self._at < passed_bytes + len(data):
                    data[self._at - passed_bytes] ^= 1
                passed_bytes += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(20)
        self._listener.close()


@pytest.mark.parametrize("side", ["asks", "answers"])
@pytest.mark.parametrize("at", [0, 110, 400, 1500])
def test_a_bit_that_is_changed_on_the_way_is_noticed(at: int, side: str, served: tuple[Endpoint, Tier]) -> None:
    endpoint, place = served
    data = bytes(range(250)) * 12
    middle = Middle(endpoint, side, at)
    remote = Remote(middle.endpoint, "memory", 3)
    try:
        with pytest.raises(StoreUnreachableError):
            remote.put(KEY, data)
            for _ in range(30):
                assert remote.get(KEY) == data
        if place.store(3).stat(KEY) is not None:
            assert place.store(3).get(KEY) == data
    finally:
        remote.close()
        middle.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_malformed_request_of_a_peer_ends_only_its_connection(
    seed: int, served: tuple[Endpoint, Tier], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, _ = served
    random_ = random.Random(seed)
    whole = {"op": "get", "tier": "memory", "writer": 0, "key": KEY, "start": 0, "size": None}
    odd: list[Any] = [None, -1, 2**70, 1e400, "x" * 2000, [], {}, "\ud800", float("nan"), True, "[" * 500]
    request = {**whole, random_.choice(list(whole)): random_.choice(odd), **({"more": 1} if seed % 5 == 0 else {})}
    data = (json.dumps(request) if seed % 4 else "[" * 9999).encode()
    raw = Channel.connect(endpoint.host, endpoint.port, endpoint.token)
    with suppress(OSError, EOFError, ValueError, HoldfastError):
        raw._end.sendall(len(data).to_bytes(4, "little") + data + raw._mac_of_next(data))
        raw.hear(_Answer)
    raw.close()
    with pytest.raises(MissingError):
        Remote(endpoint, "memory", 0).get(KEY)
    assert "Traceback" not in caplog.text


def test_a_token_alone_opens_nothing_where_the_launch_has_a_key(
    served: tuple[Endpoint, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _ = served
    assert endpoint.keyed() == endpoint
    monkeypatch.setenv("HOLDFAST_NEAR_KEY", "k" * 64)
    keyed_endpoint = endpoint.keyed()
    assert keyed_endpoint.token not in (endpoint.token, "k" * 64)
    assert keyed_endpoint == endpoint.keyed()
    monkeypatch.setenv("HOLDFAST_NEAR_KEY", "l" * 64)
    assert endpoint.keyed().token != keyed_endpoint.token
