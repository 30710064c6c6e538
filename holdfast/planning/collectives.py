"""Duration of collectives: the alpha-beta model over the links in a node and the network between nodes.

A message of S bytes takes alpha + S / beta. Formulas: Thakur, Rabenseifner and Gropp 2005 (ring, recursive halving and
doubling), Sanders, Speck and Träff 2009 (two trees). The slowest link limits a group that spans nodes. The hierarchical
all-reduce first adds within each node, so every accelerator sends only its share to other nodes. Within a node,
measurements (`Accelerator.lines`) replace the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.planning.hardware import Accelerator


@dataclass(frozen=True)
class Group:
    """A communication group of `size` ranks, `inside` of them in each node."""

    size: int
    inside: int
    accelerator: Accelerator

    @property
    def nodes(self) -> int:
        """The number of nodes that it spans."""
        return max(1, self.size // max(1, self.inside))

    @property
    def alpha(self) -> float:
        """Seconds until the first byte, over its slowest link."""
        return self.accelerator.network_latency if self.nodes > 1 else self.accelerator.link_latency

    @property
    def beta(self) -> float:
        """Bytes per second of a ring. One ring member uses the node's adapters; parallel rings can use the rest."""
        accelerator = self.accelerator
        between = accelerator.network * self.inside if self.nodes > 1 else accelerator.link
        return min(accelerator.link, between) * accelerator.link_reach

    def measured(self, collective: str, size: float) -> float | None:
        """Seconds by measurements of groups of this size, otherwise of the next larger or the largest one.

        None without measurements, and between nodes.
        """
        lines = [line for line in self.accelerator.lines if line.collective == collective]
        if not lines or self.nodes > 1:
            return None
        line = min(lines, key=lambda each: (each.ranks < self.size, abs(each.ranks - self.size)))
        rounds, moved = cost(collective, size, self.size)
        return rounds * line.alpha + moved / line.beta

    def within(self) -> Group:
        """Its part within one node."""
        return Group(self.inside, self.inside, self.accelerator)

    def across(self) -> Group:
        """The group of one rank per node."""
        return Group(self.nodes, 1, self.accelerator)


def cost(collective: str, size: float, ranks: int) -> tuple[int, float]:
    """Rounds of messages, and bytes that a rank sends, in a collective of `ranks` ranks with `size` bytes each.

    A measured line is a function of these two.
    """
    steps, share = math.ceil(math.log2(ranks)), (ranks - 1) / ranks
    if collective == "point_to_point":
        return 1, size
    if collective == "all_reduce":
        return 2 * steps, 2 * share * size
    return steps, share * size


def group(accelerator: Accelerator, size: int, stride: int = 1) -> Group:
    """A group of `size` ranks, `stride` ranks apart. Ranks fill one node after another."""
    return Group(size, max(1, min(size, accelerator.node // stride)), accelerator)


def point_to_point(size: float, over: Group) -> float:
    """Seconds to send `size` bytes to another rank."""
    if (measured_seconds := over.measured("point_to_point", size)) is not None:
        return measured_seconds
    accelerator = over.accelerator
    rate = accelerator.network if over.nodes > 1 else accelerator.link
    return over.alpha + size / (rate * accelerator.link_reach)


def reduce_scatter(size: float, over: Group) -> float:
    """Seconds to add `size` bytes of each rank and leave each with its share.

    The fastest of a ring, recursive halving, and a reduction within each node first.
    """
    return _halved("reduce_scatter", size, over)


def all_gather(size: float, over: Group) -> float:
    """Seconds until each rank has all `size` bytes, of which each had a share. Same formulas as `reduce_scatter`."""
    return _halved("all_gather", size, over)


def _halved(collective: str, size: float, over: Group) -> float:
    if over.size == 1:
        return 0.0
    if (measured_seconds := over.measured(collective, size)) is not None:
        return measured_seconds
    moved = (over.size - 1) / over.size * size / over.beta
    times = [(over.size - 1) * _mean_alpha(over) + moved, math.ceil(math.log2(over.size)) * over.alpha + moved]
    if over.nodes > 1 and over.inside > 1:
        times.append(_halved(collective, size, over.within()) + _halved(collective, size / over.inside, over.across()))
    return min(times)


def _mean_alpha(over: Group) -> float:
    """The mean latency of a ring's links, most of which are within a node."""
    accelerator = over.accelerator
    outside = over.nodes / over.size if over.nodes > 1 else 0.0
    return outside * accelerator.network_latency + (1 - outside) * accelerator.link_latency


def all_reduce_by(size: float, over: Group) -> dict[str, float]:
    """Seconds of an all-reduce of `size` bytes by each algorithm."""
    if over.size == 1:
        return {"none": 0.0}
    if (measured_seconds := over.measured("all_reduce", size)) is not None:
        return {"measured": measured_seconds}
    steps = math.ceil(math.log2(over.size))
    share = (over.size - 1) / over.size
    times = {
        "ring": 2 * (over.size - 1) * _mean_alpha(over) + 2 * share * size / over.beta,
        "tree": 2 * steps * over.alpha + 2 * size / over.beta,
        "halving-doubling": 2 * steps * over.alpha + 2 * share * size / over.beta,
    }
    if over.nodes > 1 and over.inside > 1:
        inner, outer = over.within(), over.across()
        outside = min(all_reduce_by(size / over.inside, outer).values())
        times["hierarchical"] = reduce_scatter(size, inner) + outside + all_gather(size, inner)
    return times


def all_reduce(size: float, over: Group) -> float:
    """Seconds of an all-reduce of `size` bytes by the fastest algorithm."""
    return min(all_reduce_by(size, over).values())


def all_to_all(size: float, over: Group) -> float:
    """Seconds in which each rank sends `size` bytes in total, an equal part to every rank. Each rank uses its own
    adapter to reach other nodes.
    """
    if over.size == 1:
        return 0.0
    if (measured_seconds := over.measured("all_to_all", size)) is not None:
        return measured_seconds
    accelerator = over.accelerator
    outside = (over.size - over.inside) / over.size
    inside = (over.inside - 1) / over.size
    moved = max(
        outside * size / (accelerator.network * accelerator.link_reach),
        inside * size / (accelerator.link * accelerator.link_reach),
    )
    return over.alpha * math.ceil(math.log2(over.size)) + moved
