"""A step of this machine that waits for a shutdown signal, and reports it in the file that LEFT names."""

import os
import signal
import sys
from pathlib import Path

from holdfast.pipelines.backends.local import step


def wait(*_: object) -> int:
    """Replaces the command line of the step."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print(os.getpid(), flush=True)
    signal.sigwait([signal.SIGTERM])
    Path(os.environ["LEFT"]).write_text("stopped")
    return 0


if __name__ == "__main__":
    step.run_step = wait  # type: ignore[assignment]
    sys.exit(step.main(sys.argv[1:]))
