"""A step as a process of this machine, for the runner.

Its output is printed line by line behind a label, without secrets. Lines of different steps never mix.
"""

import math
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from holdfast.runtime.output import printed_by
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import ExitCode
from holdfast.spec.json_parsing import parse_json_object

DRAIN_SECONDS = 5.0  # for remaining output, because a child process may keep the pipe open

_printing = threading.Lock()


class StepProcess:
    """One execution of a step. Start it from a thread that outlives the process: the kernel counts that thread as its
    parent.
    """

    leave_seconds = math.inf  # saving has no time limit

    def __init__(
        self,
        step: str,
        label: str,
        spec: str,
        arguments: Sequence[str],
        start: Callable[[Sequence[str]], subprocess.Popen[bytes]],
    ) -> None:
        """`label`: prefix of each line; `spec`: its text; `start`: starts a process with these arguments."""
        self._label, self._resources = label, ExitStack()
        folder = Path(self._resources.enter_context(temporary_folder("step")))
        file, self._output = folder / "spec.yaml", folder / "result.json"
        file.write_text(spec, encoding="utf-8")
        self._process = start([step, f"--spec={file}", f"--output={self._output}", *arguments])
        self._reader = threading.Thread(target=self._print, name=f"output of {label}", daemon=True)
        self._reader.start()
        self._result: Mapping[str, Any] = {}

    def poll(self) -> int | None:
        """See Handle."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(DRAIN_SECONDS)
        if code == ExitCode.OK and self._output.is_file():
            self._result = parse_json_object(self._output.read_bytes(), f"the result of {self._label}")
        self._resources.close()
        return 128 - code if code < 0 else code

    def wait(self, seconds: float) -> None:
        """Return when the process has ended, or after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def result(self) -> Mapping[str, Any]:
        """See Handle."""
        return self._result

    def stop(self, *, force: bool) -> None:
        """See Handle."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL if force else signal.SIGTERM)

    def _print(self) -> None:
        for lines in printed_by(self._process):
            text = "".join(f"[{self._label}] {line}\n" for line in lines.splitlines())
            with _printing:
                print(text, end="", flush=True)  # noqa: T201 - the log of the run
