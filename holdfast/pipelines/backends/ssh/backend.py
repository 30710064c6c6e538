"""Machines behind sshd as a backend: the steps run on this machine, and training on the machines of a file.

The rest is as on this machine alone (`holdfast.pipelines.backends.local`). `holdfast.launch.ssh` starts the gang.
"""

import shlex
import sys
from collections.abc import Sequence

from holdfast.launch.ssh.hosts import hosts_file
from holdfast.launch.ssh.launcher import ssh_command
from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.local.backend import Local
from holdfast.pipelines.backends.rank_shell import RankShell


class Ssh(Local):
    """The runs that this machine starts on others, in one store."""

    name = "ssh"
    capabilities = capabilities.SSH

    def __init__(self, store: str = "", hosts: str = "") -> None:
        """`hosts`: file of the machines; empty: the one that HOLDFAST_HOSTS names, as soon as a run needs it."""
        super().__init__(store)
        self._named = hosts

    @property
    def hosts(self) -> str:
        """The absolute path of the file. Raises SpecError if none is known."""
        return str(hosts_file(self._named))

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """Through ssh. All machines have Python at the same path."""
        terminal = "-t" if shell.terminal else "-T"
        return [*ssh_command(), terminal, shell.process.node, shlex.join(shell.on_node(sys.executable))]
