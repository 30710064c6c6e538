"""The port of the ranks' rendezvous, before any rank listens there."""

import socket

import pytest

from holdfast.runtime import node


def test_a_free_port_is_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    port = node.free_port()
    with socket.create_server(("", 0)) as ephemeral, socket.create_server(("", port)):
        assert port < node.PORTS.stop <= ephemeral.getsockname()[1]
        monkeypatch.setattr(node, "PORTS", range(port, port + 1))
        monkeypatch.setattr(node, "TRIES", 1)
        with pytest.raises(OSError, match="have nowhere to meet"):
            node.free_port()
