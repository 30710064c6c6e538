"""A discrete-event simulator of a training cluster: which scheduling policy fills it, how long jobs wait, what is lost.

Promises that a result is a pure function of (cluster, jobs, policy, seed), and that every figure stands beside a bound
that no policy can beat. Needs neither torch nor a cluster. Leaves drawing to `pipelines.view`.
"""

from holdfast.simulation.cluster import ClusterModel, load_cluster
from holdfast.simulation.engine import simulate
from holdfast.simulation.jobs import Job, synthetic_jobs
from holdfast.simulation.outcome import Bounds, Outcome, bounds
from holdfast.simulation.policies import POLICIES, Policy

__all__ = [
    "POLICIES",
    "Bounds",
    "ClusterModel",
    "Job",
    "Outcome",
    "Policy",
    "bounds",
    "load_cluster",
    "simulate",
    "synthetic_jobs",
]
