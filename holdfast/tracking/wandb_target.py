"""Weights & Biases: the history of a run, online or as offline files.

Online, W&B returns the last step that it has, and the copy starts after it. Offline, each copy is one folder in the
format of `wandb sync`. It is written elsewhere and appears by a rename, with the last step that it holds. So a folder
is whole or missing, and the next copy starts after the last step of all folders.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.runtime.environment import home, make_folder
from holdfast.runtime.locks import lock_within
from holdfast.spec import Spec, digest
from holdfast.spec.errors import HungError
from holdfast.spec.json_parsing import parse_json_object

if TYPE_CHECKING:
    from wandb import Run

    from holdfast.tracking.history_copy import StepMetrics
    from holdfast.tracking.interface import Status

OFFLINE_SECONDS = 60.0  # between two folders: each costs the start of a process
LOCK_SECONDS = 60.0
CONTENT = "holdfast.json"  # in each folder: its last step, and the digest of its summary
_SETTINGS: dict[str, Any] = {  # a mirror of metrics: nothing of this process, its machine or its code
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
}


def is_online() -> bool:
    """Whether rows are sent: WANDB_MODE says so, else whether WANDB_API_KEY is set."""
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return mode == "online"


class WandbTarget:
    """One run of the W&B project that is named as the spec's experiment. Its id is the run id."""

    name = "Weights & Biases"

    def __init__(self, spec: Spec, run_id: str) -> None:
        self._spec, self._run_id, self._online = spec, run_id, is_online()
        self._folder = Path(os.environ.get("WANDB_DIR") or home()) / "wandb"
        self._run: Run | None = None
        self._exit_code = 0
        self.interval = 0.0 if self._online else OFFLINE_SECONDS

    def last_step(self) -> int:
        """The last step at W&B, or in the folders."""
        if self._online:
            return int(self._connect().step) - 1
        return max((int(content["last_step"]) for content in self._contents()), default=0)

    def write(self, points: Sequence[StepMetrics]) -> None:
        """Log the points. Offline, a concurrent copy of the same steps is not repeated."""
        if self._online:
            _log(self._connect(), points)
            return
        with self._locked():
            last = self.last_step()  # another process may have copied them since
            new = [point for point in points if point.step > last]
            if new:
                with self._new_folder({"last_step": new[-1].step}) as run:
                    _log(run, new)

    def summarize(self, figures: Mapping[str, float | str]) -> None:
        """Update the run's summary."""
        if self._online:
            self._connect().summary.update(dict(figures))
            return
        mark = digest(dict(figures))
        with self._locked():
            if all(content.get("summary") != mark for content in self._contents()):
                with self._new_folder({"last_step": self.last_step(), "summary": mark}) as run:
                    run.summary.update(dict(figures))

    def close(self, status: Status | None) -> None:
        """Send what is left, and end the run: as failed, unless it finished."""
        if status is not None:
            self._exit_code = int(status != "FINISHED")
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=self._exit_code)

    def _connect(self) -> Run:
        if self._run is None:
            make_folder(self._folder)
            self._run = self._start(self._folder, "online", resume="allow")
        return self._run

    def _start(self, folder: Path, mode: str, **options: Any) -> Run:
        import wandb

        return wandb.init(
            project=self._spec.experiment,
            id=self._run_id,
            name=f"{self._spec.name}-{self._run_id[:8]}",
            config=self._spec.model_dump(mode="json"),
            dir=folder,
            mode=mode,
            settings=wandb.Settings(**_SETTINGS),
            **options,
        )

    def _contents(self) -> Iterator[dict[str, Any]]:
        for path in self._folder.glob(f"offline-run-*-{self._run_id}/{CONTENT}"):
            yield parse_json_object(path.read_bytes(), str(path))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time copies a run. The lock ends with its process."""
        make_folder(self._folder)
        with (self._folder / f".{self._run_id}.lock").open("a") as file:
            if not lock_within(file.fileno(), LOCK_SECONDS):
                raise HungError(f"{file.name}: another process has held it for {LOCK_SECONDS:g} s; end that one")
            yield

    @contextmanager
    def _new_folder(self, content: Mapping[str, Any]) -> Iterator[Run]:
        """A run whose folder appears at the end. The unfinished folder of a killed process is removed."""
        for left in self._folder.glob(f".{self._run_id}-*.part"):
            shutil.rmtree(left, ignore_errors=True)  # its last process may still write, and does not need it
        part = self._folder / f".{self._run_id}-{os.getpid()}-{time.time_ns()}.part"
        part.mkdir()
        run = self._start(part, "offline")
        yield run
        run.finish(exit_code=0)
        (written,) = (part / "wandb").glob("offline-run-*")
        (written / CONTENT).write_text(json.dumps(content), encoding="utf-8")
        seconds = int(time.time())
        while (place := self._folder / f"offline-run-{_stamp(seconds)}-{self._run_id}").exists():
            seconds += 1
        written.rename(place)
        shutil.rmtree(part, ignore_errors=True)


def _log(run: Run, points: Sequence[StepMetrics]) -> None:
    for point in points:
        run.log({**point.metrics, "_timestamp": point.time}, step=point.step)


def _stamp(seconds: int) -> str:
    return time.strftime("%Y%m%d_%H%M%S", time.gmtime(seconds))
