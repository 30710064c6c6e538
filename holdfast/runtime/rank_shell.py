"""Shell in the place of a rank: `python -m holdfast.runtime.rank_shell RUN RANK PID [COMMAND...]`, on the rank's node.

It becomes COMMAND, or a shell, in the working folder of the rank's process and with its environment. So the exit code
is that of COMMAND. Keys of the launch, and what belongs to the process alone, are left out. It imports nothing heavy: a
person waits for it.
"""

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MODULE = "holdfast.runtime.rank_shell"
LAUNCH_MARK = "HOLDFAST_EXIT_REPORT"  # all processes of a launch have it, and not the process that started them
# Keys of the launch; channels to its other processes, in which a second writer would do harm; and the parent, without
# which a process kills itself.
LEFT_OUT = frozenset(
    """
    HOLDFAST_LAUNCH_KEY HOLDFAST_NEAR_KEY HOLDFAST_EXIT_REPORT HOLDFAST_RANK_EXITS HOLDFAST_EVENTS
    HOLDFAST_CHECKPOINT_AGENT HOLDFAST_OUTCOMES HOLDFAST_PARENT
    """.split()
)
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes of shells


def main(argv: Sequence[str]) -> int:
    """Become the command. Returns an exit code if that is not possible."""
    run_id, rank, pid, *command = argv
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
        variables = rank_environment(int(pid))
        folder = str(Path(f"/proc/{pid}/cwd").readlink())
        if run_id not in words or variables.get("RANK") != rank:
            raise ProcessLookupError("it is another process now")
        os.chdir(folder)
    except OSError as error:
        from holdfast.spec.errors import ExitCode

        _print(
            f"rank {rank} of run {run_id}: its process {pid} cannot be entered ({error.strerror or error}); if it has "
            "ended, wait for the next launch, and run the same command again"
        )
        return ExitCode.NOT_FOUND
    variables = {name: value for name, value in variables.items() if name not in LEFT_OUT} | {"PWD": folder}
    command = command or [_shell(variables)]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    try:
        os.execvpe(command[0], command, variables)  # noqa: S606 - the person's own command
    except OSError as error:
        _print(f"{command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def rank_environment(pid: int) -> dict[str, str]:
    """The variables of a rank's process. Raises OSError if they cannot be read.

    A forked process shows as many of its variables as fit, the last one perhaps cut (`holdfast.launch.processes`). Its
    parents in the launch show the rest, which they share.
    """
    variables: dict[str, str] = {}
    content = Path(f"/proc/{pid}/environ").read_bytes()
    while True:
        pid = _parent(pid)
        above = _content(pid)
        is_cut = len(above) == len(content) and not content.endswith(b"\0\0")  # equal: forked without `exec`
        entries = [entry for entry in content.split(b"\0") if entry]
        own = dict(os.fsdecode(entry).split("=", 1) for entry in entries[: -1 if is_cut else None] if b"=" in entry)
        variables = own | variables
        content = above
        if not content.startswith(f"{LAUNCH_MARK}=".encode()) and f"\0{LAUNCH_MARK}=".encode() not in content:
            return variables


def _shell(variables: Mapping[str, str]) -> str:
    names = (variables.get("SHELL", ""), "bash")
    return next((name for name in names if name and shutil.which(name, path=variables.get("PATH"))), "sh")


def _content(pid: int) -> bytes:
    """The variables of a process as it shows them; empty if it belongs to another user, or is outside of the
    container."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _print(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
