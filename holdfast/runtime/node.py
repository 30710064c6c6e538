"""What the scheduler calls the machine that this process is on."""

from __future__ import annotations

import os
import socket

NODE_NAME = "HOLDFAST_NODE_NAME"  # in the pod of a rank, and on a Ray
_VARIABLES = (NODE_NAME, "SLURMD_NODENAME")


def node_name() -> str:
    """The node's name as `Job.excluded_nodes` has it; the host's where no scheduler has given one."""
    return next((name for variable in _VARIABLES if (name := os.environ.get(variable))), socket.gethostname())
