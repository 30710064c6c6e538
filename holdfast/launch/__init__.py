"""Launching a gang: the description of a distributed job, and the launchers that run it.

`Supervisor` owns the restart budget. A launcher starts one launch and follows it to its end.
"""

from holdfast.launch.choose import choose_launcher
from holdfast.launch.interface import GangExit, Job, Launcher
from holdfast.launch.local import LocalLauncher
from holdfast.launch.supervisor import Supervisor

__all__ = ["GangExit", "Job", "Launcher", "LocalLauncher", "Supervisor", "choose_launcher"]
