"""Run the seeded simulation of the checkpoint protocol.

`python -m tests.protocol.simulation --seed 4711` runs one seed and prints all events. `--seconds 3600` runs seeds for
an hour. `--first 1 --count 1000` runs a range of seeds.
"""

import argparse
import itertools
import logging
import sys
import time
import traceback

import torch

from tests.protocol.scenario import simulate


def main() -> int:
    """See the module. The exit code is 1 if a seed breaks an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed, with its trace")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seconds", type=float, help="continue for this long instead")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first that fails")
    chosen = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if chosen.seed is not None:
        trace: list[str] = []
        try:
            simulate(chosen.seed, trace)
        finally:
            print("\n".join(trace))
        return 0
    start, failed, seed = time.monotonic(), [], chosen.first
    for seed in itertools.count(chosen.first):
        elapsed = time.monotonic() - start
        if elapsed >= chosen.seconds if chosen.seconds else seed >= chosen.first + chosen.count:
            break
        try:
            simulate(seed)
        except Exception:  # noqa: BLE001 - any is a failure of that seed
            failed.append(seed)
            print(f"seed {seed}: {traceback.format_exc(limit=-3)}", flush=True)
            if not chosen.keep_going:
                break
    seeds, minutes = seed - chosen.first, (time.monotonic() - start) / 60
    print(f"{seeds} seeds, {seeds / minutes:.0f} a minute; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
