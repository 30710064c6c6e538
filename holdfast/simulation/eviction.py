"""Selection of victims for a gang: few and cheap tasks that clear what it needs, node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task


class Evictor:
    """Victims among the currently running tasks, cheapest first. Create one for each round."""

    def __init__(self, simulation: Simulation, candidates: Sequence[Task]) -> None:
        self._simulation, self._candidates = simulation, list(candidates)

    def victims(self, task: Task, worse: Callable[[Task, Task], bool]) -> list[Task] | None:
        """Running tasks whose places make room for `task`, all of them `worse`; None if there is no such set.

        The returned tasks are no longer candidates.
        """
        machine = self._simulation.machine
        gain: dict[int, int] = defaultdict(int)
        on_node: dict[int, list[Task]] = defaultdict(list)
        cleared: list[int] = []
        for victim in self._candidates:
            if victim.placement is None or not worse(victim, task):
                continue
            pool = machine.pool_of[victim.placement[0][0]]
            size = pool.group.gpus
            if task.job.group and pool.group.name != task.job.group:
                continue
            nodes, rest = divmod(task.job.gpus, size)
            needed = nodes + (rest > 0)
            for node, count in victim.placement:
                gain[node] += count
                on_node[node].append(victim)
                wanted = size if nodes else rest
                had = gain[node] - count + pool.free_on(node)
                if had < wanted <= had + count:
                    cleared.append(node)
            whole = pool.whole if nodes else 0
            if len(cleared) + whole >= needed:
                chosen = {victim: None for node in cleared[: needed - whole] for victim in on_node[node]}
                self._candidates = [other for other in self._candidates if other not in chosen]
                return list(chosen)
        return None
