"""Search for the weights of the learned policy: `python -m holdfast.simulation.learn`.

It uses the cross-entropy method over the weights of a linear score. Each round draws candidates from a normal
distribution, simulates each on the same synthetic traces, and fits the distribution to the best. The seed determines
the result.
"""

import argparse
import sys

import numpy as np

from holdfast.simulation.cluster import ClusterModel, NodeGroup, synthetic_jobs
from holdfast.simulation.engine import simulate
from holdfast.simulation.policies.base import Learned

CANDIDATES, BEST = 24, 6


def learn(rounds: int, jobs: int, seed: int) -> tuple[float, ...]:
    """Find weights with the lowest mean bounded slow-down over three loads in `rounds` rounds."""
    model = ClusterModel(groups=(NodeGroup(name="train", nodes=32),))
    traces = [synthetic_jobs(jobs, model.gpus, load, seed=seed + index) for index, load in enumerate((0.8, 1.0, 1.3))]
    random = np.random.Generator(np.random.PCG64(seed))
    mean, deviation = np.array(Learned.weights), np.array((0.1, 0.5, 0.5))

    def cost(weights: np.ndarray) -> float:
        policy = type("Candidate", (Learned,), {"weights": tuple(float(weight) for weight in weights)})
        slow = [simulate(model, trace, policy()).slowdown_mean for trace in traces]
        return float(np.mean(np.log(slow)))

    for number in range(rounds):
        drawn = mean + deviation * random.standard_normal((CANDIDATES, len(mean)))
        drawn[:, 0] = np.abs(drawn[:, 0])  # age must help, otherwise a job could starve
        costs = [cost(weights) for weights in drawn]
        best = drawn[np.argsort(costs)[:BEST]]
        mean, deviation = best.mean(axis=0), best.std(axis=0) + 0.02
        sys.stderr.write(f"round {number + 1}: mean slow-down {np.exp(min(costs)):.2f}, weights {mean.round(3)}\n")
    return tuple(round(float(weight), 3) for weight in mean)


def main() -> None:
    """Print the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the search")
    parser.add_argument("--jobs", type=int, default=3000, help="jobs of each trace")
    parser.add_argument("--seed", type=int, default=100, help="seed of the traces and of the search")
    arguments = parser.parse_args()
    sys.stdout.write(f"{learn(arguments.rounds, arguments.jobs, arguments.seed)}\n")


if __name__ == "__main__":
    main()
