"""A rank's module, the import of which is interrupted by SIGTERM to whoever imports it."""

import os
import signal

os.kill(os.getpid(), signal.SIGTERM)
