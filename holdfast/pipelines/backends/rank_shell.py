"""Command lines that start a shell, or another command, in the place of a rank. See `Backend.rank_shell`.

On the rank's node, `holdfast.runtime.rank_shell` gives it the rank's environment and working folder.
"""

from dataclasses import dataclass
from typing import Literal

from holdfast.runtime.rank_shell import MODULE
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MissingError
from holdfast.telemetry.rank_logs import RankStream


@dataclass(frozen=True)
class RankShell:
    """A command to run in the place of a rank."""

    run_id: str
    process: RankStream  # of the rank, which runs
    cluster: Cluster  # of the spec
    command: tuple[str, ...] = ()  # empty: a shell
    terminal: bool = True  # whether it is used from a terminal

    def on_node(self, python: str) -> list[str]:
        """The command line on the rank's node, where `python` is the interpreter of Holdfast."""
        return [python, "-m", MODULE, self.run_id, str(self.process.rank), str(self.process.pid), *self.command]

    def scheduled_in(self, kind: Literal["pod", "job"]) -> str:
        """The pod or the Slurm job of the rank. Raises MissingError if the store does not name it."""
        if not (name := str(getattr(self.process, kind))):
            raise MissingError(
                f"rank {self.process.rank} of run {self.run_id}: the store names no {kind} of it, only the node "
                f"{self.process.node}; give --backend with the one that runs it"
            )
        return name


def in_pod(shell: RankShell, context: str = "") -> list[str]:
    """The command line on Kubernetes, in a context of the kubeconfig. Raises MissingError for a rank without a pod."""
    from holdfast.launch.kubernetes.kinds import KINDS

    options = ["-i", *(["-t"] if shell.terminal else []), shell.scheduled_in("pod")]
    options += ["-n", shell.process.namespace, "-c", KINDS[shell.cluster.job].container]
    place = ["--context", context] if context else []
    return ["kubectl", *place, "exec", *options, "--", *shell.on_node("python")]
