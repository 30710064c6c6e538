"""Invariants of the store, checked after every change by an observer that sees everything.

A root is complete and has the bits of its step, from its appearance until it disappears. An attempt commits its steps
in order. Objects that an existing checkpoint needs are never deleted or changed, even if it is set aside or pinned. A
commit is not lost. At the end, nothing unneeded is left.
"""

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
    """The attachment that an attempt writes for a step before the commit."""
    return layout.metrics(RUN, step - 1, step, attempt)


class ViolationError(AssertionError):
    """The protocol broke an invariant."""


class Recording(MemoryStore):
    """Reads the bucket directly, and records every key that it read or found too short."""

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

    A root of a replaced attempt does not count after its successor has committed. Then the only requirements are that
    no attempt uses it and that it is gone at the end.
    """

    def __init__(self, world: World, bucket: Bucket) -> None:
        self._world, self._bucket = world, bucket
        self.needs: dict[str, frozenset[str]] = {}  # per root that counts, including those set aside: its objects
        self.commits: list[tuple[int, int]] = []  # (attempt, step), in order of appearance
        self.excused: set[int] = set()  # steps with deliberately damaged checkpoints
        self._writer: dict[str, int] = {}  # the attempt of each root
        self._base: dict[int, int] = {}  # the start step of each attempt
        self._void: set[tuple[int, int]] = set()  # (attempt, step) of roots that do not count
        self._lost: set[tuple[int, int]] = set()  # (attempt, step) of deliberately damaged checkpoints
        self._unknown = False  # whether the needs of a checkpoint that was set aside are unknown
        self.damaged: set[str] = set()  # deliberately damaged objects
        self.looked: dict[Process, float] = {}  # the time of each process's last check for newer attempts
        self._claimed: dict[int, float] = {}  # the claim time of each attempt
        self._whole: dict[str, float] = {}  # when the last index of an attempt's step appeared
        bucket.watchers.append(self._changed)

    def visible(self) -> list[int]:
        """The steps of all checkpoints that count, in ascending order."""
        return sorted(int(match[2]) for key in self.needs if (match := ROOT.match(key)) and not match[1])

    def newest(self) -> tuple[int, int]:
        """Attempt and step of the newest checkpoint, or zeros."""
        roots = ((self._writer[layout.checkpoint(RUN, step)], step) for step in self.visible())
        return max(roots, default=(0, 0))

    def require(self, holds: bool, message: Callable[[], str] | str) -> None:
        """Raise ViolationError unless the condition is true."""
        if not holds:
            raise ViolationError(message if isinstance(message, str) else message())

    def damage(self, root: str, key: str, data: bytes) -> None:
        """Change an object without the store's knowledge."""
        current = self._bucket.objects[key]
        self._bucket.objects[key] = Stored(data, current.modified, current.version)
        self.damaged.add(key)
        for root_key, needed_keys in self.needs.items():
            match = ROOT.match(root_key)
            if match and (root_key == key or key in needed_keys):
                self._excuse(int(match[2]))

    def _excuse(self, step: int) -> None:
        self.excused.add(step)
        self._lost.add((self._writer[layout.checkpoint(RUN, step)], step))

    def intact(self) -> list[int]:
        """The steps of all undamaged checkpoints that count."""
        return [step for step in self.visible() if step not in self.excused]

    def restored(self, attempt: int, step: int, before: tuple[int, int]) -> None:
        """An attempt resumes from `step`. At its claim, `before` was the newest checkpoint."""
        self._base[attempt] = step
        is_newest = step >= before[1] or before in self._void | self._lost
        self.require(is_newest, f"step {before[1]} was committed by attempt {before[0]}, and step {step} was loaded")

    def require_bits(self, boxes: Sequence[TensorBox], expected: Sequence[TensorBox], what: str) -> None:
        """Require the expected bits in the given boxes."""
        self.require(same(list(boxes), list(expected)), f"{what} has other bits")

    def finished(self, last: int) -> None:
        """At the end, the last step exists, and no object that no checkpoint needs."""
        self.require(last in self.visible(), f"the last step is {last}, and there are {self.visible()}")
        needed_keys = frozenset().union(*self.needs.values()) | self.needs.keys()
        if self._unknown or any(
            key in self._bucket.objects and "/packs/" not in key for key in self.damaged & needed_keys
        ):
            return  # an unreadable root or index may need any object
        prefixes = tuple(f"runs/{RUN}/{folder}/" for folder in ("packs", "indexes", "checkpoints/step-"))
        leftovers = [key for key in self._bucket.keys if key.startswith(prefixes) and key not in needed_keys]
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
        for root, needed_keys in self.needs.items():
            if key in needed_keys:
                raise ViolationError(f"{key} was {'changed' if after else 'deleted'}, and {root} needs it")

    def _appeared(self, key: str, step: int, aside: bool, stored: Stored) -> None:
        if aside:
            former = layout.checkpoint(RUN, step)
            void = (self._writer.get(former), step) in self._void
            self.require(step in self.excused or void, f"step {step} was set aside, and nothing was wrong with it")
            needed_keys = self.needs.get(former, frozenset())
            is_known = all("/packs/" in needed_key for needed_key in self.damaged & (needed_keys | {former}))
            self._unknown |= not is_known
            self.needs[key] = frozenset(
                needed_key for needed_key in needed_keys if is_known and needed_key in self._bucket.objects
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
        self.excused.discard(step)
        self._require_fence(attempt, step)
        self.require(attachment(attempt, step) in self._bucket.objects, f"step {step} has not what belongs to it")
        self.needs[key] = self.complete(step)
        newest = max((other for writer, other in self.commits if writer == attempt), default=-1)
        self.require(step > newest, f"attempt {attempt} committed step {step} after step {newest}")
        self.commits.append((attempt, step))
        for earlier in self.visible():
            root = layout.checkpoint(RUN, earlier)
            if self._writer[root] < attempt and earlier > self._base.get(attempt, 0):
                self._void.add((self._writer[root], earlier))
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
        """Read the whole checkpoint. Returns the keys that it needs in addition to the root."""
        store = Recording(self._bucket)
        try:
            self._world.uninterrupted = True
            checkpoint, expected = open_checkpoint(store, RUN, step), whole(state(step))
            self.require(set(checkpoint.tensors) == set(state(step)), f"step {step} holds {sorted(checkpoint.tensors)}")
            read = blank(expected)
            checkpoint.fill(read)
            self.require(same(read, expected), f"step {step} has other bits")
        except Exception as error:
            if store.read & self.damaged:
                self._excuse(step)
                return frozenset(store.read - {layout.checkpoint(RUN, step)})
            if isinstance(error, ViolationError):
                raise
            raise ViolationError(f"step {step} is visible and cannot be read: {error}") from error
        finally:
            self._world.uninterrupted = False
        return frozenset(store.read - {layout.checkpoint(RUN, step)})
