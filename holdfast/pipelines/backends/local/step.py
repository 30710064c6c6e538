"""A step of the pipeline in a process that was forked with kfp imported, and how kfp.local comes to start it so.

Promises that it is what `python -m kfp.dsl.executor_main` is, but for the name on its command line: its environment,
streams, exit code, and what a normal interpreter does at its end. What it does not know, and what it cannot fork, is
started as kfp does it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.launch.warm import WarmProcess, WarmServer
from holdfast.runtime.temporary import temporary_folder

# What the worker and every step import; none of it starts a thread.
MODULES = (
    "kfp.components",
    "kfp.local",
    "kfp.dsl.executor_main",
    "holdfast.steps.adapters",
    "holdfast.store",
)
_FUNCTION = "--function_to_execute"
# What kfp compiles for `sh -ec`; the component's source and the executor's arguments come after it.
_SCRIPT = """program_path=$(mktemp -d)
printf "%s" "$0" > "$program_path/ephemeral_component.py"
_KFP_RUNTIME=true {python} -m kfp.dsl.executor_main --component_module_path "$program_path/ephemeral_component.py" "$@"
"""


def start_steps_from(server: WarmServer) -> None:
    """Have kfp.local start the steps from the server, where their command is the one that is known."""
    from kfp.local import subprocess_task_handler

    cold = subprocess_task_handler.run_local_subprocess

    def warm(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        code = None if env_vars else _run(server, full_command)  # a variable may be one that an import has read
        return cold(full_command, env_vars) if code is None else code

    subprocess_task_handler.run_local_subprocess = warm


def _run(server: WarmServer, command: Sequence[str]) -> int | None:
    """Run a step to its end and print what it says; its exit code, or None if it could not be forked."""
    if not _is_known(command):
        return None
    source, arguments = command[3], command[4:]
    with temporary_folder("step") as folder:
        path = Path(folder) / "ephemeral_component.py"
        name = arguments[arguments.index(_FUNCTION) + 1]
        try:
            path.write_text(source, encoding="utf-8")
            process, reader = _started(server, [name, str(path), *arguments], {**os.environ, "_KFP_RUNTIME": "true"})
        except OSError as error:
            print(f"{name} imports kfp itself: {error}", flush=True)  # noqa: T201 - standard output is the log
            return None
        with os.fdopen(reader, errors="replace") as said:
            for line in said:
                print(line, end="")  # noqa: T201
        return process.wait()


def _is_known(command: Sequence[str]) -> bool:
    known = _SCRIPT.format(python=sys.executable).split()
    return list(command[:2]) == ["sh", "-ec"] and command[2].split() == known and _FUNCTION in command[4:-1]


def _started(server: WarmServer, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[WarmProcess, int]:
    reader, writer = os.pipe()
    try:
        # In the session of this process, as kfp has it: who ends that ends the step.
        return server.start(__name__, arguments, environment, writer, writer, new_session=False), reader
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)


def main() -> None:
    """Run the component of the file that the second argument names, in a process of the server."""
    from kfp.dsl.executor_main import executor_main

    _, path, *arguments = sys.argv[1:]  # its name is there for people, first on the command line
    sys.argv[1:] = ["--component_module_path", path, *arguments]
    try:
        executor_main()
    finally:  # as an interpreter does; what was forked leaves without it
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
