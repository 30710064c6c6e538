"""`python -m tests.cluster.kfp_launcher COMMAND...`: a step as a pod of Kubeflow Pipelines runs it, with its signals.

Argo's emissary starts KFP's launcher in a separate process group and passes signals to the whole group. The launcher
starts Python and handles no signal, so SIGTERM kills it immediately. The emissary checks once a second; then the
container ends with all its processes. So Python has less than a second after SIGTERM. How much a process does in that
time depends on the machine. So a test ends Python itself once the act it waits for is done; here it only cannot live
forever. Written after kubeflow/pipelines 2.17.0: backend/src/v2/component/launcher_v2.go, and argoproj/argo-workflows
4.1: cmd/argoexec/commands/emissary.go.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

POLL_SECONDS = 0.2
MOST_SECONDS = 180.0  # that Python may live after SIGTERM, on a busy machine


def emissary(command: list[str]) -> int:
    """The first process of the container."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.kfp_launcher", "launcher", *command], start_new_session=True
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.killpg(launcher.pid, number))
    while launcher.poll() is None:
        time.sleep(POLL_SECONDS)
    end = time.monotonic() + MOST_SECONDS
    while _lives(launcher.pid) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)  # a container ends as a whole
    return launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        sys.exit(subprocess.call(sys.argv[2:]))
    sys.exit(emissary(sys.argv[1:]))
