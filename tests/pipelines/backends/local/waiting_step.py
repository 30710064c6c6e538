"""A step that waits until it is asked to leave, and says so in `left`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from holdfast.launch.parent_death import die_with_parent

spec, output = (word.partition("=")[2] for word in sys.argv[2:4])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
die_with_parent(signal.SIGTERM)
print(os.getpid(), flush=True)
signal.sigwait([signal.SIGTERM])
Path(os.environ["LEFT"]).write_text("asked to leave")
