"""The simulator at its bar: 10,000 accelerators x 100,000 jobs on one core. `python -m benchmarks.simulator`.

Prints a line per policy with its seconds and figures, and the slowest one against the bar (S2: 60 s).
"""

from __future__ import annotations

import argparse
import time

from holdfast.simulation import POLICIES, ClusterModel, bounds, simulate, synthetic_jobs
from holdfast.simulation.cluster import NodeGroup

BAR = 60.0  # seconds


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=1250, help="of eight accelerators each")
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    arguments = parser.parse_args()
    model = ClusterModel(groups=(NodeGroup(name="train", nodes=arguments.nodes, mtbf_hours=4000),))
    jobs = synthetic_jobs(arguments.jobs, model.gpus, 1.0)
    least = bounds(model, jobs)
    print(f"bound: utilisation {least.utilisation:.3f}, wait {least.wait_mean:.0f} s, makespan {least.makespan:.0f} s")
    worst = 0.0
    for name in arguments.policy or POLICIES:
        start = time.perf_counter()
        outcome = simulate(model, jobs, POLICIES[name]())
        seconds = time.perf_counter() - start
        worst = max(worst, seconds)
        print(
            f"{name:<15} {seconds:6.1f} s  used {outcome.utilisation:.3f}  wait {outcome.wait_mean:7.0f} s  "
            f"slow-down {outcome.slowdown_mean:.2f}  fairness {outcome.fairness:.2f}  lost {outcome.lost_hours:5.0f} h",
            flush=True,
        )
    print(f"simulator: {model.gpus:,} accelerators x {len(jobs):,} jobs, slowest policy {worst:.1f} s (bar {BAR:g} s)")


if __name__ == "__main__":
    main()
