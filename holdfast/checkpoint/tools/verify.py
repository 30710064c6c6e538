"""Verifying a checkpoint to its last byte: every object that it needs, every checksum, and the digest of the whole
state.

The additive digest is computed anew from what was read. This also finds a checkpoint whose parts are each intact but
are not the state that was saved.
"""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint.damage_reports import DamageError
from holdfast.checkpoint.fingerprint import StateDigest, digest_of, scalars_digest
from holdfast.checkpoint.reader import Checkpoint, open_checkpoint
from holdfast.checkpoint.tools.difference import parts_of
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout

MAX_DAMAGES = 100  # limit of reports for one checkpoint


@dataclass(frozen=True)
class Damage:
    """A damaged object of a checkpoint, and the tensor that it affects."""

    key: str
    tensor: str  # empty for an object that holds no tensor's bytes
    reason: str


@dataclass(frozen=True)
class Verified:
    """The result of reading a checkpoint."""

    step: int
    bytes: int  # correct bytes of tensors that were read
    damages: tuple[Damage, ...] = ()
    collected: bool = False  # retention deleted it meanwhile, so nothing is known of it
    export: str = ""  # key prefix of the exported model that was read; empty for a checkpoint

    @property
    def intact(self) -> bool:
        """Whether every byte is as it was written."""
        return not (self.damages or self.collected)


def verify(store: Store, run_id: str, step: int, progress: Callable[[int, int], None] = lambda *_: None) -> Verified:
    """Read the checkpoint at `step`. `progress` is called with the bytes read so far and the total. Raises
    StoreUnreachableError and the like for a store that does not answer, which says nothing of the checkpoint."""
    root, done = layout.checkpoint(run_id, step), 0
    damages: list[Damage] = []
    try:
        checkpoint = open_checkpoint(store, run_id, step)
        damages, done, digest = _read(checkpoint, progress)
    except MissingError:
        return Verified(step, done, collected=True)
    except DamageError as error:  # an index above a tensor
        damages = [Damage(error.suspect.key, "", error.suspect.reason)]
    except DataError as error:
        damages = [Damage(root, "", str(error))]
    else:
        computed = str(digest + scalars_digest(checkpoint.manifest.scalars))
        if not damages and computed != checkpoint.manifest.state_digest:
            reason = f"the state has the digest {computed}, and {checkpoint.manifest.state_digest} was committed"
            damages = [Damage(root, "", reason)]
    if damages and store.stat(root) is None:
        return Verified(step, done, collected=True)
    return Verified(step, done, tuple(damages))


def _read(checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> tuple[list[Damage], int, StateDigest]:
    """Read all tensors. Return the damage, the number of correct bytes, and the digest."""
    total = sum(info.elements * info.itemsize for info in checkpoint.tensors.values())
    damages: dict[tuple[str, str], Damage] = {}
    digest, right, read = StateDigest(), 0, 0
    for name, info in checkpoint.tensors.items():
        for part in parts_of(name, info):
            try:
                checkpoint.fill([part])
                digest += digest_of([part])
                right += part.data.nbytes
            except DamageError as error:
                damage = Damage(error.suspect.key, name, error.suspect.reason)
                damages.setdefault((damage.key, name), damage)
                if len(damages) >= MAX_DAMAGES:
                    return list(damages.values()), right, digest
            read += part.data.nbytes
            progress(read, total)
    return list(damages.values()), right, digest
