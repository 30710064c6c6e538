"""Scores of an export by a user's own code: a command, and functions of a loaded model.

The champion is scored by the same code as the candidate. A command sees exactly the verified files of an export.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from holdfast.code.load import describe
from holdfast.code.resolve import PYTHON, bind, entered_folder
from holdfast.model.exported import fetch_exported
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.output import printed_by
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import DataError, UserCodeError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.operations import Evaluation, Metric, MetricName
from holdfast.store import Store
from holdfast.store.json_reading import read_file_bounded

log = logging.getLogger("holdfast.evaluate")

EXPORT, METRICS = "HOLDFAST_EXPORT", "HOLDFAST_METRICS"  # variables of a command
_NAME = re.compile(get_args(MetricName)[1].pattern)  # of a metric
MAX_METRICS = 1000
MAX_FILE = 2**20  # bytes of the file that a command writes
SHOWN_LINES, SHOWN_CHARACTERS = 15, 300  # of the output of a command that failed, and of each line
DRAIN_SECONDS = 5.0  # for the rest of the output of a command that ended


def score_export(
    evaluation: Evaluation, store: Store, export: str, expected: str, *, functions: bool = False
) -> dict[str, float]:
    """The metrics of an export by the command of a spec, and, with `functions`, by its metrics on the model that
    `load` returns. The code must be entered before (`enter_code`).

    Raises MissingError and DataError for a missing or damaged export, and UserCodeError for code that fails or gives
    something else than numbers.
    """
    with _verified_folder(store, export, expected) as folder:
        values = run_command(evaluation.command, folder, evaluation.timeout_minutes) if evaluation.command else {}
        if functions and evaluation.load is not None:
            values |= _score_loaded(evaluation, folder)
    for metric in evaluation.metrics:
        if metric.use is None and metric.label not in values:
            written = ", ".join(sorted(values)[:10]) or "none"
            raise UserCodeError(
                f"evaluation.metrics: the command wrote no metric {metric.label!r}; it wrote {written}. Correct the "
                "name, or write the metric"
            )
    return values


def run_command(command: Sequence[str], export: Path, minutes: float) -> dict[str, float]:
    """Run a command in the folder of the entered code, for at most `minutes`, and read the metrics that it writes.
    Raises UserCodeError, and DataError without code: a spec from a store runs no command."""
    program, *rest = command
    name = " ".join(command)
    if not entered_folder():
        raise DataError(f"evaluation.command: no code was loaded for {name}; submit the spec from its folder")
    with temporary_folder("evaluate") as temporary:
        file = Path(temporary) / "metrics.json"
        environment = {**os.environ, EXPORT: str(export), METRICS: str(file), "PYTHONDONTWRITEBYTECODE": "1"}
        _run([sys.executable if program in PYTHON else program, *rest], environment, name, minutes)
        if not file.is_file():
            raise UserCodeError(f"{name}: wrote no file {METRICS}; write a JSON object of names and numbers to it")
        try:
            found = parse_json_object(read_file_bounded(file, MAX_FILE), name, finite=False)
        except DataError as error:
            raise UserCodeError(f"{error}; write a JSON object of names and numbers to {METRICS}") from None
    return _checked(found, name)


def _checked(found: dict[str, Any], name: str) -> dict[str, float]:
    if not found or len(found) > MAX_METRICS:
        raise UserCodeError(f"{name}: wrote {len(found)} metrics to {METRICS}; write 1 to {MAX_METRICS:,}")
    for metric, value in found.items():
        if not _NAME.fullmatch(metric):
            raise UserCodeError(f"{name}: wrote the metric {metric!r:.120}; name it with letters, digits and _ . / -")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserCodeError(f"{name}: wrote {metric} = {value!r:.80}; write a number")
        if abs(value) > sys.float_info.max and isinstance(value, int):
            raise UserCodeError(f"{name}: wrote {metric} with more digits than a float has; write a float")
    return {metric: float(value) for metric, value in found.items()}


def number_of(value: object, metric: Metric) -> float:
    """What a metric returned, as a number: also a tensor or an array with one element. Raises UserCodeError."""
    if not isinstance(value, int | float) and hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserCodeError(f"{metric.use}: returned {type(value).__name__}; return one number")
    return float(value)


def _score_loaded(evaluation: Evaluation, folder: Path) -> dict[str, float]:
    """The metrics of functions on the model that `load` returns."""
    assert evaluation.load is not None
    model = _call(evaluation.load.use, bind(evaluation.load), folder)
    functions = [metric for metric in evaluation.metrics if metric.use is not None]
    return {metric.label: number_of(_call(str(metric.use), bind(metric), model), metric) for metric in functions}


def _call(use: str, function: Any, value: Any) -> Any:
    try:
        return function(value)
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
            raise
        raise UserCodeError(f"{use}: failed: {describe(error, Path(entered_folder()))}") from error


def _run(command: Sequence[str], environment: dict[str, str], name: str, minutes: float) -> None:
    """Run a command and pass its output on. Raises UserCodeError if it cannot start, fails or takes too long. Then its
    whole process group is killed. Processes that a command leaves behind when it ends are not waited for."""
    try:
        process = subprocess.Popen(
            command,
            cwd=entered_folder(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except OSError as error:
        raise UserCodeError(
            f"{name}: cannot be started: {error.strerror}: {command[0]}; name a program of the image"
        ) from None
    last: deque[str] = deque(maxlen=SHOWN_LINES)

    def read() -> None:
        for text in printed_by(process):
            for line in text.splitlines():
                log.info("%s", line)
                last.append(line[:SHOWN_CHARACTERS])

    reader = threading.Thread(target=read, name="output-of-command", daemon=True)
    reader.start()
    code: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(minutes * 60)
    finally:
        if process.returncode is None:  # also after a signal
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(DRAIN_SECONDS)
    if reader.is_alive():
        log.warning("%s: ended, and a process that it started still has its output open; it is not waited for", name)
    tail = "".join(f"\n    {line}" for line in tuple(last)) or " (none)"
    if code is None:
        raise UserCodeError(
            f"{name}: was killed after evaluation.timeout_minutes = {minutes:g}; raise it, or score less; the end of "
            f"its output:{tail}"
        )
    if code:
        raise UserCodeError(f"{name}: ended with code {code}; the end of its output:{tail}")


@contextmanager
def _verified_folder(store: Store, export: str, expected: str) -> Iterator[Path]:
    """A folder with the files of an export, and no others. Every byte is verified before and no copy is made of files
    of this machine. Raises MissingError and DataError."""
    files = fetch_exported(store, export, cache_dir() / "exports", expected)
    for name in files.record.files:
        for reason in files.damages(name):
            raise DataError(f"{files.where}/{name}: {reason}; delete that file and run the spec again")
    with temporary_folder("export") as temporary:
        for name in files.record.files:
            path = Path(temporary) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(Path(files.where).absolute() / name)
        yield Path(temporary)
