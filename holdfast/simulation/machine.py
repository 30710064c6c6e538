"""Free accelerators and placement of gangs: best fit inside nodes, whole nodes for large gangs, few racks.

A placement is all or nothing. It takes time proportional to the racks plus the nodes of the gang. The same history
gives the same placement. Policies decide which task starts.
"""

from holdfast.simulation.cluster import ClusterModel, NodeGroup

Placement = list[tuple[int, int]]  # (node, accelerators on it)


class Machine:
    """The free accelerators of a cluster. Node numbers are unique over all groups."""

    def __init__(self, model: ClusterModel) -> None:
        self.pools = []
        self.pool_of: list[Pool] = []  # by node
        for group in model.groups:
            pool = Pool(group, len(self.pool_of))
            self.pools.append(pool)
            self.pool_of += [pool] * group.nodes
        self.up = sum(pool.up for pool in self.pools)

    @property
    def free(self) -> int:
        """Free accelerators on nodes that are up."""
        return sum(pool.free for pool in self.pools)

    def place(self, gpus: int, group: str = "", same_rack: bool = False) -> Placement | None:
        """Take `gpus` accelerators of one group, the fastest that has them. Returns None, without any change, if none
        has.
        """
        best = None
        for pool in self.pools:
            if (
                (not group or pool.group.name == group)
                and pool.free >= gpus
                and (best is None or pool.group.speed > best.group.speed)
                and pool.fits(gpus, same_rack)
            ):
                best = pool
        return None if best is None else best.take(gpus, same_rack)

    def fits(self, gpus: int, group: str = "", same_rack: bool = False) -> bool:
        """Whether `place` would succeed."""
        return any(
            pool.free >= gpus and pool.fits(gpus, same_rack)
            for pool in self.pools
            if not group or pool.group.name == group
        )

    def fits_in_pieces(self, gpus: int, group: str = "") -> bool:
        """Whether `gpus` accelerators fit on a partly used node, which no gang of whole nodes can use."""
        return any(pool.fits_in_pieces(gpus) for pool in self.pools if not group or pool.group.name == group)

    def release(self, placement: Placement) -> None:
        """Return accelerators."""
        for node, count in placement:
            self.pool_of[node].give(node, count)

    def take_down(self, node: int) -> None:
        """Take a node down. Its tasks are already released."""
        self.pool_of[node].set_up(node, False)
        self.up -= self.pool_of[node].group.gpus

    def bring_up(self, node: int) -> None:
        """Bring an empty node up."""
        self.pool_of[node].set_up(node, True)
        self.up += self.pool_of[node].group.gpus

    def racks(self, placement: Placement) -> int:
        """The number of racks that a gang spans."""
        return len({self.pool_of[node].rack_of(node) for node, _ in placement})

    def speed(self, placement: Placement) -> float:
        """The speed of a gang's accelerators."""
        return self.pool_of[placement[0][0]].group.speed

    def partly_free(self) -> int:
        """Free accelerators on partly used nodes, which no whole-node gang can use."""
        return sum(pool.free - pool.whole * pool.group.gpus for pool in self.pools)


class Pool:
    """The nodes of one group."""

    def __init__(self, group: NodeGroup, first: int) -> None:
        self.group, self._first, self._size = group, first, group.gpus
        self._free = [group.gpus] * group.nodes
        self._is_up = [True] * group.nodes
        self.free = self.up = group.nodes * group.gpus
        self.whole = group.nodes  # completely free nodes
        # Nodes by number of free accelerators, in dicts as ordered sets. Completely free ones are by rack.
        self._partly: list[dict[int, None]] = [{} for _ in range(group.gpus)]
        self._racks: list[dict[int, None]] = [
            dict.fromkeys(range(start, min(start + group.rack, group.nodes)))
            for start in range(0, group.nodes, group.rack)
        ]

    def rack_of(self, node: int) -> tuple[int, int]:
        """The rack of a node."""
        return self._first, (node - self._first) // self.group.rack

    def free_on(self, node: int) -> int:
        """Free accelerators of a node."""
        return self._free[node - self._first] if self._is_up[node - self._first] else 0

    def fits(self, gpus: int, same_rack: bool) -> bool:
        """Whether `take` would succeed."""
        nodes, rest = divmod(gpus, self._size)
        if nodes == 0:
            return self.whole > 0 or any(self._partly[rest:])
        if same_rack and nodes > 1:
            return any(len(rack) >= nodes + (rest > 0) for rack in self._racks)
        if self.whole < nodes:
            return False
        return not rest or self.whole > nodes or any(self._partly[rest:])

    def fits_in_pieces(self, gpus: int) -> bool:
        """Whether a partly used node has `gpus` free accelerators."""
        return gpus < self._size and any(self._partly[gpus:])

    def take(self, gpus: int, same_rack: bool) -> Placement:
        """Take `gpus` accelerators. Call only after `fits`."""
        nodes, rest = divmod(gpus, self._size)
        placement: Placement = []
        if same_rack and nodes > 1:
            nodes_needed = nodes + (rest > 0)
            rack = min((rack for rack in self._racks if len(rack) >= nodes_needed), key=len)
            chosen = list(rack)[:nodes_needed]
            placement = [(self._first + node, self._size) for node in chosen[:nodes]]
            if rest:
                placement.append((self._first + chosen[nodes], rest))
        else:
            if nodes:
                placement = [(self._first + node, self._size) for node in self._whole_nodes(nodes)]
            if rest:
                placement.append(
                    (self._first + self._best_fit(rest, {node - self._first for node, _ in placement}), rest)
                )
        for node, count in placement:
            self._change(node - self._first, -count)
        return placement

    def give(self, node: int, count: int) -> None:
        """Return `count` accelerators of a node."""
        self._change(node - self._first, count)

    def set_up(self, node: int, up: bool) -> None:
        """Remove an empty node from the pool, or add it again."""
        index = node - self._first
        if self._is_up[index] == up:
            return
        self._is_up[index] = up
        rack = self._racks[index // self.group.rack]
        sign = 1 if up else -1
        if up:
            rack[index] = None
        else:
            del rack[index]
        self.whole += sign
        self.free += sign * self._size
        self.up += sign * self._size

    def _whole_nodes(self, nodes: int) -> list[int]:
        """Free nodes in the tightest rack that has enough, otherwise in the fewest racks."""
        tightest = None
        for rack in self._racks:
            if len(rack) >= nodes and (tightest is None or len(rack) < len(tightest)):
                tightest = rack
        if tightest is not None:
            return [node for node, _ in zip(tightest, range(nodes), strict=False)]
        idle_nodes: list[int] = []
        for rack in sorted(self._racks, key=len, reverse=True):
            idle_nodes += [node for node, _ in zip(rack, range(nodes - len(idle_nodes)), strict=False)]
            if len(idle_nodes) == nodes:
                break
        return idle_nodes

    def _best_fit(self, gpus: int, excluded: set[int]) -> int:
        for nodes in self._partly[gpus:]:
            if nodes:
                return next(iter(nodes))
        # A fresh node from the fullest rack, so that empty racks stay whole for gangs.
        racks = sorted((rack for rack in self._racks if rack), key=len)
        return next(node for rack in racks for node in rack if node not in excluded)

    def _change(self, index: int, by: int) -> None:
        before = self._free[index]
        now_free = self._free[index] = before + by
        self.free += by
        rack = self._racks[index // self.group.rack]
        if before == self._size:
            del rack[index]
            self.whole -= 1
        elif before:
            del self._partly[before][index]
        if now_free == self._size:
            rack[index] = None
            self.whole += 1
        elif now_free:
            self._partly[now_free][index] = None
