"""File of hosts: one machine on each line, as `ssh` takes it, and where the other machines reach it.

    # comment
    gpu-1
    me@gpu-2 address=10.0.0.2

The name may be an alias of the ssh configuration, which also holds the port, the user and the key.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import Problem, SpecError

VARIABLE = "HOLDFAST_HOSTS"  # names the file
LONGEST_FILE = 1 << 20  # bytes
_ADDRESS = "address="


@dataclass(frozen=True)
class Host:
    """A machine of the file."""

    name: str  # what `ssh` connects to
    address: str  # where the ranks of other machines reach it; empty: the host name of the ssh configuration


def hosts_file(named: str = "") -> Path:
    """The absolute path of the file: `named`, or HOLDFAST_HOSTS. Raises SpecError if neither is set."""
    path = named or os.environ.get(VARIABLE, "")
    if not path:
        remedy = "write one machine on each line of a file, and name it: --endpoint FILE"
        raise SpecError([Problem(VARIABLE, None, "is not set, so no machines are known", remedy)], "ssh")
    return Path(path).expanduser().absolute()


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The machines of the file at `path`. Raises SpecError with all lines that are wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_FILE + 1)
    except OSError as error:
        remedy = "write one machine on each line, as ssh takes it"
        raise SpecError([Problem(str(path), None, f"cannot be read: {error.strerror}", remedy)], "ssh") from None
    if len(text) > LONGEST_FILE:
        raise SpecError([Problem(str(path), None, f"has more than {LONGEST_FILE} bytes", "is it a list?")], "ssh")
    hosts: dict[str, Host] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        name, *options = line.partition("#")[0].split() or [""]
        if not name:
            continue
        where = f"{path}:{number}"
        if unknown := [option for option in options if not option.startswith(_ADDRESS)]:
            problems.append(Problem(where, unknown[0], "is unknown", "write NAME, or NAME address=ADDRESS"))
        elif not name.isprintable() or name.startswith("-"):
            problems.append(Problem(where, name, "is no name of a machine", "write it as ssh takes it"))
        elif name in hosts:
            problems.append(Problem(where, name, "is there twice", "each machine starts one node; remove one line"))
        else:
            hosts[name] = Host(name, next((option.removeprefix(_ADDRESS) for option in options), ""))
    if not hosts and not problems:
        problems.append(Problem(str(path), None, "names no machine", "write one machine on each line"))
    if problems:
        raise SpecError(problems, "ssh")
    return tuple(hosts.values())


def require_enough(cluster: Cluster, hosts: tuple[Host, ...]) -> None:
    """Raises SpecError if there are fewer machines than the spec needs."""
    if len(hosts) < (fewest := cluster.nodes.min):
        remedy = "add machines, or use --set cluster.nodes.min=N and cluster.nodes.max=N: another run"
        raise SpecError([Problem("cluster.nodes.min", fewest, f"is more than the {len(hosts)} machines", remedy)])
