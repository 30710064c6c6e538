"""Bar U1: the quickstart on this machine, from raw text to a registered model, and the call after it.

`python -m benchmarks.quickstart` runs it in a temporary folder. It prints seconds for the whole (bar: 5 minutes) and
for each step, and the peak memory of all its processes together. The bar for the second call is 3 s.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
COMMAND = [sys.executable, "-m", "holdfast.pipelines.cli", "run", str(SPEC)]


def memory(process: psutil.Process) -> int:
    """Private bytes of a process and all its descendants."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_full_info().uss
        except psutil.Error:
            continue
    return total


def main() -> None:
    """Entry point."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOLDFAST_HOME": home, "NO_COLOR": "1"}
        start, peak = time.perf_counter(), 0
        with (Path(home) / "output").open("w+") as output:
            running = subprocess.Popen(COMMAND, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
            tree = psutil.Process(running.pid)
            while running.poll() is None:
                peak = max(peak, memory(tree))
                time.sleep(0.5)
            first = time.perf_counter() - start
            output.seek(0)
            printed = output.read()
        if running.returncode:
            sys.exit(printed)
        start = time.perf_counter()
        subprocess.run(COMMAND, env=environment, check=True, capture_output=True)
        second_call = time.perf_counter() - start
    steps = ", ".join(
        f"{name} {duration}" for name, duration in re.findall(r"✓ (\w+) +((?:\d+ min )?[\d.]+ s)", printed)
    )
    print(f"quickstart: {first:.0f} s ({steps}), {peak / 2**20:.0f} MiB at most; second call {second_call:.2f} s")


if __name__ == "__main__":
    main()
