"""Scheduling policies behind one interface: the order of waiting tasks, overtaking, and eviction.

A policy keeps waiting tasks sorted and is called when time has passed. `POLICIES` lists all of them. No policy sees the
true length of a job, only its owner's estimate.
"""

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.simulation.policies.base import Backfill, Conservative, Easy, Learned, Policy, ValueDensity
from holdfast.simulation.policies.eviction import FeedbackQueues, LeastAttained, Priority, ShortestFirst
from holdfast.simulation.policies.placement import Cheap, Elastic, Topology
from holdfast.simulation.policies.shares import DominantShare, FairShare

__all__ = ["POLICIES", "Policy"]

_ORDER: tuple[type[Policy], ...] = (
    *(Policy, Backfill, Easy, Conservative, Priority, FairShare, DominantShare, FeedbackQueues, LeastAttained),
    *(ShortestFirst, ValueDensity, Topology, Cheap, Elastic, Learned),
)
POLICIES: Mapping[str, type[Policy]] = MappingProxyType({policy.name: policy for policy in _ORDER})
