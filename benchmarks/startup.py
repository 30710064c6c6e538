"""How soon Holdfast responds (bar U3): a wrong spec (under 2 s), `--help`, a finished run (under 3 s), and text from
its model, which loads torch.

`python -m benchmarks.startup [--rounds N]` runs each command in a separate process and prints medians and the slowest.
The run is the quickstart's, cut to a few steps, in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
SHORT = [
    "--set",
    "training.steps=4",
    "--set",
    "training.schedule.warmup_steps=1",
    "--set",
    "evaluation.max_tokens=2000",
]
SHORT += ["--set", "evaluation.max_perplexity=null", "--set", "evaluation.prompts=[]"]


def seconds(arguments: list[str], home: Path, expected: int) -> float:
    """Seconds of `holdfast ARGUMENTS`, interpreter included."""
    command = [sys.executable, "-m", "holdfast.pipelines.cli", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "HOLDFAST_HOME": str(home)}, capture_output=True, check=False)
    duration = time.perf_counter() - start
    if done.returncode != expected:
        sys.exit(done.stderr.decode())
    return duration


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        seconds(["run", str(SPEC), *SHORT], home, 0)
        commands = {
            "help": (["--help"], 0),
            "a wrong spec": (["validate", str(SPEC), "--set", "training.stepz=1"], 10),
            "a run that is done": (["run", str(SPEC), *SHORT], 0),
            "a hundred tokens of text": (["models", "generate", "quickstart", "def main("], 0),
        }
        figures = []
        for label, (arguments, expected) in commands.items():
            times = [seconds(arguments, home, expected) for _ in range(rounds)]
            figures.append(f"{label} {statistics.median(times):.2f} s (slowest {max(times):.2f})")
    print(f"startup: {', '.join(figures)}; {rounds} rounds")


if __name__ == "__main__":
    main()
