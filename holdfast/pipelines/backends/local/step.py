"""One step in a process of this machine: `python -m holdfast.pipelines.backends.local.step STEP arguments`.

It gets SIGTERM when the process that started it dies, saves and exits. The step's command line does the rest.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.launch.processes import die_with_parent
from holdfast.runtime.logs import configure_logging
from holdfast.steps.adapters import main as run_step


def main(argv: Sequence[str]) -> int:
    """Run the step that the first argument names. Returns its exit code."""
    die_with_parent(signal.SIGTERM)
    os.environ.pop(PARENT, None)
    configure_logging()
    step = argv[0]
    return int(run_step(step, import_module(f"holdfast.components.{step}.__main__").body, argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
