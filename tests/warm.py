"""`python -m MODULE` and `python -c CODE`, forked from a process that has imported what trainings need. Importing torch
and MLflow takes longer than a whole tiny training.

The process is like one of `subprocess.Popen`, with a separate session, environment, command line and exit. If the
requested environment could change an import, it is a new interpreter.
"""

import atexit
import inspect
import os
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.orm import configure_mappers

from holdfast.launch import local as launcher
from holdfast.launch import processes
from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.node import agent
from holdfast.launch.processes import WarmServer
from holdfast.tracking.connection import quiet_mlflow

TRAININGS = ("holdfast.components.train", "tests.faults.held_training")
_OF_A_GANG = (*launcher.MODULES, agent.MODULE, "holdfast.rank.worker", "tests.faults.held_worker")
_IMPORTED = (
    __name__, "holdfast.components.train.__main__", "holdfast.components.register", "holdfast.steps.adapters",
    "holdfast.pipelines.cli.entry", "tests.tracking.racer", *_OF_A_GANG,
)  # fmt: skip
_MATTERS_TO_IMPORTS = ("LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "MALLOC", "GLIBC_")
_DOES_NOT = ("PYTHONUNBUFFERED",)  # lines are flushed immediately anyway
_ROOT = str(Path(__file__).parents[1])
_ENVIRONMENT = {  # variables that launchers set for ranks
    **ACCELERATORS["cpu"].environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's, which MLflow imports
_SERVERS: list[WarmServer] = []  # the server of this process, at most one


class Warm(subprocess.Popen[Any]):
    """A Popen of `[sys.executable, "-m", MODULE, ...]` or `[sys.executable, "-c", CODE, ...]`, with streams, `env` and
    `start_new_session`."""

    def _execute_child(self, *arguments: Any) -> None:
        call = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        environment = dict(os.environ if call["env"] is None else call["env"])
        out, err, read = (None if (end := call[name]) == -1 else end for name in ("c2pwrite", "errwrite", "p2cread"))
        work = [os.fspath(call["cwd"] or "."), *call["args"][1:]]
        self._warm = _SERVERS[0].start(__name__, work, environment, out, err, call["start_new_session"], read)
        self.pid, self._child_created = self._warm.pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[end] for end in ends))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        exit_code = self._warm.poll()
        if exit_code is not None:  # otherwise another thread may know more
            self.returncode = exit_code
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self.returncode = self._warm.wait(timeout)
        return self.returncode


def popen(command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    """Start `command`, warm if it is a `python -m MODULE` or a `python -c CODE`."""
    same = command[0] == sys.executable and command[1] in ("-m", "-c") and _same_imports(env)
    return (Warm if same and ready() else subprocess.Popen)(list(command), env=dict(env), **more)


def run(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end. Returns it with its output."""
    with popen(command, env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, *output)


def ready() -> bool:
    """Whether there is a server. It dies with the thread that started it, so the main thread must call this first."""
    if _SERVERS or threading.current_thread() is not threading.main_thread():
        return bool(_SERVERS)
    _SERVERS.append(WarmServer.spawn(_IMPORTED, {**os.environ, **_ENVIRONMENT, **_NO_THREADS}))
    return True


def _same_imports(environment: Mapping[str, str]) -> bool:
    names = {name for name in (*environment, *os.environ) if name.startswith(_MATTERS_TO_IMPORTS)}
    names -= {*_ENVIRONMENT, *_DOES_NOT, "PYTHONPATH"}
    same = all(environment.get(name) == os.environ.get(name) for name in names)
    same = same and _path(environment) == _path(os.environ)
    return same and all(environment.get(name, value) == value for name, value in _ENVIRONMENT.items())


def _path(environment: Mapping[str, str]) -> list[str]:
    """PYTHONPATH without this tree, which this process has already imported."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", _ROOT)]


def main() -> None:
    """Run what the arguments name: a module, as `python -m` would, or code, as `python -c` would."""
    folder, option, work, *arguments = sys.argv[1:]
    os.chdir(folder)
    if option == "-m" and work in TRAININGS:
        _fork_the_server_of_launches()
    processes._present([sys.executable, option, work, *arguments], dict(os.environ))
    try:
        if option == "-c":
            sys.argv, sys.modules["__main__"] = ["-c", *arguments], types.ModuleType("__main__")
            exec(compile(work, "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))
        else:
            sys.argv = [work, *arguments]
            if not hasattr(sys.modules.get(work), "__path__"):
                sys.modules.pop(work, None)  # otherwise runpy warns that it runs twice
            runpy.run_module(work, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _fork_the_server_of_launches() -> None:
    """The imports of a launcher's `WarmServer.spawn` are already done: its first server is forked now, a later one is
    spawned.
    """
    processes._present([sys.executable, "-c", processes._SERVE], dict(os.environ))
    forked = [WarmServer.fork(_OF_A_GANG)]
    spawn = WarmServer.spawn

    def first(modules: Sequence[str], environment: Mapping[str, str] | None = None) -> WarmServer:
        is_covered = {*modules} <= {*_OF_A_GANG} and environment is not None and _same_imports(environment)
        return forked.pop() if forked and is_covered else spawn(modules, environment)

    WarmServer.spawn = first  # type: ignore[method-assign]


def _import_what_mlflow_would_at_its_first_call() -> None:
    quiet_mlflow()
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    configure_mappers()


_import_what_mlflow_would_at_its_first_call()
