"""The runner: the sections of the benchmark, their measurements, and the results on disk."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accelerator.child import import_modules, run_in_child
from benchmarks.accelerator.report import markdown
from benchmarks.accelerator.request import Request, replace_text

SECTIONS = ("exactness", "kernels", "memory", "mfu", "recovery", "stall", "locking", "health")
SECONDS = {"train": 100.0, "stall": 100.0, "mfu": 120.0}  # the longest time of one measurement
DEFAULT_SECONDS = 60.0


class Bench:
    """Measures in child processes, and keeps the results on disk."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._out, self._folder = arguments.out, folder
        self._request = Request("machine", "cpu", arguments.tiny, arguments.steps)
        self._deadline = time.monotonic() + arguments.seconds
        self._ended = 0.0  # when the last child ended, in Unix seconds
        self._recovery: dict[str, Any] | None = None  # of the section `exactness`
        import_modules()
        self.results: dict[str, Any] = {"machine": self._run(self._request, 60)}
        cuda = self.results["machine"].get("cuda_device", False)
        self.accelerator = "nvidia" if cuda else "cpu"
        self._request = replace(self._request, accelerator=self.accelerator)
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        replace_text(self._out / "accelerator.json", json.dumps(self.results, indent=1))
        replace_text(self._out / "accelerator.md", markdown(self.results))

    def measure(self, section: str, name: str, measure: str, **options: Any) -> dict[str, Any]:
        """Run one measurement and record its result, or why there is none."""
        left = self._deadline - time.monotonic()
        request = replace(self._request, measure=measure, **options)
        limit = min(left, SECONDS.get(measure, DEFAULT_SECONDS))
        result = {"error": "no time was left"} if left < 5 else self._run(request, limit)
        self.results.setdefault(section, {})[name] = result
        self.write()
        brief = {key: value for key, value in result.items() if not isinstance(value, (dict, list))}
        print(f"{section} {name}: {json.dumps(brief)}", file=sys.stderr, flush=True)
        return result

    def _run(self, request: Request, seconds: float) -> dict[str, Any]:
        outcome = run_in_child(request, self._folder, seconds)
        self._ended = time.time()
        return outcome

    def _killed_and_resumed(self, section: str) -> dict[str, Any]:
        """A run that is killed and resumed in a new process; returns the times of the recovery."""
        store = f"file://{self._folder / 'store'}"
        self.measure(section, "killed", "train", store=store, run_id="killed", kill=True)
        killed = self._ended
        resumed = self.measure(section, "resumed", "train", store=store, run_id="killed", launch=2, fresh=True)
        if not resumed.get("from_step"):
            return {"error": "the run did not resume from a checkpoint"}
        times = resumed["times"]
        return {
            "kill_to_first_step_s": times["first_step"] - killed,
            "python_and_imports_s": times["start"] - killed,
            "group_and_engine_s": times["engine"] - times["start"],
            "restore_s": times["state"] - times["engine"],
            "first_step_s": times["first_step"] - times["state"],
            "from_step": resumed["from_step"],
        }

    def exactness(self) -> None:
        """SIGKILL after a step, resume, and compare digests with an uninterrupted run."""
        store = f"file://{self._folder / 'store'}"
        calm = self.measure("exactness", "uninterrupted", "train", store=store, run_id="uninterrupted")
        self._recovery = self._killed_and_resumed("exactness")
        outcome = self.results["exactness"]
        outcome["same_digest"] = "digest" in calm and calm["digest"] == outcome["resumed"].get("digest")
        outcome["resumed_from_step"] = outcome["resumed"].get("from_step", 0)

    def run(self, section: str) -> None:
        """Run all measurements of a section."""
        if section == "exactness":
            self.exactness()
        elif section == "recovery":
            self.results["recovery"] = self._recovery or self._killed_and_resumed("recovery runs")
        elif section == "mfu":
            levels = ("off", "exact", "exact-documents", "bare")
            compiled = () if self._request.tiny else tuple(f"{level}-compiled" for level in levels)
            for variant in (*levels, *compiled):
                self.measure("mfu", variant, "mfu", variant=variant)
        else:
            folder = self._folder / section
            folder.mkdir()
            self.measure(section, "all", section, store=str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        self.write()
