"""The scheduler's name of the machine that this process is on."""

from __future__ import annotations

import os
import socket

NODE_NAME = "HOLDFAST_NODE_NAME"  # set in the pod of a rank, and on Ray
_VARIABLES = (NODE_NAME, "SLURMD_NODENAME")


def node_name() -> str:
    """The node's name as in `Job.excluded_nodes`; the host's name if no scheduler has set one."""
    return next((name for variable in _VARIABLES if (name := os.environ.get(variable))), socket.gethostname())
