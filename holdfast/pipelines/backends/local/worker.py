"""The process that executes a compiled pipeline with `kfp.local`: `python -m` this module, and a FOLDER.

A process of its own because kfp.local keeps its configuration in a singleton, takes over logging and `print`, and
streams everything to standard output, which is the log file here. Promises that the steps are asked to stop when
whoever started it goes away, so that nothing trains unattended, also where both are killed at once, and that a full
disk under the log costs lines of it and nothing else. Leaves the terminal and the summary to `run`.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO, cast

import yaml

from holdfast.launch.warm import WarmServer
from holdfast.pipelines.backends.local.step import MODULES, start_steps_from
from holdfast.runtime.outcomes import OUTCOMES, STOP_FILE, read_outcomes
from holdfast.runtime.secrets import StreamRedactor
from holdfast.spec.json_parsing import parse_json_object
from holdfast.steps import ARTIFACTS

PIPELINE = "pipeline.yaml"
ARGUMENTS = "arguments.json"
OUTCOMES_FOLDER = "outcomes"
_LINE = 0  # a pipe that nobody writes to: it ends when the process that holds the other end, and started this, does


class _Log(io.FileIO):
    """What it cannot take for want of space is lost, and said once there is some. Lines are redacted."""

    lost = 0  # bytes

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._redactor = StreamRedactor()

    def write(self, data: Any) -> int:
        """See RawIOBase."""
        self._write(self._redactor.line(bytes(data).decode("utf-8", "replace")).encode())
        return len(data)

    def _write(self, data: bytes) -> int:
        try:
            if self.lost:
                super().write(f"[{self.lost} bytes are missing here: there was no space left]\n".encode())
                self.lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.lost += len(data)
            return len(data)


def unfailing(descriptor: int) -> TextIO:
    """A stream of lines to `descriptor`, whose disk may be full."""
    raw = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


def stop_steps(folder: Path) -> None:
    """Ask the running step to save and leave, and let no other one begin (the exit handler still does)."""
    outcomes = folder / OUTCOMES_FOLDER
    (outcomes / STOP_FILE).touch()
    for outcome in read_outcomes(outcomes):
        if outcome.ended is None and outcome.step != "notify":
            try:
                os.kill(outcome.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue


def execute(folder: Path) -> None:
    """Run `pipeline.yaml` with `arguments.json`, both in `folder`. Raises RuntimeError when a step fails."""
    from kfp import components, local

    # The second document says what the pods look like; kfp.local would ignore it without a word.
    pipeline = next(yaml.safe_load_all((folder / PIPELINE).read_text(encoding="utf-8")))
    _leave_the_cluster_out(pipeline)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "artifacts"),
        workspace_root=str(folder / "workspace"),  # kfp.local deletes it after the run
    )
    component = components.load_component_from_text(yaml.safe_dump(pipeline))
    component(**parse_json_object((folder / ARGUMENTS).read_bytes(), ARGUMENTS))


def _leave_the_cluster_out(pipeline: dict[str, object]) -> None:
    """Drop what is meant for pods: their variables, which kfp.local would set here, and the retry policies, which wait
    for minutes and know no exit codes; here the same command is the retry. And what only enters artifacts for a UI."""
    components = cast(dict[str, dict[str, Any]], pipeline["components"])
    entering = {name for name, one in components.items() if ARTIFACTS in one.get("dag", {}).get("tasks", {})}
    nodes: list[object] = [pipeline]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            node.pop("retryPolicy", None)
            for name, task in list(node.get("tasks", {}).items()):
                if task["componentRef"]["name"] in entering:
                    del node["tasks"][name]
            if "image" in node:  # a container
                node.pop("env", None)
            nodes.extend(node.values())


def _stop_when_left_alone(folder: Path) -> None:
    # Not sys.stdin, whose lock a thread that waits for it would keep until after the interpreter has gone.
    os.read(_LINE, 1)
    stop_steps(folder)


def _warm_server(folder: Path) -> WarmServer | None:
    """What forks the steps. Before anything else: what comes after starts threads. It stays when this process is
    killed: whoever follows it asks the step to save and leave, and if that one was killed as well, the server does."""
    environment = dict(os.environ)

    def stop_steps_once() -> None:  # the second time would end the grace that the first one gave
        if not (folder / OUTCOMES_FOLDER / STOP_FILE).exists():
            stop_steps(folder)

    try:
        return WarmServer.fork(MODULES, lingers=(_LINE, stop_steps_once))
    except RuntimeError as error:
        print(f"every step imports kfp itself: {error}", flush=True)  # noqa: T201 - standard output is the log
        return None
    finally:  # what an import left there is not for the steps
        os.environ.clear()
        os.environ.update(environment)


def main() -> int:
    """Run the pipeline in the folder that the command line names."""
    folder = Path(sys.argv[1])
    # kfp.local doubts an image whose name has no `python` in it. The steps run in this very environment.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task", category=RuntimeWarning)
    os.environ[OUTCOMES] = str(folder / OUTCOMES_FOLDER)
    server = _warm_server(folder)
    sys.stdout.flush()
    sys.stdout = sys.stderr = unfailing(1)
    if server is not None:
        start_steps_from(server)
    threading.Thread(target=_stop_when_left_alone, args=[folder], daemon=True).start()
    try:
        execute(folder)
    except RuntimeError as error:
        print(error, flush=True)  # noqa: T201 - standard output is the log
        return 1
    finally:
        if server is not None:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
