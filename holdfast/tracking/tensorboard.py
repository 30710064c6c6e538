"""A run as an event file for TensorBoard: every step of its history, its evaluations, its spec.

A run has one file, which appears only whole and is the same for the same run; writing again replaces it.
`holdfast.telemetry` measures. TensorBoard's own library defines the format of the file.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.spec import Spec, dump_spec
from holdfast.spec.errors import MissingError
from holdfast.telemetry import Row

FILE = "events.out.tfevents.0.holdfast"  # TensorBoard looks for `tfevents`
VERSION = "brain.Event:2"  # version of the format, which each file begins with
GROUPS = {"phase_seconds.": "phase_seconds/", "system.": "system/"}  # TensorBoard groups by the part before a slash


def write(folder: Path, spec: Spec, rows: Sequence[Row], evaluations: Iterable[Mapping[str, Any]]) -> Path:
    """Write the file of a run into `folder`; `evaluations` are verdicts. Returns its path. Raises MissingError if the
    library is missing or the folder cannot be written."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise MissingError(
            f"writing for TensorBoard needs its library ({error}); install holdfast[tensorboard]"
        ) from None

    def scalars(figures: Mapping[str, float]) -> Any:
        return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()])

    began = float(rows[0].get("time", 0.0)) if rows else 0.0
    path = folder.absolute() / FILE
    partial = path.with_name(f".{os.getpid()}.part")  # a name that TensorBoard ignores
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            records = RecordWriter(file)
            records.write(Event(wall_time=began, file_version=VERSION).SerializeToString())
            text = text_pb("spec", f"```yaml\n{dump_spec(spec)}\n```")
            records.write(Event(wall_time=began, step=0, summary=text).SerializeToString())
            for step, when, figures in _all(rows, evaluations):
                records.write(Event(wall_time=when, step=step, summary=scalars(figures)).SerializeToString())
            records.flush()
        partial.replace(path)
    except OSError as error:
        raise MissingError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from None
    return path


def _all(
    rows: Sequence[Row], evaluations: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time (Unix seconds) and figures, in the order of the steps."""
    last = 0.0
    for row in rows:
        last = float(row.get("time", 0.0))
        yield (
            int(row["step"]),
            last,
            {_tag(name): value for name, value in _numbers(row) if name not in ("step", "time")},
        )
    for verdict in sorted(evaluations, key=lambda each: int(each["step"])):
        figures = {f"evaluation/{name}": value for name, value in _numbers(verdict.get("metrics") or {})}
        yield int(verdict["step"]), float(verdict.get("time") or last), figures


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return (
        (name, float(value))
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )


def _tag(name: str) -> str:
    return next(
        (group + name.removeprefix(old) for old, group in GROUPS.items() if name.startswith(old)), f"train/{name}"
    )
