"""Reservation of resources on a Ray cluster: a placement group, with reported and bounded waiting.

Ray itself waits without limit for what no node can hold, and only its own log says so. Here, the wait is reported
within seconds, with what is needed and what the nodes have, and its limit is known.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.launch.reporting import WaitReport

log = logging.getLogger("holdfast.launch")

SAY_AFTER = 3.0  # seconds without a group until the wait is reported
KINDS = 8  # of nodes, at most, in a report
BYTES = ("memory", "object_store_memory")
Amounts = Mapping[str, float]


class GangReservation:
    """`count` bundles of one size, each on a separate node if there are several. Reserved from creation until
    `free`."""

    def __init__(
        self,
        name: str,
        bundle: Amounts,
        count: int = 1,
        *,
        patience: float,
        avoided: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the requester. `bundle`: amounts by Ray's names, memory in bytes. `patience`: seconds that it may be
        missing at a time. `avoided`: ids of nodes that must not be used."""
        self._name, self._bundle, self._count = name, dict(bundle), count
        self._patience, self._avoided, self._clock = patience, frozenset(avoided), clock
        self._missing_since: float | None = clock()
        self._reported_at = clock() - SAY_AFTER
        self._report = WaitReport(clock)
        labels = {"ray.io/node-id": f"!in({','.join(sorted(self._avoided))})"}
        unique = f"{name} {secrets.token_hex(4)}"  # Ray refuses a second group with the same name, also of another job
        self.group = placement_group(
            [self._bundle] * count,
            strategy="STRICT_SPREAD",
            name=unique,
            bundle_label_selector=[labels] * count if self._avoided else None,
        )

    def is_ready(self, *, queued: bool = False) -> bool:
        """Whether it is reserved now; reports what it waits for if not. `queued`: it waits for reservations of its kind
        to end, without a time limit."""
        if placement_group_table(self.group).get("state") == "CREATED":
            self._missing_since = None
            self._report.end()
            return True
        now = self._clock()
        self._missing_since = now if queued or self._missing_since is None else self._missing_since
        if now - self._missing_since >= SAY_AFTER and now - self._reported_at >= SAY_AFTER:
            self._reported_at = now
            self._report.record(f"{self.shortfall()}; cluster.pending_timeout_minutes: {self._patience / 60:g}")
        return False

    @property
    def is_expired(self) -> bool:
        """Whether it has been missing for longer than `patience`."""
        return self._missing_since is not None and self._clock() - self._missing_since >= self._patience

    def shortfall(self) -> str:
        """What is needed, and what the nodes have."""
        return shortfall(self._name, self._bundle, self._count, nodes_of(self._avoided))

    def place(self, number: int = 0) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy that puts a task or an actor into a bundle."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    def free(self) -> None:
        """Return the reservation. Ray kills what still runs in it."""
        with suppress(RayError):
            remove_placement_group(self.group)


def nodes_of(avoided: Iterable[str] = ()) -> list[dict[str, float]]:
    """The total resources of each living node, used or not, without the nodes in `avoided`."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in set(avoided)]


def fits(bundle: Amounts, node: Amounts) -> bool:
    """Whether a node is large enough, used or not."""
    return all(node.get(name, 0) >= value for name, value in bundle.items())


def shortfall(name: str, bundle: Amounts, count: int, nodes: Sequence[Amounts]) -> str:
    """The reason why `count` bundles do not fit on nodes with these total resources."""
    fitting = sum(fits(bundle, node) for node in nodes)
    demand = (
        f"{count} nodes with {format_resources(bundle)} each"
        if count > 1
        else f"a node with {format_resources(bundle)}"
    )
    kinds = Counter(format_resources({key: node[key] for key in _named_resources(bundle, node)}) for node in nodes)
    available = "; ".join(f"{number} with {resources}" for resources, number in kinds.most_common(KINDS))
    if fitting >= count:
        reason = "others use what is large enough"
    else:
        reason = f"{fitting or 'none'} of Ray's {len(nodes)} nodes {'is' if fitting <= 1 else 'are'} large enough"
    return f"{name} wants {demand}, and {reason}" + (f"; there are {available}" if available else "")


def format_resources(amounts: Amounts) -> str:
    """Amounts in readable form: `2 CPU, 4 GiB memory, 1 GPU`."""
    texts = [
        f"{value / 2**30:.4g} GiB {name}" if name in BYTES else f"{value:g} {name}"
        for name, value in sorted(amounts.items(), key=lambda item: (item[0] not in ("CPU", "memory"), item[0]))
    ]
    return ", ".join(texts) or "nothing"


def _named_resources(bundle: Amounts, node: Amounts) -> list[str]:
    """The resources of a node that matter: those in the bundle, and its accelerators."""
    return [name for name in node if name in bundle or name in ("CPU", "memory", "GPU", "NPU", "HPU", "TPU")]


def options_of(bundle: Amounts) -> dict[str, Any]:
    """A bundle as the options of a task or an actor that takes all of it."""
    remaining = dict(bundle)
    named = {
        "num_cpus": remaining.pop("CPU", 0),
        "memory": remaining.pop("memory", 0),
        "num_gpus": remaining.pop("GPU", 0),
    }
    return {**named, "resources": remaining}
