"""Discrete-event simulator of a training cluster: utilization, waiting times and losses of scheduling policies.

A result is a pure function of (cluster, jobs, policy, seed). Bounds that no policy can beat accompany the figures.
Needs neither torch nor a cluster. `pipelines.view` draws the results.
"""

from holdfast.simulation.cluster import ClusterModel, Job, load_cluster, synthetic_jobs
from holdfast.simulation.engine import simulate
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
