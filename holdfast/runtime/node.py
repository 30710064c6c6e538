"""The machine that this process is on: its scheduler's name for it, and its addresses."""

import ipaddress
import logging
import os
import random
import socket
from collections.abc import Iterator

NODE_NAME = "HOLDFAST_NODE_NAME"  # set in the pod of a rank, and on Ray
POD_VARIABLE, NAMESPACE_VARIABLE = "HOLDFAST_POD_NAME", "HOLDFAST_POD_NAMESPACE"  # set by the downward API
_VARIABLES = (NODE_NAME, "SLURMD_NODENAME")


def node_name() -> str:
    """The node's name as in `Job.excluded_nodes`; the host's name if no scheduler has set one."""
    return next((name for variable in _VARIABLES if (name := os.environ.get(variable))), socket.gethostname())


# This machine's address for the other nodes of a job, listeners that are bound only to it, and free ports.

log = logging.getLogger("holdfast.runtime")

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # the interface of the job, if set
BACKLOG = 4096
PORTS = range(20_000, 32_000)  # below Linux's default range for outgoing connections, so none takes one meanwhile
TRIES = 100


def interface_address() -> str | None:
    """The IPv4 address of the interface that GLOO_SOCKET_IFNAME names; None if this machine has no such interface."""
    import psutil

    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    for address in psutil.net_if_addrs().get(name, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    return None


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with an IP address; None if it has none."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


def listen_as(host: str, port: int) -> socket.socket:
    """A listener at `port` on this machine's address that `host` names to the other nodes.

    `host` may name no address of this machine: behind address translation, or if only others can resolve it. Then the
    listener is on the named interface, else on all of them. Raises OSError.
    """
    address = next(_own_addresses(host), None) or interface_address()
    if address is None:
        log.warning(
            "%s is no address of this machine: port %d is open on all of its interfaces. Set %s to the interface of "
            "the job",
            host,
            port,
            INTERFACE_VARIABLE,
        )
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def free_port() -> int:
    """A free port for a listener that starts later, such as the ranks' meeting address.

    It is chosen at random, so that two concurrent callers get different ports. Raises OSError.
    """
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"{TRIES} ports of {PORTS.start}-{PORTS.stop - 1} are all in use: the ranks have nowhere to meet")


def _own_addresses(host: str) -> Iterator[str]:
    """The addresses of `host` that this machine has, IPv4 first. Skips a name that means this machine only on itself,
    such as a loopback address in /etc/hosts: other nodes do not know it."""
    import psutil

    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    local_addresses = {entry.address for all_ in psutil.net_if_addrs().values() for entry in all_}
    for *_, target in sorted(infos, key=lambda each: each[0] != socket.AF_INET):
        address = str(target[0])
        loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if (loopback and host in (address, "localhost")) or (not loopback and address in local_addresses):
            yield address
