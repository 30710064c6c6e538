"""One accelerator: exactness, kernels, memory against the plan, MFU, recovery, save stall, locked memory, health.

`python -m benchmarks.accelerator [--seconds N] [--only exactness,mfu] [--out FOLDER] [--tiny]` needs a CUDA device and
no network. `--tiny` uses small shapes, on the CPU if there is no CUDA device.

Each measurement is a process with a time limit. It is forked from this process, which has imported the modules and
never uses the device. Only the resumed run of `exactness` and `recovery` is a new Python process, as after a real
failure. A measurement that fails or is cut is recorded with its output, and with the parts that it had finished. Then
the next one starts. `accelerator.json` and the report `accelerator.md` are replaced after each measurement, so a run
that is cut keeps the figures of the finished ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.accelerator.child import MEASURES
from benchmarks.accelerator.request import Request
from benchmarks.accelerator.runner import SECTIONS, Bench


def main() -> None:
    """Entry point, of the benchmark and of a measurement in a new process."""
    parser = argparse.ArgumentParser("accelerator", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="time for all sections")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help="sections, separated by commas; they run in the given order"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON and the report")
    parser.add_argument("--tiny", action="store_true", help="small shapes, also on a CPU")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each MFU variant")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.request:
        request = Request(**json.loads(arguments.request))
        MEASURES[request.measure](request)
        return
    sections = arguments.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; there are {', '.join(SECTIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments, Path(name))
        if bench.accelerator == "cpu" and not arguments.tiny:
            parser.error("no CUDA device is visible to torch; use --tiny on a CPU")
        for section in sections:
            bench.run(section)
    print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
