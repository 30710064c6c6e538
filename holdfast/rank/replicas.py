"""Comparison of replicas: ranks with the same state must hold the same bits, and one that differs computes wrong.

The state digests are compared before any commit of the step, so a wrong weight never reaches a checkpoint.
"""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint import StateDigest, box_digests, digest_of, scalars_digest
from holdfast.collectives import Gang
from holdfast.engines.interface import Engine
from holdfast.spec.errors import LostPeerError, WrongArithmeticError


@dataclass(frozen=True)
class _Copy:
    """The part of one rank's state that other ranks hold too."""

    host: str
    names: list[str]  # names of its tensors
    digests: list[StateDigest]  # digest of each


def state_digest(engine: Engine, gang: Gang, scalars: dict[str, float | int]) -> str:
    """The digest of the whole state, as in a manifest. A collective call."""
    return str(sum(gang.all_gather(digest_of(engine.saved()), StateDigest), scalars_digest(scalars)))


def require_equal_replicas(engine: Engine, gang: Gang, step: int) -> None:
    """Compare the replicas of the state. A collective call. If they differ, it raises WrongArithmeticError on each
    suspect rank and LostPeerError on the remaining ones. The message names ranks, nodes and tensor."""
    replicas = engine.replicas()
    digests = {str(key): box_digests(boxes) for key, boxes in replicas.items()}
    own = {key: sum(group, StateDigest()) for key, group in digests.items()}
    sums = gang.all_gather(own, dict[str, StateDigest])
    groups: dict[str, list[int]] = {}
    for rank, keys in enumerate(sums):
        for key in keys:
            groups.setdefault(key, []).append(rank)
    differing = [key for key, ranks in groups.items() if len({sums[rank][key] for rank in ranks}) > 1]
    if not differing:
        return
    key = differing[0]
    names = [box.name for group, boxes in replicas.items() if str(group) == key for box in boxes]
    copies = gang.all_gather(_Copy(socket.gethostname(), names, digests.get(key, [])), _Copy)
    ranks = groups[key]
    suspects = [ranks[index] for index in suspected([copies[rank].digests for rank in ranks])]
    message = (
        f"step {step}: {_described({rank: copies[rank] for rank in ranks}, suspects)}. Nothing of this step was saved"
    )
    if gang.rank in suspects:
        raise WrongArithmeticError(message)
    raise LostPeerError(message)


def suspected(held: Sequence[object]) -> list[int]:
    """The ranks that differ from the majority. All ranks if no content has a majority."""
    (most, count), *_ = Counter(map(str, held)).most_common()
    return [rank for rank, digest in enumerate(held) if str(digest) != most or 2 * count <= len(held)]


def _described(copies: Mapping[int, _Copy], suspects: Sequence[int]) -> str:
    ranks = ", ".join(f"rank {rank} on {copies[rank].host}" for rank in suspects)
    sound = next((copy for rank, copy in copies.items() if rank not in suspects), copies[suspects[0]])
    differing = [
        name
        for index, name in enumerate(sound.names)
        if any(copies[rank].digests[index] != sound.digests[index] for rank in suspects)
    ]
    if len(suspects) == len(copies):
        summary = f"the replicas differ and none is in the majority: {ranks} are suspects"
    else:
        summary = f"{ranks} differs from the majority of {len(copies)} replicas"
    return (
        f"{summary} (in {differing[0]} and {len(differing) - 1} more tensors): its hardware computes wrong, test it "
        "before it is used again"
    )
