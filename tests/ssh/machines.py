"""Two machines with sshd: network namespaces with own addresses, or loopback addresses where there are none."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.ports import free_port

NAMES = ("alpha", "beta")
NETWORK = f"10.213.{os.getpid() % 250}"  # another one in each test process
LABEL = f"hf{os.getpid() % 100_000}"  # of interfaces, whose names have 15 characters at most
SSHD = """ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
AcceptEnv PYTHONPATH
"""
CLIENT = """Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  SetEnv PYTHONPATH={root}
"""
ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Why sshd cannot be started here; empty if it can."""
    if os.geteuid() != 0:
        return "sshd for any user needs root"
    missing = [name for name in ("ssh", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(name) is None]
    return f"{', '.join(missing)}: not installed" if missing else ""


@dataclass
class Machine:
    """A machine with its sshd."""

    name: str
    address: str
    namespace: str  # empty without one
    sshd: subprocess.Popen[bytes] | None = None


class Machines:
    """Starts both, and removes everything at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.machines: list[Machine] = []
        self.hosts = folder / "hosts"

    @property
    def environment(self) -> dict[str, str]:
        """What `holdfast` needs to reach them."""
        return {"HOLDFAST_SSH": f"ssh -F {self.folder / 'config'}"}

    def __enter__(self) -> Self:
        try:
            for name in ("key", "host_key"):
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
            Path("/run/sshd").mkdir(exist_ok=True)
            self.machines = list(self._networks())
            fields = [{**vars(each), "port": self.port, "folder": self.folder, "root": ROOT} for each in self.machines]
            (self.folder / "config").write_text("".join(CLIENT.format(**each) for each in fields))
            self.hosts.write_text("# two machines\n" + "".join(f"{each.name}\n" for each in self.machines))
            for machine in self.machines:
                self.start(machine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            sessions = (
                psutil.Process(machine.sshd.pid).children(recursive=True)
                if machine.sshd and machine.sshd.poll() is None
                else []
            )
            for session in sessions:  # of a test that failed; they would keep the network of the machine
                with suppress(psutil.Error):
                    session.kill()
            self.stop(machine)
            if machine.namespace:
                with suppress(subprocess.CalledProcessError):
                    _run("ip", "netns", "del", machine.namespace)
        if any(machine.namespace for machine in self.machines):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "link", "del", LABEL)

    def start(self, machine: Machine) -> None:
        """Start its sshd."""
        config = self.folder / f"{machine.name}.sshd"
        config.write_text(SSHD.format(address=machine.address, port=self.port, folder=self.folder, name=machine.name))
        machine.sshd = subprocess.Popen(self.inside(machine, "/usr/sbin/sshd", "-D", "-e", "-f", str(config)))

    def processes_of(self, machine: Machine) -> list[psutil.Process]:
        """The processes that its sshd has started and that still run, without those of sshd."""
        assert machine.sshd is not None
        processes = []
        for process in psutil.Process(machine.sshd.pid).children(recursive=True):
            with suppress(psutil.Error):
                if not process.name().startswith("sshd"):
                    processes.append(process)
        return processes

    def inside(self, machine: Machine, *command: str) -> list[str]:
        """A command line that runs in the network of a machine."""
        return [*(["ip", "netns", "exec", machine.namespace] if machine.namespace else []), *command]

    def connection_to(self, name: str) -> psutil.Process:
        """The client of the connection to a machine."""
        config = str(self.folder / "config")
        (client,) = (
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if process.info["name"] == "ssh" and {config, name} <= set(process.info["cmdline"])
        )
        return client

    def stop(self, machine: Machine) -> None:
        """End its sshd; connections that are open stay."""
        if machine.sshd is not None:
            machine.sshd.kill()
            machine.sshd.wait()

    def _networks(self) -> Iterator[Machine]:
        try:
            _run("ip", "link", "add", LABEL, "type", "bridge")
            _run("ip", "address", "add", f"{NETWORK}.1/24", "dev", LABEL)
            _run("ip", "link", "set", LABEL, "up")
        except (subprocess.CalledProcessError, FileNotFoundError):  # no right to do so
            for number, name in enumerate(NAMES, 2):
                yield Machine(name, f"127.0.0.{number}", "")
            return
        for number, name in enumerate(NAMES, 2):
            space, address = f"{LABEL}-{name}", f"{NETWORK}.{number}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", f"{LABEL}{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", f"{LABEL}{name}", "master", LABEL, "up")
            for command in (f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _run("ip", "-n", space, *command.split())
            yield Machine(name, address, space)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
