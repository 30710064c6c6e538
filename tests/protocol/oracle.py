"""What must hold after every change of the store, checked by somebody who sees everything and is never wrong.

Invariants: a root is complete and has the bits of its step when it appears, and as long as it is visible; an attempt
commits in the order of its steps; what a checkpoint needs that lies there, set aside or pinned included, is never
deleted or changed; what was committed is not lost; and in the end nothing is left over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from holdfast.checkpoint import Manifest, TensorBox, open_checkpoint
from holdfast.store import layout
from tests.protocol.bucket import Bucket, MemoryStore, Stored
from tests.protocol.states import blank, same, state, whole
from tests.protocol.world import Process, World

RUN = "run"
ROOT = re.compile(r"^runs/run/checkpoints/(damaged/)?step-(\d{9})\.json$")


CLAIM = re.compile(r"^runs/run/attempts/(\d{6})\.json$")
LEAF = re.compile(r"^runs/run/indexes/(\d{6}-\d{9})/\d{5}\.idx$")


def attachment(attempt: int, step: int) -> str:
    """What an attempt writes of a step before it commits it."""
    return layout.metrics(RUN, step - 1, step, attempt)


class ViolationError(AssertionError):
    """The protocol broke a promise."""


class Recording(MemoryStore):
    """Reads straight from the bucket and remembers what it read, or could not read because it is too short."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.read: set[str] = set()

    def _get(self, operation: str, key: str, start: int, length: int | None) -> bytes:
        self.read.add(key)
        return super()._get(operation, key, start, length)

    def _read(self, key: str, start: int, data: bytes) -> bytes:
        self.read.add(key)
        return data


class Oracle:
    """Watches a bucket.

    A root of an attempt that was replaced does not count once its successor has committed: nothing is asked of it but
    that nobody uses it, and that it is gone in the end.
    """

    def __init__(self, world: World, bucket: Bucket) -> None:
        self._world, self._bucket = world, bucket
        self.needs: dict[str, frozenset[str]] = {}  # of each root that counts, set aside ones included: its objects
        self.commits: list[tuple[int, int]] = []  # (attempt, step), in the order in which they appeared
        self.forgiven: set[int] = set()  # steps whose checkpoints were damaged on purpose
        self._writer: dict[str, int] = {}  # the attempt of each root
        self._base: dict[int, int] = {}  # from which step an attempt went on
        self._void: set[tuple[int, int]] = set()  # (attempt, step) of roots that do not count
        self._lost: set[tuple[int, int]] = set()  # (attempt, step) of checkpoints that were damaged on purpose
        self._unknown = False  # whether nobody can say what one that was set aside needs
        self.damaged: set[str] = set()  # objects that were damaged on purpose
        self.looked: dict[Process, float] = {}  # when a process last looked for newer attempts
        self._claimed: dict[int, float] = {}  # when each attempt was
        self._whole: dict[str, float] = {}  # when the last index of an attempt's step appeared
        bucket.watchers.append(self._changed)

    def visible(self) -> list[int]:
        """The steps of all checkpoints that count, lowest first."""
        return sorted(int(match[2]) for key in self.needs if (match := ROOT.match(key)) and not match[1])

    def newest(self) -> tuple[int, int]:
        """Attempt and step of the newest checkpoint; zeros if there is none."""
        roots = ((self._writer[layout.checkpoint(RUN, step)], step) for step in self.visible())
        return max(roots, default=(0, 0))

    def require(self, holds: bool, said: Callable[[], str] | str) -> None:
        """Raises ViolationError unless it holds."""
        if not holds:
            raise ViolationError(said if isinstance(said, str) else said())

    def damage(self, root: str, key: str, data: bytes) -> None:
        """Change an object behind the store's back."""
        stored = self._bucket.objects[key]
        self._bucket.objects[key] = Stored(data, stored.modified, stored.version)
        self.damaged.add(key)
        for root_key, needed in self.needs.items():
            match = ROOT.match(root_key)
            if match and (root_key == key or key in needed):
                self._forgive(int(match[2]))

    def _forgive(self, step: int) -> None:
        self.forgiven.add(step)
        self._lost.add((self._writer[layout.checkpoint(RUN, step)], step))

    def intact(self) -> list[int]:
        """The steps of all checkpoints that count and were not damaged."""
        return [step for step in self.visible() if step not in self.forgiven]

    def restored(self, attempt: int, step: int, before: tuple[int, int]) -> None:
        """An attempt goes on from `step`; when it was claimed, `before` was the newest checkpoint."""
        self._base[attempt] = step
        is_newest = step >= before[1] or before in self._void | self._lost
        self.require(is_newest, f"step {before[1]} was committed by attempt {before[0]}, and step {step} was loaded")

    def require_bits(self, boxes: Sequence[TensorBox], expected: Sequence[TensorBox], what: str) -> None:
        """What was read has the bits that it must have."""
        self.require(same(list(boxes), list(expected)), f"{what} has other bits")

    def finished(self, last: int) -> None:
        """All is over: the last step is there, and nothing that no checkpoint needs."""
        self.require(last in self.visible(), f"the last step is {last}, and there are {self.visible()}")
        needed = frozenset().union(*self.needs.values()) | self.needs.keys()
        if self._unknown or any(key in self._bucket.objects and "/packs/" not in key for key in self.damaged & needed):
            return  # a root or an index that cannot be read may need anything
        prefixes = tuple(f"runs/{RUN}/{folder}/" for folder in ("packs", "indexes", "checkpoints/step-"))
        leftovers = [key for key in self._bucket.keys if key.startswith(prefixes) and key not in needed]
        self.require(not leftovers, f"left over: {leftovers}")

    def _changed(self, key: str, before: Stored | None, after: Stored | None) -> None:
        if match := ROOT.match(key):
            if after is None:
                self.needs.pop(key, None)
            else:
                self._appeared(key, int(match[2]), bool(match[1]), after)
            return
        if before is None and (match := CLAIM.match(key)):
            self._claimed[int(match[1])] = self._world.now
        if before is None and (match := LEAF.match(key)):
            self._whole[match[1]] = self._world.now
        if before is None or (after is not None and after.data == before.data):
            return
        for root, needed in self.needs.items():
            if key in needed:
                raise ViolationError(f"{key} was {'changed' if after else 'deleted'}, and {root} needs it")

    def _appeared(self, key: str, step: int, aside: bool, stored: Stored) -> None:
        if aside:
            former = layout.checkpoint(RUN, step)
            void = (self._writer.get(former), step) in self._void
            self.require(step in self.forgiven or void, f"step {step} was set aside, and nothing was wrong with it")
            needed = self.needs.get(former, frozenset())
            known = all("/packs/" in needed_key for needed_key in self.damaged & (needed | {former}))
            self._unknown |= not known
            self.needs[key] = frozenset(
                needed_key for needed_key in needed if known and needed_key in self._bucket.objects
            )
            return
        attempt = Manifest.from_bytes(stored.data, key).attempt
        self._writer[key] = attempt
        if any(other > attempt for other, _ in self.commits):
            self._world.note(f"step {step} of the replaced attempt {attempt} appears, and does not count")
            self._void.add((attempt, step))
            self.needs.pop(key, None)
            return
        self._world.note(f"commit of step {step} by attempt {attempt}")
        self.forgiven.discard(step)
        self._require_fence(attempt, step)
        self.require(attachment(attempt, step) in self._bucket.objects, f"step {step} has not what belongs to it")
        self.needs[key] = self.complete(step)
        newest = max((other for writer, other in self.commits if writer == attempt), default=-1)
        self.require(step > newest, f"attempt {attempt} committed step {step} after step {newest}")
        self.commits.append((attempt, step))
        for former in self.visible():
            root = layout.checkpoint(RUN, former)
            if self._writer[root] < attempt and former > self._base.get(attempt, 0):
                self._void.add((self._writer[root], former))
                del self.needs[root]

    def _require_fence(self, attempt: int, step: int) -> None:
        fence_time = self.looked.get(self._world.process, 0.0)
        whole = self._whole.get(f"{attempt:06d}-{step:09d}", 0.0)
        self.require(
            fence_time >= whole, f"step {step} was committed without a look at the fence once its parts were there"
        )
        newer = [number for number, when in self._claimed.items() if number > attempt and when < fence_time]
        self.require(not newer, f"attempt {attempt} committed step {step}, and could see {newer}")

    def complete(self, step: int) -> frozenset[str]:
        """Read all of a checkpoint, and return the keys that it needs beside the root."""
        store = Recording(self._bucket)
        try:
            self._world.at_once = True
            checkpoint, expected = open_checkpoint(store, RUN, step), whole(state(step))
            self.require(set(checkpoint.tensors) == set(state(step)), f"step {step} holds {sorted(checkpoint.tensors)}")
            read = blank(expected)
            checkpoint.fill(read)
            self.require(same(read, expected), f"step {step} has other bits")
        except Exception as error:
            if store.read & self.damaged:
                self._forgive(step)
                return frozenset(store.read - {layout.checkpoint(RUN, step)})
            if isinstance(error, ViolationError):
                raise
            raise ViolationError(f"step {step} is visible and cannot be read: {error}") from error
        finally:
            self._world.at_once = False
        return frozenset(store.read - {layout.checkpoint(RUN, step)})
