"""Launching a gang: one description of a distributed job, and the launchers that can run it.

`supervise` owns the restart budget; a launcher starts one attempt and follows it to its end.
"""

from components.launch.choose import choose_launcher
from components.launch.interface import Ending, Job, Launcher
from components.launch.local import LocalLauncher
from components.launch.supervise import supervise

__all__ = ["Ending", "Job", "Launcher", "LocalLauncher", "choose_launcher", "supervise"]
