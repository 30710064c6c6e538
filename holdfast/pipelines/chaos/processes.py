"""Processes of a run on this machine, by role, among the descendants of the process that started it."""

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import psutil

WORKERS = ("holdfast.rank.worker", "holdfast.script.process")
TORCHRUN = "holdfast.launch.torchrun"
AGENT = "holdfast.launch.node.agent"
PIPELINE = "holdfast.pipelines.backends.local.worker"
SERVER = "holdfast.launch.processes"  # forks the torchrun of every launch but the first


def ranks_of(root: psutil.Process) -> dict[int, psutil.Process]:
    """The training ranks below a process, by number."""
    ranks = {}
    for process, command in _below(root):
        if any(worker in command for worker in WORKERS) and TORCHRUN not in command:
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                ranks[int(process.environ()["RANK"])] = process
    return dict(sorted(ranks.items()))


def running(root: psutil.Process, module: str) -> psutil.Process | None:
    """The descendant that was started with `-m module`; merely importing it does not count."""
    return next((process for process, command in _below(root) if ("-m", module) in pairwise(command)), None)


def launcher_of(root: psutil.Process) -> psutil.Process | None:
    """The process of the train step, which launches the gang."""
    torchrun = running(root, TORCHRUN)
    with contextlib.suppress(psutil.Error):
        parent = None if torchrun is None else torchrun.parent()
        return parent.parent() if parent and any(SERVER in word for word in parent.cmdline()) else parent
    return None


def largest(root: psutil.Process) -> psutil.Process | None:
    """The descendant with the most memory, which the kernel would kill first without free memory."""
    sizes = []
    for process, _ in _below(root):
        with contextlib.suppress(psutil.Error):
            sizes.append((process.memory_info().rss, process.pid, process))
    return max(sizes)[2] if sizes else None


def _below(root: psutil.Process) -> Iterator[tuple[psutil.Process, list[str]]]:
    with contextlib.suppress(psutil.Error):
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield process, process.cmdline()
