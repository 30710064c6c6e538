"""Damage reports: what one reader could not verify of a checkpoint, and when that suffices to quarantine it.

One reader with bad memory or a bad network must never destroy a checkpoint. Two readers must agree: another rank, or
another attempt elsewhere.
"""

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError, DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json

log = logging.getLogger("holdfast.checkpoint")


@dataclass(frozen=True)
class DamageReport:
    """A piece of a pack, an index, or a root manifest, that one reader could not verify."""

    reason: str
    key: str
    start: int = 0  # bytes into the pack
    digest: str = ""  # digest of the index; empty for a root, and for a piece, whose digest is in the index
    index: str = ""  # the key of the index with the place and the digest of the piece
    piece: int = 0  # number of the piece in the index
    node: str = field(default_factory=socket.gethostname)  # where it was read


class DamageError(DataError):
    """Data failed its checksum twice."""

    def __init__(self, suspect: DamageReport) -> None:
        super().__init__(suspect.reason)
        self.suspect = suspect


def confirmed_reason(
    store: Store,
    run_id: str,
    step: int,
    suspects: Mapping[int, DamageReport],
    gang: Gang,
    attempt: int,
    reread: Callable[[DamageReport], bool],
) -> str:
    """The reason on which two readers agree. The second reader is a rank of another node, which reads what a rank
    suspects, or another attempt. Ranks of one node share its memory and its network; they are used only without another
    node. `suspects` by rank, the same on every rank; `reread(suspect)` returns whether it fails here, too. Collective.

    Raises BadReaderError when no reader agrees, with the doubt recorded for the next attempt.
    """
    nodes = gang.all_gather(socket.gethostname(), str)
    assigned = [rank for rank in suspects if gang.size > 1 and _second_reader(rank, nodes) == gang.rank]
    verdicts = gang.all_gather({rank: reread(suspects[rank]) for rank in assigned}, dict[int, bool])
    if confirmed := sorted(rank for each in verdicts for rank, fails in each.items() if fails):
        return suspects[confirmed[0]].reason
    other = partial(_another_attempt, store, run_id, step, suspects, gang.size == 1, attempt)
    if reason := gang.from_rank_0(other, str):
        return reason
    first = next(iter(suspects.values()))
    names = ", ".join(sorted({suspect.node for suspect in suspects.values()}))
    raise BadReaderError(
        f"checkpoint at step {step}: {first.reason}; only node {names} says so. The checkpoint stays where it is, and "
        "is set aside if the next attempt finds the same",
        here=gang.rank in suspects,
    )


def _second_reader(rank: int, nodes: Sequence[str]) -> int:
    """The next rank on another node; the next one where all are on one."""
    candidates = [(rank + distance) % len(nodes) for distance in range(1, len(nodes))]
    return next((other for other in candidates if nodes[other] != nodes[rank]), candidates[0])


def _another_attempt(
    store: Store, run_id: str, step: int, suspects: Mapping[int, DamageReport], alone: bool, attempt: int
) -> str:
    """The reason on which another attempt agrees. It must be on another node, unless this rank is `alone` and has no
    peer. Empty without agreement: then the doubt is recorded."""
    folder = layout.doubts(run_id, step)
    own = f"{folder}{attempt:06d}.json"
    for info in store.list(folder):
        if info.key == own:
            continue
        for report in _recorded(store, info.key):
            for suspect in suspects.values():
                is_same_place = (report.key, report.start) == (suspect.key, suspect.start)
                if is_same_place and (alone or report.node != suspect.node):
                    return suspect.reason
    store.put(own, json.dumps([asdict(suspect) for suspect in suspects.values()]).encode())
    return ""


def _recorded(store: Store, key: str) -> list[DamageReport]:
    """The doubts of another attempt; empty if this reader cannot read them."""
    try:
        return read_json(store, key, list[DamageReport])
    except (MissingError, DataError) as error:
        log.warning("%s counts for nothing, because it cannot be read: %s", key, error)
        return []
